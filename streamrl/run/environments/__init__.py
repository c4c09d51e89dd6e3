"""Environments: user code that runs between the turns of a trajectory, in the worker process of ``worker.py``. Imports
the room's files, rewards, pretrained and rooms before it; no torch."""
