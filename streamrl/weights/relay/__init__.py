"""Weights over many hosts: relays, so that a version leaves the trainer at most twice (``push.relay_tree``)."""
