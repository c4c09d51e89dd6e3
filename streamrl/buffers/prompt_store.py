"""Prompts by id: drawn from the source, and stored while control may launch them (again)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Protocol

from streamrl.base.types import Prompt
from streamrl.control.events import PromptsDrawn


class PromptSource(Protocol):
    """Where prompts come from; fewer than asked for means that it is exhausted."""

    async def draw(self, count: int) -> list[Prompt]: ...


FEW_PROMPTS = 256
"""Unneeded prompts that may stay: a search for them costs more."""


class PromptStore:
    """Prompts by id: those that control may launch, and at most as many others."""

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        self._newest: tuple[str, ...] = ()
        self._full = FEW_PROMPTS

    def __getitem__(self, prompt_id: str) -> Prompt:
        return self._prompts[prompt_id]

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them."""
        return tuple(self._prompts.values())

    def put(self, prompts: Iterable[Prompt]) -> None:
        """Store ``prompts``."""
        self._prompts.update((prompt.prompt_id, prompt) for prompt in prompts)

    def forget_others(self, needed: Callable[[], Set[str]]) -> None:
        """Remove prompts that are not ``needed``. That is called only when there are twice as many prompts as were
        needed before, so that its cost is proportional to the draws since. Prompts of the last draw stay: control may
        not have taken their event yet."""
        if len(self._prompts) > self._full:
            kept = needed() | set(self._newest)
            self._prompts = {name: prompt for name, prompt in self._prompts.items() if name in kept}
            self._full = max(2 * len(self._prompts), FEW_PROMPTS)

    def drawn(self, prompts: list[Prompt], *, exhausted: bool) -> PromptsDrawn:
        """Store ``prompts`` of a draw and return its event for control. Draws do not overlap."""
        self.put(prompts)
        self._newest = tuple(prompt.prompt_id for prompt in prompts)
        return PromptsDrawn(
            prompt_ids=tuple(p.prompt_id for p in prompts),
            exhausted=exhausted,
            prompt_tokens=tuple(len(p.token_ids) for p in prompts),
        )
