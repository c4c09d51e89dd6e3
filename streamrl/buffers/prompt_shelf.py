"""Prompts that control may launch: drawn from the source, kept while they may be asked for (again)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Protocol

from streamrl.base.types import Prompt
from streamrl.control.events import PromptsDrawn


class PromptSource(Protocol):
    """Where prompts come from; fewer than asked for means that it is exhausted."""

    async def draw(self, count: int) -> list[Prompt]: ...


FEW_PROMPTS = 256
"""So many may stay that nobody needs: to look for them costs more."""


class PromptShelf:
    """The prompts that control may ask for, and not many more."""

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        self._untold: tuple[str, ...] = ()
        self._full = FEW_PROMPTS

    def __getitem__(self, prompt_id: str) -> Prompt:
        return self._prompts[prompt_id]

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them."""
        return tuple(self._prompts.values())

    def put(self, prompts: Iterable[Prompt]) -> None:
        """Keep ``prompts``."""
        self._prompts.update((prompt.prompt_id, prompt) for prompt in prompts)

    def forget_others(self, needed: Callable[[], Set[str]]) -> None:
        """Keep those that are ``needed``, which is asked when there are twice as many as were needed before: what it
        costs is in proportion to what was drawn since. Those of the last draw stay: control may not know them yet."""
        if len(self._prompts) > self._full:
            kept = needed() | set(self._untold)
            self._prompts = {name: prompt for name, prompt in self._prompts.items() if name in kept}
            self._full = max(2 * len(self._prompts), FEW_PROMPTS)

    def drawn(self, prompts: list[Prompt], *, exhausted: bool) -> PromptsDrawn:
        """What control is told of ``prompts``, which are put on the shelf. One draw follows another."""
        self.put(prompts)
        self._untold = tuple(prompt.prompt_id for prompt in prompts)
        return PromptsDrawn(
            prompt_ids=tuple(p.prompt_id for p in prompts),
            exhausted=exhausted,
            prompt_tokens=tuple(len(p.token_ids) for p in prompts),
        )
