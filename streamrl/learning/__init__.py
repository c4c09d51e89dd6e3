"""One trainer rank: ``trainer`` with its options, process group and metrics.
Imports torch, ``base``, ``recipe`` and ``weights``."""
