"""The reward of the rolling task: 1 where the policy counted well, stopped in time and named the row, else 0."""

from __future__ import annotations

from rolling_task import is_right


async def right_row(completion: str, *, prompt: str, finish_reason: str, **_columns: object) -> float:
    """``prompt`` is the column of the prompt files."""
    return float(finish_reason == "stop" and is_right(prompt, completion))
