"""Prompts that control may launch: drawn from the source, kept while they may be asked for (again)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Protocol

from streamrl.control.events import PromptsDrawn
from streamrl.errors import RecipeError
from streamrl.types import Prompt


class PromptSource(Protocol):
    """Where prompts come from; fewer than asked for means that it is exhausted."""

    async def draw(self, count: int) -> list[Prompt]: ...


class PromptShelf:
    """The last ``size`` prompts that were drawn or launched. ``domain_column``: of a prompt's domain; may be empty."""

    def __init__(self, size: int, domain_column: str, domains: Mapping[str, float]) -> None:
        self._size = size
        self._column = domain_column
        self._domains = domains
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()

    def __getitem__(self, prompt_id: str) -> Prompt:
        self._prompts.move_to_end(prompt_id)
        return self._prompts[prompt_id]

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them, the ones that were used longest ago first."""
        return tuple(self._prompts.values())

    def put(self, prompts: Iterable[Prompt]) -> None:
        """Keep ``prompts``; the ones that were used longest ago are forgotten."""
        for prompt in prompts:
            self._prompts[prompt.prompt_id] = prompt
            self._prompts.move_to_end(prompt.prompt_id)
        while len(self._prompts) > self._size:
            self._prompts.popitem(last=False)

    def drawn(self, prompts: list[Prompt], *, exhausted: bool) -> PromptsDrawn:
        """What control is told of ``prompts``, which are put on the shelf."""
        self.put(prompts)
        return PromptsDrawn(
            prompt_ids=tuple(p.prompt_id for p in prompts),
            exhausted=exhausted,
            prompt_tokens=tuple(len(p.token_ids) for p in prompts),
            domains=tuple(self._domain(p) for p in prompts) if self._column else (),
        )

    def _domain(self, prompt: Prompt) -> str:
        domain = prompt.columns.get(self._column)
        if not isinstance(domain, str) or domain not in self._domains:
            known = ", ".join(f'"{name}"' for name in self._domains)
            wrong = (
                f"prompt {prompt.prompt_id}: column {self._column!r} (tail_batching.domain_column) is {domain!r}; "
                f"tail_batching.domains has {known}: add it there, or correct the prompt"
            )
            raise RecipeError([wrong])
        return domain
