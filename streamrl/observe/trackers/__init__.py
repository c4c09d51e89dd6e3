"""Trackers as followers: each reads a run's files from a cursor on, in a process of its own (``python -m
streamrl.observe.trackers``), and sends what is new to TensorBoard, Weights & Biases, trackio, Prometheus or a plug-in.
Imports of other wings ``observe/follow`` alone, and no torch."""
