"""One trainer rank: ``trainer`` with its options, process group and metrics; ``updates`` takes its optimizer steps.
Imports torch, ``base``, ``recipe`` and ``rewards``. Weights leave through a ``trainer.Publisher``."""
