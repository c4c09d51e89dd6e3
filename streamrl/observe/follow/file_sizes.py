"""Shares of ``metrics.advanced.most_mib`` that the files of a run get which grow with its length."""

from __future__ import annotations

SHARES = {"trace": 1 / 2, "metrics": 1 / 4, "samples": 1 / 16, "evaluations": 1 / 16, "logs": 1 / 8}
"""Of ``trace.jsonl``, ``metrics.jsonl``, ``samples.jsonl``, each with its older part, of all files of evaluations, and
of all logs with their older parts. The journal is cut at every checkpoint instead: it is needed to resume."""


def most_bytes(most_mib: float, files: str) -> int:
    """Bytes of ``files``: of those that are rotated (all but evaluations) the size at which one is rotated."""
    return int(most_mib * (1 << 20) * SHARES[files] / (1 if files == "evaluations" else 2))
