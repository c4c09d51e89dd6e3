"""An environment whose turns earn by the tokens that were sampled: some members of a group earn nothing, fail, or end
in turn 1. The run of ``test_turns_trained_on_vllm`` names it."""

from __future__ import annotations

from typing import Any


async def episode(model: Any, prompt: str, **_columns: object) -> float:
    """Two turns or three, of which each earns 0, 0.5 or 1."""
    turn = await model.sample(model.chat_model.tokenizer.encode(prompt))
    kind = sum(turn.token_ids) % 6
    if kind == 0:
        raise ValueError("this member fails")
    if kind == 1:
        return 0.0  # it ends in turn 1, and no turn has a reward
    for following in range(3):
        model.reward(turn, 0.0 if kind == 2 else sum(turn.token_ids) % 3 / 2)
        if following == kind % 2 + 1:
            break
        turn = await model.sample(turn.token_ids[:2])
    return 0.0 if kind == 2 else len(turn.token_ids) % 2 / 2
