"""Streams between coroutines and processes: the contract (``stream``), in memory, over ZeroMQ; the wire format.
Imports ``base``."""
