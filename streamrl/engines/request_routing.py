"""Which engine of a pool gets a request, and what each of them has not answered yet.

Engines are numbers here: of what they are, whether they serve and who waits for them, only the pool knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from streamrl.base.messages import Generate
from streamrl.engines.resumption import whole_of

K = TypeVar("K")

SIBLING_SLACK = 8
"""How many more open requests than the idlest engine one may have and still get the siblings of its prompt."""

REMEMBERED_PROMPTS = 4096


class ServedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that ``engine`` has not answered yet. ``prompt``, ``sampled``: tokens of the prompt, and of the parts
    of its completion before this one; ``most_tokens``: prompt and completion, at most; ``since``:
    ``anyio.current_time()`` at which this part was asked for."""

    request_id: str
    engine: int
    prompt: int
    sampled: int
    most_tokens: int
    since: float


class RequestRouting:
    """To the engine with the fewest open tokens; siblings of a prompt stay together, so that they share its prefix
    blocks, as long as the loads are near. The rest of a request that is moved goes where it was moved to."""

    def __init__(self, engines: int) -> None:
        self._open_requests = [0] * engines
        self._open_tokens = [0] * engines
        self._served: dict[str, ServedRequest] = {}
        self._siblings: dict[int, int] = {}
        self._moves: dict[str, int] = {}

    def choose(self, request: Generate, serving: Sequence[int]) -> int:
        """One of the engines ``serving``."""
        if len(serving) == 1:
            return serving[0]
        target = self._moves.pop(whole_of(request.request_id), None)
        if target is not None and target in serving:
            return target
        # Its hash: prompts may be long, thousands are remembered, and one that is taken for another is no harm.
        prompt = hash(request.token_ids[: len(request.token_ids) - request.prefix_length].tobytes())
        idlest = min(serving, key=lambda i: (self._open_tokens[i], self._open_requests[i], i))
        sibling = self._siblings.pop(prompt, idlest)
        near = self._open_requests[sibling] <= self._open_requests[idlest] + SIBLING_SLACK
        chosen = sibling if near and sibling in serving else idlest
        self._siblings[prompt] = chosen
        _forget_oldest(self._siblings)
        return chosen

    def opened(self, request: Generate, engine: int, now: float) -> None:
        """``engine`` is asked for it."""
        prompt = len(request.token_ids) - request.prefix_length
        served = ServedRequest(
            request_id=request.request_id,
            engine=engine,
            prompt=prompt,
            sampled=request.prefix_length,
            most_tokens=prompt + request.max_tokens,
            since=now,
        )
        self._served[request.request_id] = served
        self._open_requests[engine] += 1
        self._open_tokens[engine] += served.most_tokens

    def closed(self, request_id: str) -> None:
        """It is not asked for any more, whatever came of it."""
        served = self._served.pop(request_id)
        self._open_requests[served.engine] -= 1
        self._open_tokens[served.engine] -= served.most_tokens

    def move(self, request_id: str, to: int) -> None:
        """What is asked for as its next part goes to ``to``."""
        self._moves[whole_of(request_id)] = to
        _forget_oldest(self._moves)

    def ended(self, whole: str) -> None:
        """No further part of that completion comes."""
        self._moves.pop(whole, None)

    def engine_of(self, request_id: str) -> int | None:
        """Who serves it; None: nobody."""
        served = self._served.get(request_id)
        return None if served is None else served.engine

    def open_on(self, engine: int) -> int:
        """How many requests it serves."""
        return self._open_requests[engine]

    def served_by(self, engine: int) -> list[str]:
        """Ids of the requests that it serves."""
        return [served.request_id for served in self._served.values() if served.engine == engine]

    def __iter__(self) -> Iterator[ServedRequest]:
        return iter(self._served.values())


def _forget_oldest(remembered: dict[K, int]) -> None:
    """Bounds what is remembered for completions that never come back."""
    if len(remembered) > REMEMBERED_PROMPTS:
        del remembered[next(iter(remembered))]
