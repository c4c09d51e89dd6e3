"""A weight push, as one transaction over all engines.

Stage on every engine while it generates; pause; apply and verify on the live weights; resume. An engine that
refuses the delta (wrong base, wrong digest, a commit that failed half-way) is re-anchored before it serves again;
one that refuses the anchor too ends the run. The ranks' shadow advances only when every engine acknowledged.

``hold`` pauses the engines ahead of a push, so that requests for the next version may be submitted while the step
ends: they queue, and their first token is computed after the commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import anyio
import msgspec

from streamrl.config.scheduling import InFlight
from streamrl.errors import EngineError, WeightError
from streamrl.messages import OrderDone, PauseMode, WeightAnnouncement


class PushedEngine(Protocol):
    """The part of ``streamrl.engines.engine.Engine`` that a push needs."""

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone: ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None: ...

    async def commit(self, policy_version: int) -> OrderDone: ...

    async def resume(self) -> None: ...


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """One push. Seconds are of wall time. ``paused_s``: the longest pause of an engine for its commit; ``held_s``: how
    long engines had been held when the push began."""

    policy_version: int
    staged_s: float
    paused_s: float
    total_s: float
    payload_bytes: int
    changed_share: float
    reanchored: int
    held_s: float = 0.0


class WeightPublisher:
    """Pushes announced versions to ``engines``. ``anchor`` has the trainer publish a version complete; ``on_hold`` is
    told when a hold begins and when it has ended.

    ``push``, ``hold``, ``release``, ``admit`` and ``leave`` wait for each other.
    """

    def __init__(
        self,
        engines: Sequence[PushedEngine],
        anchor: Callable[[int], Awaitable[WeightAnnouncement]],
        *,
        in_flight: InFlight,
        timeout_s: float,
        on_hold: Callable[[bool], None] | None = None,
    ) -> None:
        self._engines = list(engines)
        self._anchor = anchor
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._refusal: WeightError | None = None
        self._one_at_a_time = anyio.Lock()
        self._paused_at: dict[PushedEngine, float] = {}
        self._held = False
        self._on_hold = on_hold

    async def push(self, announced: WeightAnnouncement) -> PushReport:
        """Make ``announced`` live on every engine; ends a hold. Raises ``EngineError`` when that fails or is late."""
        async with self._one_at_a_time:
            with self._in_time(f"version {announced.policy_version} was not live on every engine"):
                return await self._push(announced)

    async def hold(self) -> None:
        """Pause all engines until the next push or ``release``: what is submitted from now on waits for it.

        Requests in flight are treated as a push would treat them. Raises ``EngineError`` when an engine does not stop.
        """
        async with self._one_at_a_time:
            with self._in_time("not every engine was paused"):
                await self._on_each(self._pause_one, self._engines)
            self._hold(True)

    async def release(self) -> None:
        """Resume engines that are held, without a push: what was submitted meanwhile is sampled by the live version."""
        async with self._one_at_a_time:
            with self._in_time("not every engine was resumed"):
                await self._on_each(self._resume_one, [e for e in self._engines if e in self._paused_at])
            self._hold(False)

    async def admit(self, engine: PushedEngine, policy_version: int) -> None:
        """Bring a started engine, whatever it holds, to the live version by an anchor; later pushes reach it.

        While the others are held it is held too. Raises ``EngineError`` when it refuses the anchor.
        """
        async with self._one_at_a_time:
            with self._in_time(f"version {policy_version} was not live on an engine that joined"):
                anchor = await self._anchor(policy_version)
                try:
                    await self._stage_one(engine, anchor)
                    await self._verified_commit(engine, anchor)
                except WeightError as error:
                    raise EngineError(f"an engine that joined refused version {policy_version}: {error}") from error
                if not self._held:
                    await self._resume_one(engine)
            self._engines.append(engine)

    async def leave(self, engine: PushedEngine) -> None:
        """Leave an engine out of later pushes: its process is about to be stopped."""
        async with self._one_at_a_time:
            self._engines.remove(engine)
            self._paused_at.pop(engine, None)

    def _hold(self, held: bool) -> None:
        changed, self._held = held != self._held, held
        if changed and self._on_hold is not None:
            self._on_hold(held)

    @contextmanager
    def _in_time(self, failure: str) -> Iterator[None]:
        try:
            with anyio.fail_after(self._timeout_s):
                yield
        except TimeoutError as error:
            raise EngineError(f"{failure} within {self._timeout_s:g} s (weights.push_timeout_s)") from error

    async def _push(self, announced: WeightAnnouncement) -> PushReport:
        started = anyio.current_time()
        held_since = min(self._paused_at.values(), default=started)
        staged = await self._on_all(self._stage_one, announced)
        staged_s = anyio.current_time() - started
        pauses = await self._on_all(self._commit_one, announced, only=staged)
        refused = [engine for engine in self._engines if engine not in pauses]
        if refused:
            pauses |= await self._reanchor(announced, refused)
        self._hold(False)
        changed = sum(s.changed_elements for s in announced.sources)
        return PushReport(
            policy_version=announced.policy_version,
            staged_s=staged_s,
            paused_s=max(pauses.values()),
            total_s=anyio.current_time() - started,
            payload_bytes=sum(s.payload_bytes for s in announced.sources),
            changed_share=changed / max(sum(s.total_elements for s in announced.sources), 1),
            reanchored=len(refused),
            held_s=started - held_since,
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
        """Seconds that the engine stood still for it. Never resumed on weights that were not verified."""
        began = anyio.current_time()
        await self._verified_commit(engine, announced)
        await self._resume_one(engine)
        return anyio.current_time() - began

    async def _verified_commit(self, engine: PushedEngine, announced: WeightAnnouncement) -> None:
        """Leaves the engine paused."""
        await self._pause_one(engine)
        done = await engine.commit(announced.policy_version)
        if done.state_hash != announced.state_hash:
            raise WeightError(
                f"live weights hash to {done.state_hash:016x} at version {announced.policy_version}, "
                f"the trainer published {announced.state_hash:016x}"
            )

    async def _pause_one(self, engine: PushedEngine) -> None:
        """Once: an engine that is held, or whose commit was refused, is paused already."""
        if engine in self._paused_at:
            return
        self._paused_at[engine] = anyio.current_time()
        mode = PauseMode.ABORT if self._in_flight is InFlight.RESUME else PauseMode.KEEP
        await engine.pause(mode, clear_cache=self._in_flight is not InFlight.KEEP)

    async def _resume_one(self, engine: PushedEngine) -> None:
        await engine.resume()
        del self._paused_at[engine]

    @staticmethod
    async def _on_each(
        step: Callable[[PushedEngine], Coroutine[None, None, object]], engines: Sequence[PushedEngine]
    ) -> None:
        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(step, engine)

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
