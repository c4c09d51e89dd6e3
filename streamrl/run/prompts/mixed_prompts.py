"""Prompts of several domains, drawn in the shares of ``tail_batching.advanced.domains``. ``launch/sampling.py`` opens
them in the controller process."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import Prompt
from streamrl.run.prompts.open_prompts import OpenPrompts

MOST_WAITING = 4096
"""Largest number of prompts that wait while a prompt of a rare domain is searched."""


class MixedPrompts:
    """Draws from ``source`` so that each domain has its share of any number of drawn prompts, to within one prompt.

    ``column``: column with the domain of a prompt;
    ``shares``: share of each domain, in any unit;
    ``start``: number of prompts that earlier lives of the run drew; ``source`` is read again from its beginning."""

    def __init__(self, source: OpenPrompts, column: str, shares: Mapping[str, float], start: int = 0) -> None:
        self.size = source.size
        self._source = source
        self._column = column
        self._shares = {name: share / sum(shares.values()) for name, share in shares.items()}
        self._waiting: dict[str, deque[Prompt]] = {name: deque() for name in shares}
        self._drawn: Counter[str] = Counter()
        self._skip = start
        self._exhausted = False

    async def draw(self, count: int) -> list[Prompt]:
        """Draw prompts in the shares of their domains. Once the source is exhausted, all prompts that wait are drawn,
        whatever their domain. Raises ``RecipeError`` for a prompt whose domain is not in the recipe, ``StreamRLError``
        where a domain has too few prompts."""
        while self._skip and await self._next() is not None:
            self._skip -= 1
        prompts: list[Prompt] = []
        while len(prompts) < count:
            prompt = await self._next()
            if prompt is None:
                break
            prompts.append(prompt)
        return prompts

    async def aclose(self) -> None:
        await self._source.aclose()

    async def _next(self) -> Prompt | None:
        """Return a prompt of the domain that is farthest behind its share; None: the source is exhausted."""
        number = self._drawn.total() + 1
        due = max(self._shares, key=lambda name: self._shares[name] * number - self._drawn[name])
        while not self._waiting[due] and not self._exhausted:
            await self._read(due)
        for name in (due, *self._shares):
            if self._waiting[name]:
                self._drawn[name] += 1
                return self._waiting[name].popleft()
        return None

    async def _read(self, due: str) -> None:
        """Read one more prompt, because none of the domain ``due`` waits."""
        waiting = sum(map(len, self._waiting.values()))
        if waiting >= MOST_WAITING:
            raise StreamRLError(
                f'{waiting} prompts wait for one of domain "{due}" (tail_batching.advanced.domains gives it '
                f"{self._shares[due]:.3f}): correct the share, or the dataset"
            )
        prompts = await self._source.draw(1)
        self._exhausted = not prompts
        for prompt in prompts:
            domain = prompt.columns.get(self._column)
            if not isinstance(domain, str) or domain not in self._waiting:
                names = ", ".join(f'"{name}"' for name in self._waiting)
                raise RecipeError(
                    f"prompt {prompt.prompt_id}: column {self._column!r} (tail_batching.advanced.domain_column) is "
                    f"{domain!r}; tail_batching.advanced.domains has {names}: add it there, or correct the prompt"
                )
            self._waiting[domain].append(prompt)
