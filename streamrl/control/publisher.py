"""A weight push, as one transaction over all engines.

Each engine for itself: stage while it generates; pause; apply and verify on the live weights; resume. One that refuses
the delta (wrong base, wrong digest, a commit that failed half-way) is re-anchored before it serves again. The ranks'
shadow advances only when every engine that serves acknowledged.

With an ``EngineService``, an engine that refuses the anchor too, or that is still fetching long after the others went
on, leaves service instead of ending the run or holding it up: its requests go on elsewhere, and beside the run it
catches up, at each push anew, until it holds what the others hold. Then it serves again. One that was late goes on with
what was announced; where it missed versions it asks the trainer for one delta over them. One that refused that, or an
anchor, takes the anchor of the live version.

``hold`` pauses the engines ahead of a push, so that requests for the next version may be submitted while the step
ends: they queue, and their first token is computed after the commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager

import anyio
import msgspec

from streamrl.config.scheduling import InFlight
from streamrl.control.pushed_engine import EngineService, PushedEngine
from streamrl.control.weight_canary import CanaryReport, WeightCanary
from streamrl.errors import EngineError, WeightError
from streamrl.messages import PauseMode, WeightAnnouncement

__all__ = ["EngineService", "PushReport", "PushedEngine", "WeightPublisher"]


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """One push. Seconds are of wall time. ``staged_s``: until the last engine had staged; ``paused_s``: the longest
    pause of an engine for its commit; ``held_s``: how long engines had been held when the push began; ``behind``:
    engines that are out of service after it; ``canary``: what engines answered about a version before it (None: no
    engine did)."""

    policy_version: int
    staged_s: float
    paused_s: float
    total_s: float
    payload_bytes: int
    changed_share: float
    reanchored: int
    held_s: float = 0.0
    behind: int = 0
    canary: CanaryReport | None = None


class _CatchingUp:
    """An engine that catches up beside the run. ``staging`` may be cancelled; a commit is seen to its end."""

    def __init__(self) -> None:
        self.staging = anyio.CancelScope()
        self.ended = anyio.Event()


class WeightPublisher:
    """Pushes announced versions to ``engines``. ``anchor`` has the trainer publish a version complete; ``on_hold`` is
    told when a hold begins and when it has ended. ``service``: see above; ``patience_s``: how long after the first
    engine another one may go on staging before it leaves service (0: until the push is late).

    ``canary``: compares what engines compute after each push with what the trainer does (None: nobody does; it needs
    ``run``). Those beyond its limit take the next version as an anchor; who is beyond it even then ends the run.

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
        service: EngineService | None = None,
        patience_s: float = 0.0,
        canary: WeightCanary[PushedEngine] | None = None,
    ) -> None:
        self._engines = list(engines)
        self._behind: dict[PushedEngine, _CatchingUp | None] = {}
        self._need_anchor: set[PushedEngine] = set()
        self._live: WeightAnnouncement | None = None
        self._staging: dict[PushedEngine, anyio.CancelScope] = {}
        self._refusals: dict[PushedEngine, WeightError] = {}
        self._service = service
        self._patience_s = patience_s
        self._canary = canary
        self._suspects: set[PushedEngine] = set()
        self._first_live = anyio.Event()
        self._staged_at = 0.0
        self._anchor = anchor
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._one_at_a_time = anyio.Lock()
        self._paused_at: dict[PushedEngine, float] = {}
        self._held = False
        self._on_hold = on_hold

    async def run(self) -> None:
        """What goes on beside pushes: the canary's questions. Until it is cancelled."""
        if self._canary is not None:
            await self._canary.run()

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
        """Bring a started engine, whatever it holds, to the live version; later pushes reach it.

        It gets what was pushed last, on which it asks for a delta on its checkpoint, and an anchor if it refuses that.
        While the others are held it is held too. Raises ``EngineError`` when it refuses the anchor.
        """
        async with self._one_at_a_time:
            with self._in_time(f"version {policy_version} was not live on an engine that joined"):
                live = self._live
                if live is None or live.policy_version != policy_version or not await self._takes(engine, live):
                    anchor = await self._anchor(policy_version)
                    if not await self._takes(engine, anchor):
                        refusal = self._refusals[engine]
                        raise EngineError(
                            f"an engine that joined refused version {policy_version}: {refusal}"
                        ) from refusal
                if not self._held:
                    await self._resume_one(engine)
            self._engines.append(engine)

    async def leave(self, engine: PushedEngine) -> None:
        """Leave an engine out of later pushes: its process is about to be stopped."""
        async with self._one_at_a_time:
            if engine in self._behind:
                await self._stop_catching_up([engine])
            if engine in self._behind:
                del self._behind[engine]
            else:
                self._engines.remove(engine)
            self._paused_at.pop(engine, None)
            self._need_anchor.discard(engine)
            self._suspects.discard(engine)
            if self._canary is not None:
                self._canary.forget(engine)

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
        started = self._staged_at = anyio.current_time()
        held_since = min((at for engine, at in self._paused_at.items() if engine not in self._behind), default=started)
        await self._stop_catching_up(list(self._behind))
        canary = self._compared(announced)
        self._first_live, self._refusals = anyio.Event(), {}
        pauses = await self._on_all(announced, [engine for engine in self._engines if engine not in self._suspects])
        staged_s = self._staged_at - started
        refused = [engine for engine in self._engines if engine in self._refusals or engine in self._suspects]
        late = [engine for engine in self._engines if engine not in pauses and engine not in refused]
        anchor = None
        if refused or self._need_anchor:
            anchor = await self._anchor(announced.policy_version)
            pauses |= await self._on_all(anchor, refused)
        leaving = [engine for engine in self._engines if engine not in pauses]
        self._need_anchor.update(engine for engine in leaving if engine not in late)
        await self._leave_service(leaving, announced.policy_version)
        for engine in self._behind:
            self._catch_up(engine, anchor if anchor is not None and engine in self._need_anchor else announced)
        self._live = announced
        self._hold(False)
        if self._canary is not None:
            self._canary.ask(self._engines)
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
            behind=len(self._behind),
            canary=canary,
        )

    async def _on_all(
        self, announced: WeightAnnouncement, engines: Sequence[PushedEngine]
    ) -> dict[PushedEngine, float]:
        """Seconds that each engine stood still for its commit; those that refused or were late are left out."""
        pauses: dict[PushedEngine, float] = {}

        async def one(engine: PushedEngine) -> None:
            try:
                if await self._stage_in_time(engine, announced):
                    pauses[engine] = await self._commit_one(engine, announced)
                    self._first_live.set()
            except WeightError as error:
                self._refusals[engine] = error

        async with anyio.create_task_group() as watch:
            if self._service is not None and self._patience_s:
                watch.start_soon(self._give_up_staging)
            async with anyio.create_task_group() as group:
                for engine in engines:
                    group.start_soon(one, engine)
            watch.cancel_scope.cancel()
        return pauses

    async def _stage_in_time(self, engine: PushedEngine, announced: WeightAnnouncement) -> bool:
        with anyio.CancelScope() as scope:
            self._staging[engine] = scope
            try:
                await engine.stage(announced)
            finally:
                del self._staging[engine]
        self._staged_at = max(self._staged_at, anyio.current_time())
        return not scope.cancelled_caught

    async def _give_up_staging(self) -> None:
        await self._first_live.wait()
        await anyio.sleep(self._patience_s)
        for scope in self._staging.values():
            scope.cancel()

    def _compared(self, announced: WeightAnnouncement) -> CanaryReport | None:
        """What is said of the version before ``announced``. Raises ``EngineError`` where an anchor did not help."""
        if self._canary is None:
            return None
        report, suspects = self._canary.compare(announced.policy_version - 1, announced.probe_logprobs)
        once_more = suspects.keys() & self._suspects
        if once_more:
            raise EngineError(
                f"{len(once_more)} engines compute something else than the trainer with the same weights, after an "
                f"anchor as before it: logprobs of the canary are {max(suspects.values()):.3g} nats apart "
                f"({self._canary.limit:g} may be). Set engines.dtype and training.compute_dtype to float32 to see "
                "whether rounding does it; weights.canary = false lets the run go on"
            )
        self._suspects = {engine for engine in suspects if engine in self._engines}
        return report

    # ---- engines that are behind -------------------------------------------------------------------

    async def _leave_service(self, leaving: Sequence[PushedEngine], policy_version: int) -> None:
        for engine in leaving:
            refusal = self._refusals.get(engine)
            if self._service is None or len(leaving) == len(self._engines):
                raise EngineError(
                    f"an engine refused version {policy_version} as delta and as anchor: {refusal}"
                ) from refusal
        for engine in leaving:
            assert self._service is not None
            self._engines.remove(engine)
            self._behind[engine] = None
            late = f"it was still fetching version {policy_version} {self._patience_s:g} s after others had it"
            await self._service.take_out(engine, str(self._refusals.get(engine, late)))

    def _catch_up(self, engine: PushedEngine, announced: WeightAnnouncement) -> None:
        catching = self._behind[engine] = _CatchingUp()
        service = self._service
        assert service is not None

        async def work() -> None:
            try:
                with catching.staging:
                    await engine.stage(announced)
                if not catching.staging.cancelled_caught:
                    await self._verified_commit(engine, announced)
                    await self._back_in_service(service, engine)
            except WeightError:
                self._behind[engine] = None  # the next push tries again, with the anchor of its own version
                self._need_anchor.add(engine)
            finally:
                catching.ended.set()

        service.beside(work)

    async def _back_in_service(self, service: EngineService, engine: PushedEngine) -> None:
        if not self._held:
            await self._resume_one(engine)
        del self._behind[engine]
        self._need_anchor.discard(engine)
        self._engines.append(engine)
        await service.take_back(engine)

    async def _stop_catching_up(self, engines: Sequence[PushedEngine]) -> None:
        """Give up what is being fetched; wait for what is being committed."""
        for engine in engines:
            catching = self._behind.get(engine)
            if catching is not None:
                catching.staging.cancel()
                await catching.ended.wait()

    # ---- one engine --------------------------------------------------------------------------------

    async def _commit_one(self, engine: PushedEngine, announced: WeightAnnouncement) -> float:
        """Seconds that the engine stood still for it. Never resumed on weights that were not verified."""
        began = anyio.current_time()
        await self._verified_commit(engine, announced)
        await self._resume_one(engine)
        return anyio.current_time() - began

    async def _takes(self, engine: PushedEngine, announced: WeightAnnouncement) -> bool:
        """Stage and commit; leaves the engine paused. False when it refused, for the reason that is then noted."""
        try:
            await engine.stage(announced)
            await self._verified_commit(engine, announced)
        except WeightError as error:
            self._refusals[engine] = error
            return False
        return True

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
