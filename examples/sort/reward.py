"""The reward of the sorting task: 1 where the policy stopped by itself and its last list is sorted, else 0."""

from __future__ import annotations


async def sorted_trace(completion: str, *, prompt: str, answer: str, finish_reason: str, **_columns: object) -> float:
    """``prompt`` and ``answer`` are columns of the prompt files; an empty trace leaves the list as it was."""
    if finish_reason != "stop" or not completion.endswith("."):
        return 0.0
    last_list = completion[:-1].rpartition(";")[2] or prompt[:-1]
    return float(last_list == answer)
