"""Choice of the engine for a request, and the unanswered requests of each engine. Pure, and without a clock: the pool
and the simulator use the same ``Router``."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

import msgspec

from streamrl.engines.resumption import whole_of

E = TypeVar("E", bound=Hashable)
K = TypeVar("K")
V = TypeVar("V")

SIBLING_SLACK = 8
"""How many more open requests than the idlest engine one may have and still get the siblings of its prompt, and the
later turns of its trajectories."""

MOST_STALE = 16
"""Ranked loads for each engine, those that no longer hold included, before the ranking is made again."""

REMEMBERED_PROMPTS = 4096
REMEMBERED_TRAJECTORIES = 16_384


class ServedRequest(msgspec.Struct, Generic[E], frozen=True, kw_only=True):
    """A request that ``engine`` has not answered yet. ``prompt``, ``sampled``: tokens of the prompt, and of the parts
    of its completion before this one; ``most_tokens``: prompt and completion, at most; ``since``: seconds on the
    caller's clock at which this part was submitted."""

    request_id: str
    engine: E
    prompt: int
    sampled: int
    most_tokens: int
    since: float


class Router(Generic[E]):
    """Chooses the engine with the fewest open tokens. As long as the loads are near, a later turn of a trajectory goes
    to the engine of the turn before, which has its blocks, and siblings of a prompt stay together, so that they share
    its prefix blocks. The rest of a request that was moved goes where it was moved to."""

    def __init__(self, engines: Iterable[E]) -> None:
        self._open_requests = dict.fromkeys(engines, 0)
        self._open_tokens = dict.fromkeys(self._open_requests, 0)
        self._served: dict[str, ServedRequest[E]] = {}
        self._siblings: dict[Hashable, E] = {}
        self._moves: dict[str, E] = {}
        self._turns: dict[str, E] = {}
        self._ranked: tuple[E, ...] = ()
        self._places: dict[E, int] = {}
        self._ranking: list[tuple[int, int, int]] = []  # (tokens, requests, place): those now, and stale ones

    def choose(self, request_id: str, prompt: Hashable, serving: Sequence[E], paused: Collection[E] = ()) -> E:
        """Return one of the engines ``serving``, the first of equals. Requests with equal ``prompt`` are siblings. An
        engine that is ``paused`` for new weights loses its blocks by it: a later turn goes to one that samples now."""
        whole = whole_of(request_id)
        target = self._moves.pop(whole, None) if self._moves else None
        if target is not None and target in serving:
            return target
        before = self._turns.get(whole)
        if before is not None and paused:
            serving = [engine for engine in serving if engine not in paused] or serving
        idlest = self._idlest(serving)
        if before is not None:
            return before if self._serves_near(before, idlest, serving) else idlest
        sibling = self._siblings.pop(prompt, idlest)
        chosen = sibling if self._serves_near(sibling, idlest, serving) else idlest
        self._siblings[prompt] = chosen
        forget_oldest(self._siblings)
        return chosen

    def _idlest(self, serving: Sequence[E]) -> E:
        """Return the first of those with the fewest open tokens and requests. All are looked at unless ``serving`` is
        the tuple of the last time: with a thousand engines a choice costs as much as with eight."""
        if not isinstance(serving, tuple):
            return min(serving, key=self._load)
        if serving is not self._ranked:
            self._ranked = serving
            self._places = {engine: place for place, engine in enumerate(serving)}
            self._ranking = [(*self._load(engine), place) for place, engine in enumerate(serving)]
            heapify(self._ranking)
        ranking = self._ranking
        while True:  # ends: the load of each engine now is in it
            tokens, requests, place = ranking[0]
            engine: E = serving[place]
            if (tokens, requests) == self._load(engine):
                return engine
            heappop(ranking)

    def _load(self, engine: E) -> tuple[int, int]:
        return self._open_tokens[engine], self._open_requests[engine]

    def _changed(self, engine: E) -> None:
        place = self._places.get(engine)
        if place is not None:
            heappush(self._ranking, (*self._load(engine), place))
            if len(self._ranking) > MOST_STALE * len(self._places):
                self._ranked = ()
                self._places = {}
                self._ranking = []

    def _serves_near(self, engine: E, idlest: E, serving: Sequence[E]) -> bool:
        serves = engine in (self._places if serving is self._ranked else serving)
        return serves and self._open_requests[engine] <= self._open_requests[idlest] + SIBLING_SLACK

    def opened(self, request: ServedRequest[E]) -> None:
        """Count ``request`` as open on its engine."""
        self._served[request.request_id] = request
        self._open_requests[request.engine] += 1
        self._open_tokens[request.engine] += request.most_tokens
        self._changed(request.engine)

    def closed(self, request_id: str) -> None:
        """Count it as open no more: it was answered, or failed."""
        served = self._served.pop(request_id)
        self._open_requests[served.engine] -= 1
        self._open_tokens[served.engine] -= served.most_tokens
        self._changed(served.engine)

    def move(self, request_id: str, to: E) -> None:
        """Send its next part to ``to``."""
        self._moves[whole_of(request_id)] = to
        forget_oldest(self._moves)

    def answered(self, request_id: str) -> None:
        """Note that a turn, which is still open, is whole: of it no further part comes, of its trajectory perhaps
        another turn."""
        whole = whole_of(request_id)
        self.ended(whole)
        self._turns[whole] = self._served[request_id].engine
        forget_oldest(self._turns, REMEMBERED_TRAJECTORIES)

    def ended(self, whole: str) -> None:
        """Forget a trajectory of which nothing further comes."""
        self._moves.pop(whole, None)
        self._turns.pop(whole, None)

    def lost(self, engine: E) -> None:
        """Forget which turns ``engine`` served: it is stopped, and one in its place has none of their blocks."""
        self._turns = {whole: served_by for whole, served_by in self._turns.items() if served_by != engine}

    def engine_of(self, request_id: str) -> E | None:
        """Return the engine that serves it; None where none does."""
        served = self._served.get(request_id)
        return None if served is None else served.engine

    def open_on(self, engine: E) -> int:
        """Return how many requests it serves."""
        return self._open_requests[engine]

    def served_by(self, engine: E) -> list[str]:
        """Return the ids of the requests that it serves."""
        return [served.request_id for served in self._served.values() if served.engine == engine]

    def __iter__(self) -> Iterator[ServedRequest[E]]:
        return iter(self._served.values())


def forget_oldest(remembered: dict[K, V], most: int = REMEMBERED_PROMPTS) -> None:
    """Bound what is remembered for completions that never come back."""
    if len(remembered) > most:
        del remembered[next(iter(remembered))]
