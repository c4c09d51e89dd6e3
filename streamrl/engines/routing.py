"""Choice of the engine for a request, and the unanswered requests of each engine. Pure, and without a clock.

The engine pool (controller) and ``streamrl simulate`` (the command's own process) use the same ``Router``."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from msgspec import Struct

from streamrl.engines.resumption import completion_id_of

E = TypeVar("E", bound=Hashable)
K = TypeVar("K")
V = TypeVar("V")

SIBLING_SLACK = 8
"""Largest number of open requests above the number of the idlest engine, with which an engine still gets siblings of
its prompts and later turns of its trajectories."""

MOST_STALE = 16
"""Average number of entries an engine in the ranking, outdated ones included, above which the ranking is made again."""

REMEMBERED_PROMPTS = 4096
REMEMBERED_TRAJECTORIES = 16_384


class ServedRequest(Struct, Generic[E], frozen=True, kw_only=True):
    """A request that ``engine`` has not answered yet.

    ``prompt``: tokens of the prompt
    ``sampled``: tokens of the earlier parts of this completion
    ``max_tokens``: largest number of tokens of prompt and completion together
    ``since``: submission time of this part, in seconds on the caller's clock"""

    request_id: str
    engine: E
    prompt: int
    sampled: int
    max_tokens: int
    since: float


class Router(Generic[E]):
    """Chooses the engine with the fewest open tokens.

    While the loads are near each other, a later turn of a trajectory goes to the engine of the turn before, which has
    its KV blocks, and siblings of a prompt stay on one engine, where they share the prompt's prefix blocks. The next
    part of a request that was moved goes to the engine that it was moved to."""

    def __init__(self, engines: Iterable[E]) -> None:
        self._open_requests = dict.fromkeys(engines, 0)
        self._open_tokens = dict.fromkeys(self._open_requests, 0)
        self._requests: dict[str, ServedRequest[E]] = {}  # by request id
        self._siblings: dict[Hashable, E] = {}  # engine of the newest request, by prompt
        self._moves: dict[str, E] = {}  # engine of the next part, by completion id
        self._turns: dict[str, E] = {}  # engine of the newest turn, by completion id
        self._ranked: tuple[E, ...] = ()  # the engines that are ranked
        self._positions: dict[E, int] = {}  # in ``_ranked``
        self._ranking: list[tuple[int, int, int]] = []  # heap of (tokens, requests, position): current and outdated

    def choose(self, request_id: str, prompt: Hashable, serving: Sequence[E], paused: Collection[E] = ()) -> E:
        """Return one of the engines ``serving``, the first of equals. Requests with equal ``prompt`` are siblings. An
        engine that is ``paused`` for new weights drops its KV blocks: a later turn then goes to an engine that samples
        now."""
        completion_id = completion_id_of(request_id)
        target = self._moves.pop(completion_id, None) if self._moves else None
        if target is not None and target in serving:
            return target
        turn_engine = self._turns.get(completion_id)
        if turn_engine is not None and paused:
            serving = [engine for engine in serving if engine not in paused] or serving
        idlest = self._idlest(serving)
        if turn_engine is not None:
            return turn_engine if self._serves_near(turn_engine, idlest, serving) else idlest
        engine = self._siblings.pop(prompt, idlest)
        if not self._serves_near(engine, idlest, serving):
            engine = idlest
        self._siblings[prompt] = engine
        forget_oldest(self._siblings)
        return engine

    def _idlest(self, serving: Sequence[E]) -> E:
        """Return the first engine with the fewest open tokens, then requests. The search is linear unless ``serving``
        is the tuple of the previous call: its ranking makes a choice among a thousand engines as cheap as among
        eight."""
        if not isinstance(serving, tuple):
            return min(serving, key=self._load)
        if serving is not self._ranked:
            self._ranked = serving
            self._positions = {engine: position for position, engine in enumerate(serving)}
            self._ranking = [(*self._load(engine), position) for position, engine in enumerate(serving)]
            heapify(self._ranking)
        ranking = self._ranking
        while True:  # ends, since the ranking has the current load of each engine
            tokens, requests, position = ranking[0]
            engine: E = serving[position]
            if (tokens, requests) == self._load(engine):
                return engine
            heappop(ranking)

    def _load(self, engine: E) -> tuple[int, int]:
        return self._open_tokens[engine], self._open_requests[engine]

    def _rank_again(self, engine: E) -> None:
        """Add the changed load of ``engine`` to the ranking. The entry of its load before is outdated from now on."""
        position = self._positions.get(engine)
        if position is not None:
            heappush(self._ranking, (*self._load(engine), position))
            if len(self._ranking) > MOST_STALE * len(self._positions):
                self._ranked = ()
                self._positions = {}
                self._ranking = []

    def _serves_near(self, engine: E, idlest: E, serving: Sequence[E]) -> bool:
        """Return whether ``engine`` is among ``serving``, with a load near that of ``idlest``."""
        serves = engine in (self._positions if serving is self._ranked else serving)
        return serves and self._open_requests[engine] <= self._open_requests[idlest] + SIBLING_SLACK

    def add_request(self, request: ServedRequest[E]) -> None:
        """Count ``request`` as open on its engine."""
        self._requests[request.request_id] = request
        self._open_requests[request.engine] += 1
        self._open_tokens[request.engine] += request.max_tokens
        self._rank_again(request.engine)

    def remove_request(self, request_id: str) -> None:
        """Count a request as open no more: it was answered, or failed."""
        request = self._requests.pop(request_id)
        self._open_requests[request.engine] -= 1
        self._open_tokens[request.engine] -= request.max_tokens
        self._rank_again(request.engine)

    def move(self, request_id: str, to: E) -> None:
        """Send the next part of the request's completion to the engine ``to``."""
        self._moves[completion_id_of(request_id)] = to
        forget_oldest(self._moves)

    def note_turn(self, request_id: str) -> None:
        """Note that an open request completes its turn. The turn has no further part; its trajectory may have another
        turn."""
        completion_id = completion_id_of(request_id)
        self.forget_trajectory(completion_id)
        self._turns[completion_id] = self._requests[request_id].engine
        forget_oldest(self._turns, REMEMBERED_TRAJECTORIES)

    def forget_trajectory(self, completion_id: str) -> None:
        """Forget a trajectory that has no further request."""
        self._moves.pop(completion_id, None)
        self._turns.pop(completion_id, None)

    def forget_engine(self, stopped: E) -> None:
        """Forget the turns of a stopped engine: the engine in its place has none of their KV blocks."""
        self._turns = {completion_id: engine for completion_id, engine in self._turns.items() if engine != stopped}

    def engine_of(self, request_id: str) -> E | None:
        """Return the engine that serves a request; None for a request that is not open."""
        request = self._requests.get(request_id)
        return None if request is None else request.engine

    def open_on(self, engine: E) -> int:
        """Return the number of requests that ``engine`` serves."""
        return self._open_requests[engine]

    def served_by(self, engine: E) -> list[str]:
        """Return the ids of the requests that ``engine`` serves."""
        return [request.request_id for request in self._requests.values() if request.engine == engine]

    def __iter__(self) -> Iterator[ServedRequest[E]]:
        return iter(self._requests.values())


def forget_oldest(memory: dict[K, V], limit: int = REMEMBERED_PROMPTS) -> None:
    """Drop the oldest entry of ``memory`` above ``limit`` entries: some completions never come back."""
    if len(memory) > limit:
        del memory[next(iter(memory))]
