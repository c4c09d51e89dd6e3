"""Rewards of the sums: 1 where the completion has the sum, else 0."""

from __future__ import annotations

import re


async def last_number(completion: str, *, answer: str, **_columns: object) -> float:
    """``answer`` is a column of the prompt files. ``1,000`` is a number, and so is the 12 of ``7 + 5 = 12.``"""
    numbers = re.findall(r"\d+", completion.replace(",", ""))
    return float(numbers[-1:] == [answer])


async def in_brackets(completion: str, *, answer: str, **_columns: object) -> float:
    """1 where the completion is ``[[SUM]]`` and nothing else."""
    return float(completion.strip() == f"[[{answer}]]")
