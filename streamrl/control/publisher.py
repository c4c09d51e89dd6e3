"""A weight push, as one transaction over all engines.

Stage on every engine while it generates; pause; apply and verify on the live weights; resume. An engine that
refuses the delta (wrong base, wrong digest, a commit that failed half-way) is re-anchored before it serves again;
one that refuses the anchor too ends the run. The ranks' shadow advances only when every engine acknowledged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
import msgspec

from streamrl.config.recipe import InFlight
from streamrl.errors import EngineError, WeightError
from streamrl.messages import OrderDone, PauseMode, WeightAnnouncement


class PushedEngine(Protocol):
    """The part of ``streamrl.engines.engine.Engine`` that a push needs."""

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone: ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None: ...

    async def commit(self, policy_version: int) -> OrderDone: ...

    async def resume(self) -> None: ...


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """One push. Seconds are of wall time; ``paused_s`` is the longest pause of an engine."""

    policy_version: int
    staged_s: float
    paused_s: float
    total_s: float
    payload_bytes: int
    changed_share: float
    reanchored: int


class WeightPublisher:
    """Pushes announced versions to ``engines``. ``anchor`` has the trainer publish its current version complete."""

    def __init__(
        self,
        engines: Sequence[PushedEngine],
        anchor: Callable[[int], Awaitable[WeightAnnouncement]],
        *,
        in_flight: InFlight,
        timeout_s: float,
    ) -> None:
        self._engines = engines
        self._anchor = anchor
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._refusal: WeightError | None = None

    async def push(self, announced: WeightAnnouncement) -> PushReport:
        """Make ``announced`` live on every engine. Raises ``EngineError`` when that cannot be done in time."""
        started = anyio.current_time()
        try:
            with anyio.fail_after(self._timeout_s):
                staged = await self._on_all(self._stage_one, announced)
                staged_s = anyio.current_time() - started
                pauses = await self._on_all(self._commit_one, announced, only=staged)
                refused = [engine for engine in self._engines if engine not in pauses]
                if refused:
                    pauses |= await self._reanchor(announced, refused)
        except TimeoutError as error:
            raise EngineError(
                f"version {announced.policy_version} was not live on every engine within "
                f"{self._timeout_s:g} s (weights.push_timeout_s)"
            ) from error
        changed = sum(s.changed_elements for s in announced.sources)
        return PushReport(
            policy_version=announced.policy_version,
            staged_s=staged_s,
            paused_s=max(pauses.values()),
            total_s=anyio.current_time() - started,
            payload_bytes=sum(s.payload_bytes for s in announced.sources),
            changed_share=changed / max(sum(s.total_elements for s in announced.sources), 1),
            reanchored=len(refused),
        )

    async def _on_all(
        self,
        step: Callable[[PushedEngine, WeightAnnouncement], Awaitable[float]],
        announced: WeightAnnouncement,
        only: dict[PushedEngine, float] | None = None,
    ) -> dict[PushedEngine, float]:
        """Seconds of ``step`` for each engine that took it; engines that refused are left out."""
        done: dict[PushedEngine, float] = {}

        async def one(engine: PushedEngine) -> None:
            try:
                done[engine] = await step(engine, announced)
            except WeightError as error:
                self._refusal = error

        async with anyio.create_task_group() as group:
            for engine in self._engines if only is None else only:
                group.start_soon(one, engine)
        return done

    async def _stage_one(self, engine: PushedEngine, announced: WeightAnnouncement) -> float:
        return (await engine.stage(announced)).seconds

    async def _commit_one(self, engine: PushedEngine, announced: WeightAnnouncement) -> float:
        """Seconds that the engine was paused. Never resumed on weights that were not verified."""
        paused_at = anyio.current_time()
        mode = PauseMode.ABORT if self._in_flight is InFlight.RESUME else PauseMode.KEEP
        await engine.pause(mode, clear_cache=self._in_flight is not InFlight.KEEP)
        done = await engine.commit(announced.policy_version)
        if done.state_hash != announced.state_hash:
            raise WeightError(
                f"live weights hash to {done.state_hash:016x} at version {announced.policy_version}, "
                f"the trainer published {announced.state_hash:016x}"
            )
        await engine.resume()
        return anyio.current_time() - paused_at

    async def _reanchor(self, announced: WeightAnnouncement, refused: list[PushedEngine]) -> dict[PushedEngine, float]:
        anchor = await self._anchor(announced.policy_version)
        only = dict.fromkeys(refused, 0.0)
        staged = await self._on_all(self._stage_one, anchor, only=only)
        pauses = await self._on_all(self._commit_one, anchor, only=staged)
        if len(pauses) < len(refused):
            raise EngineError(
                f"an engine refused version {announced.policy_version} as delta and as anchor: {self._refusal}"
            )
        return pauses
