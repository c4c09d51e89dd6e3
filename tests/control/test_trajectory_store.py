"""The prompts that control may ask for are there, and not many more. Which those are: ``oracle.control_world``."""

from __future__ import annotations

from streamrl.base.types import Prompt, token_array
from streamrl.buffers.trajectory_store import FEW_PROMPTS, TrajectoryStore


def prompts(first: int, count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{n}", token_ids=token_array([n])) for n in range(first, first + count)]


def test_what_nobody_needs_is_forgotten_and_asked_for_rarely() -> None:
    store, asked = TrajectoryStore(), []

    def needed() -> set[str]:
        asked.append(len(store.prompts))
        return {f"p{n}" for n in range(newest - 40, newest)}

    for newest in range(0, 20 * FEW_PROMPTS, 8):
        store.add_prompts(prompts(newest, 8))
        store.forget_other_prompts(needed)
        assert len(store.prompts) <= FEW_PROMPTS + 8
        for n in range(max(newest - 40, 0), newest + 8):  # those of the last draw, too: control was not told of them
            assert store.prompts[f"p{n}"].token_ids[0] == n
    assert 15 < len(asked) < 30


def test_all_stay_where_all_are_needed() -> None:
    store, asked = TrajectoryStore(), 0

    def needed() -> set[str]:
        nonlocal asked
        asked += 1
        return {prompt.prompt_id for prompt in store.prompts.values()}

    for first in range(0, 64 * FEW_PROMPTS, 100):
        store.add_prompts(prompts(first, 100))
        store.forget_other_prompts(needed)
    assert len(store.prompts) >= 64 * FEW_PROMPTS and asked < 10
