"""Weights over many hosts: relays in the engines' processes, so that a version leaves the trainer at most twice
(``engines/push/relay_tree.py``)."""
