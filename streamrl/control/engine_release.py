"""Frees engines late in a round, as ``engine_planning`` decides: the acting part, between the core and the pool.

A freed engine is drained and stays idle, so that training has its cores; it still gets every weight push, and is
readmitted when the next round is launched.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import anyio

from streamrl.control.actions import Explain
from streamrl.control.engine_planning import (
    Lengths,
    OpenRequest,
    PlanningSettings,
    RoundProgress,
    ServingEngine,
    plan_release,
)
from streamrl.messages import EngineLoad

RECENT_LENGTHS = 2048
"""Completions of one kind of round that are remembered: about what four rounds of 64 prompts and 8 samples keep."""


class Served(Protocol):
    """A request under way, in tokens; ``since``: ``anyio.current_time()`` at which its last part was asked for."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt(self) -> int: ...
    @property
    def sampled(self) -> int: ...
    @property
    def since(self) -> float: ...


class DrainablePool(Protocol):
    """The part of ``streamrl.engines.engine_pool.EnginePool`` that freeing needs."""

    def served(self) -> Mapping[str, Sequence[Served]]: ...

    def loads(self) -> Mapping[str, EngineLoad]: ...

    async def drain(self, name: str) -> None: ...

    def readmit(self, name: str) -> None: ...

    async def migrate(self, request_ids: Sequence[str], to: str) -> None: ...


class EngineRelease:
    """``kv_tokens``, ``block_tokens``: of one engine's KV cache. ``cap``: longest completion, in tokens. ``units``: the
    unit that an engine is freed with, by its name."""

    def __init__(
        self,
        pool: DrainablePool,
        *,
        kv_tokens: int,
        block_tokens: int,
        max_running: int,
        cap: int,
        units: Mapping[str, str] | None = None,
        settings: PlanningSettings = PlanningSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._pool = pool
        self._kv_tokens = kv_tokens
        self._block_tokens = block_tokens
        self._max_running = max_running
        self._cap = cap
        self._units = units or {}
        self._settings = settings
        self._lengths: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=RECENT_LENGTHS))
        self._looked_at = -1.0
        self._freed: tuple[str, ...] = ()

    @property
    def freed(self) -> tuple[str, ...]:
        """Engines that stand idle until the next round."""
        return self._freed

    def completed(self, round_kind: str, tokens: int) -> None:
        """A completion of such a round ended by itself, with so many tokens."""
        self._lengths[round_kind].append(tokens)

    def begin_round(self) -> None:
        """Readmit what was freed. Before the first trajectory of the round is launched."""
        for name in self._freed:
            self._pool.readmit(name)
        self._freed, self._looked_at = (), -1.0

    async def look(self, round_kind: str, *, finished: int, launched: int) -> Explain | None:
        """Free engines if they can be spared now. Returns why, or why not; None where there was nothing to decide.

        Ask whenever a trajectory has ended: it looks at most once in a step of progress. Freeing takes as long as the
        engines take to drop their requests.
        """
        now, loads = anyio.current_time(), self._pool.loads()
        progress = RoundProgress(
            round_kind=round_kind,
            finished=finished,
            launched=launched,
            engines=tuple(
                self._serving(name, requests, loads[name].token_s, now)
                for name, requests in self._pool.served().items()
                if name not in self._freed
            ),
            looked_at=self._looked_at,
            freed=bool(self._freed),
        )
        if any(engine.requests and not loads[engine.name].token_s for engine in progress.engines):
            return None  # how far its requests are cannot be told
        lengths = Lengths(ascending=tuple(sorted(self._lengths[round_kind])), cap=self._cap)
        plan = plan_release(progress, lengths, self._settings)
        if plan.looked:
            self._looked_at = progress.progress
        self._freed = self._freed or plan.free
        by_target: dict[str, list[str]] = defaultdict(list)
        for move in plan.moves:
            by_target[move.to].append(move.request_id)
        for target, request_ids in by_target.items():
            await self._pool.migrate(request_ids, target)
        for name in plan.free:
            await self._pool.drain(name)
        return plan.because

    def _serving(self, name: str, requests: Sequence[Served], token_s: float, now: float) -> ServingEngine:
        """Engines return tokens when a completion ends: how many it has by now follows from their pace."""

        def sampled(request: Served) -> int:
            by_now = request.sampled + int((now - request.since) / token_s) if token_s else request.sampled
            return min(by_now, self._cap)

        return ServingEngine(
            name=name,
            kv_tokens=self._kv_tokens,
            max_running=self._max_running,
            block_tokens=self._block_tokens,
            unit=self._units.get(name, ""),
            requests=tuple(OpenRequest(request_id=r.request_id, prompt=r.prompt, sampled=sampled(r)) for r in requests),
        )
