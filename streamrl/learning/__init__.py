"""One trainer rank: ``trainer`` with its options, process group and metrics; ``updates`` takes its optimizer steps.

The folders ``batches``, ``model``, ``objective`` and ``state`` are parts of the rank, no wings; ``small_model`` makes
the demo model. A ``contracts.Publisher`` sends weights to the engines. ``launch.roles`` makes one ``TorchTrainer`` in
each trainer process. Most modules import torch; ``canary``, ``kept_sets``, ``rank_memory``, ``routing_replay``,
``threads`` and ``state.durable_files`` do not, and other processes import these, too."""
