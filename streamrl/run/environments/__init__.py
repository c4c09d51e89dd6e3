"""Environments: what a trajectory of several turns meets between them, run by ``worker.py`` in a process of its own.
Imports the room's files, rewards, pretrained and rooms before it; no torch."""
