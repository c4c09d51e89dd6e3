"""The reward of the calculator for an answer."""

from __future__ import annotations


def right(completion: str, *, answer: str, finish_reason: str) -> float:
    """1 where the last turn, which is what a reward function is given, is the answer. ``answer``: a column."""
    return float(finish_reason == "stop" and completion.strip() == answer)
