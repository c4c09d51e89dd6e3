"""The prompts that control may ask for are there, and not many more. Which those are: ``oracle.control_world``."""

from __future__ import annotations

from streamrl.base.types import Prompt, token_array
from streamrl.buffers.prompt_store import FEW_PROMPTS, PromptStore
from streamrl.control.events import PromptsDrawn


def prompts(first: int, count: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{n}", token_ids=token_array([n])) for n in range(first, first + count)]


def test_what_nobody_needs_is_forgotten_and_asked_for_rarely() -> None:
    prompt_store, asked = PromptStore(), []

    def needed() -> set[str]:
        asked.append(len(prompt_store.prompts))
        return {f"p{n}" for n in range(newest - 40, newest)}

    for newest in range(0, 20 * FEW_PROMPTS, 8):
        assert prompt_store.drawn(prompts(newest, 8), exhausted=False) == PromptsDrawn(
            prompt_ids=tuple(f"p{n}" for n in range(newest, newest + 8)), prompt_tokens=(1,) * 8
        )
        prompt_store.forget_others(needed)
        assert len(prompt_store.prompts) <= FEW_PROMPTS + 8
        for n in range(max(newest - 40, 0), newest + 8):  # those of the last draw, too: control was not told of them
            assert prompt_store[f"p{n}"].token_ids[0] == n
    assert 15 < len(asked) < 30


def test_all_stay_where_all_are_needed() -> None:
    prompt_store, asked = PromptStore(), 0

    def needed() -> set[str]:
        nonlocal asked
        asked += 1
        return {prompt.prompt_id for prompt in prompt_store.prompts}

    for first in range(0, 64 * FEW_PROMPTS, 100):
        prompt_store.put(prompts(first, 100))
        prompt_store.forget_others(needed)
    assert len(prompt_store.prompts) >= 64 * FEW_PROMPTS and asked < 10
