"""Prompts of several domains, drawn in the shares that the recipe gives them (``tail_batching.advanced.domains``)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import Prompt
from streamrl.run.prompts.prompts import OpenPrompts

MOST_WAITING = 4096
"""Prompts of other domains that may wait until one of a rare domain turns up."""


class MixedPrompts:
    """Draws from ``source`` so that of any number of prompts each domain has its share, to within one.

    ``column``: of a prompt's domain; ``shares``: of each domain, in any unit; ``start``: prompts that were drawn by
    earlier lives of the run, for which ``source`` is read again from its beginning."""

    def __init__(self, source: OpenPrompts, column: str, shares: Mapping[str, float], start: int = 0) -> None:
        self.size = source.size
        self._source = source
        self._column = column
        self._shares = {name: share / sum(shares.values()) for name, share in shares.items()}
        self._waiting: dict[str, deque[Prompt]] = {name: deque() for name in shares}
        self._given: Counter[str] = Counter()
        self._skip = start
        self._exhausted = False

    async def draw(self, count: int) -> list[Prompt]:
        """Draw prompts in the shares of their domains. Once the source is exhausted, what is left is given whatever its
        domain. Raises ``RecipeError`` for a prompt of no domain of the recipe, ``StreamRLError`` where a domain does
        not turn up."""
        while self._skip and await self._next() is not None:
            self._skip -= 1
        prompts: list[Prompt] = []
        while len(prompts) < count and (prompt := await self._next()) is not None:
            prompts.append(prompt)
        return prompts

    async def aclose(self) -> None:
        await self._source.aclose()

    async def _next(self) -> Prompt | None:
        number = self._given.total() + 1
        wanted = max(self._shares, key=lambda name: self._shares[name] * number - self._given[name])
        while not self._waiting[wanted] and not self._exhausted:
            await self._read(wanted)
        for name in (wanted, *self._shares):
            if self._waiting[name]:
                self._given[name] += 1
                return self._waiting[name].popleft()
        return None

    async def _read(self, wanted: str) -> None:
        if (waiting := sum(map(len, self._waiting.values()))) >= MOST_WAITING:
            raise StreamRLError(
                f'{waiting} prompts wait for one of domain "{wanted}" (tail_batching.advanced.domains gives it '
                f"{self._shares[wanted]:.3f}): correct the share, or the dataset"
            )
        read = await self._source.draw(1)
        self._exhausted = not read
        for prompt in read:
            domain = prompt.columns.get(self._column)
            if not isinstance(domain, str) or domain not in self._waiting:
                known = ", ".join(f'"{name}"' for name in self._waiting)
                wrong = (
                    f"prompt {prompt.prompt_id}: column {self._column!r} (tail_batching.advanced.domain_column) is "
                    f"{domain!r}; tail_batching.advanced.domains has {known}: add it there, or correct the prompt"
                )
                raise RecipeError(wrong)
            self._waiting[domain].append(prompt)
