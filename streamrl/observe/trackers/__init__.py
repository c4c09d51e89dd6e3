"""Trackers: each reads the files of a run from a cursor on, in its own process (``python -m
streamrl.observe.trackers``), and sends the new lines to TensorBoard, Weights & Biases, trackio, Prometheus or a
plug-in. Of other wings only ``observe/run_files`` is imported, and torch is not."""
