"""Shares of ``metrics.advanced.most_mib`` for the files that grow with the length of a run. The controller
(``launch/run_controller.py``, ``launch/observers.py``) and the supervisor (``processes/supervisor.py``) bound their
files by them."""

from __future__ import annotations

SHARES = {"trace": 1 / 2, "metrics": 1 / 4, "samples": 1 / 32, "prompts": 1 / 32, "evaluations": 1 / 16, "logs": 1 / 8}
"""Shares of ``trace.jsonl``, ``metrics.jsonl``, ``samples.jsonl`` and ``prompts.jsonl``, each with its older part, of
all files of
evaluations, and of all logs with their older parts. The journal has no share: every checkpoint shortens it."""


def most_bytes(most_mib: float, files: str) -> int:
    """Return the bytes that ``files``, a key of ``SHARES``, may take. For files that are rotated (all but evaluations)
    it is the size at which a file is rotated: half of the share, as the older part remains."""
    share_bytes = most_mib * (1 << 20) * SHARES[files]
    return int(share_bytes if files == "evaluations" else share_bytes / 2)
