"""A weight push, as one transaction over all engines.

Each engine for itself: stage while it generates; pause; apply and verify on the live weights; resume. One that refuses
the delta (wrong base, wrong digest, a commit that failed half-way) is re-anchored before it serves again. The ranks'
shadow advances only when every engine that serves acknowledged.

With an ``EngineService``, an engine that refuses the anchor too, or that is still fetching long after the others went
on, leaves service instead of ending the run or holding it up: its requests go on elsewhere, and beside the run it
catches up, at each push anew, until it holds what the others hold. Then it serves again. One that was late goes on with
what was announced; where it missed versions it asks the trainer for one delta over them. One that refused that, or an
anchor, takes the anchor of the live version.

An engine may also be lost at any moment: its host died, or it did not do in time what it was told. Where the service
lets the run go on without it, it is left out at once, also of a push that is under way. Whoever takes its place
``join``s as one that is behind, and serves when it holds the live version; one that outlived its controller may hold it
already.

``hold`` pauses the engines ahead of a push, so that requests for the next version may be submitted while the step
ends: they queue, and their first token is computed after the commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from streamrl.base.errors import EngineError, VersionLeft, WeightError
from streamrl.base.messages import EngineReady, WeightAnnouncement
from streamrl.base.waits import Waits
from streamrl.recipe.scheduling import InFlight
from streamrl.sync.engine_steps import CatchingUp, EngineSteps
from streamrl.sync.push_report import PushReport
from streamrl.sync.pushed_engine import EngineService, PushedEngine
from streamrl.sync.weight_canary import CanaryReport, WeightCanary

__all__ = ["EngineService", "PushReport", "PushedEngine", "WeightPublisher"]


class WeightPublisher:
    """Pushes announced versions to ``engines``. ``anchor`` has the trainer publish a version complete; ``on_hold`` is
    told when a hold begins and when it has ended. ``service``: see above; ``patience_s``: how long after the first
    engine another one may go on staging before it leaves service (0: until the push is late).

    ``canary``: compares what engines compute after each push with what the trainer does (None: nobody does; it needs
    ``run``). Those beyond its limit take the next version as an anchor; who is beyond it even then ends the run.

    ``waits``: where each wait for an engine, by ``name_of`` it, is open while it lasts.

    ``push``, ``hold``, ``release``, ``admit`` and ``leave`` wait for each other. ``stranded`` is called where no engine
    holds what is live and none can be brought to it: only the next version helps.
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
        waits: Waits | None = None,
        name_of: Callable[[PushedEngine], str] = lambda _: "an engine",
    ) -> None:
        self._engines = list(engines)
        self._behind: dict[PushedEngine, CatchingUp | None] = {}
        self._need_anchor: set[PushedEngine] = set()
        self._live: WeightAnnouncement | None = None
        self._staging: dict[PushedEngine, anyio.CancelScope] = {}
        self._refusals: dict[PushedEngine, WeightError] = {}
        self._service = service
        self._patience_s = patience_s
        self._canary = canary
        self._suspects: set[PushedEngine] = set()
        self._joined: set[PushedEngine] = set()
        self._pushing = False
        self._one_anchor = anyio.Lock()
        self._first_live = anyio.Event()
        self._staged_at = 0.0
        self._anchor = anchor
        self._steps = EngineSteps(
            in_flight=in_flight,
            timeout_s=timeout_s,
            service=service,
            lose=self.lose,
            waits=waits or Waits(),
            name_of=name_of,
        )
        self._one_at_a_time = anyio.Lock()
        self._held = False
        self._on_hold = on_hold
        self.stranded: Callable[[], object] = lambda: None

    async def run(self) -> None:
        """What goes on beside pushes: the canary's questions. Until it is cancelled."""
        if self._canary is not None:
            await self._canary.run()

    async def push(self, announced: WeightAnnouncement) -> PushReport:
        """Make ``announced`` live on every engine; ends a hold. Raises ``EngineError`` when that fails or is late."""
        async with self._one_at_a_time:
            self._pushing = True
            report = await self._push(announced)
            self._pushing = False  # not after a failure: engines may hold ``announced``, and none must go back
            return report

    async def hold(self) -> None:
        """Pause all engines until the next push or ``release``: what is submitted from now on waits for it.

        Requests in flight are treated as a push would treat them. Raises ``EngineError`` when an engine does not stop.
        """
        async with self._one_at_a_time:
            # Whoever comes back meanwhile must not go on alone.
            while running := [engine for engine in self._engines if engine not in self._steps.paused_at]:
                await self._steps.on_each(self._steps.pause, running, "not every engine was paused")
            self._hold(True)

    async def release(self) -> None:
        """Resume engines that are held, without a push: what was submitted meanwhile is sampled by the live version."""
        async with self._one_at_a_time:
            # Whoever comes back meanwhile is held as well.
            while held := [engine for engine in self._engines if engine in self._steps.paused_at]:
                await self._steps.on_each(self._steps.resume, held, "not every engine was resumed")
            self._hold(False)

    async def admit(self, engine: PushedEngine, policy_version: int) -> None:
        """Bring a started engine, whatever it holds, to the live version; later pushes reach it.

        It gets what was pushed last, on which it asks for a delta on its checkpoint, and an anchor if it refuses that.
        While the others are held it is held too. Raises ``EngineError`` when it refuses the anchor.
        """
        async with self._one_at_a_time:
            with self._steps.in_time(
                f"version {policy_version} was not live on an engine that joined", self._steps.deadline()
            ):
                live = self._live
                taken = live is not None and live.policy_version == policy_version and await self._takes(engine, live)
                if not taken and not await self._takes(engine, await self._anchor_of(policy_version)):
                    refusal = self._refusals[engine]
                    raise EngineError(f"an engine that joined refused version {policy_version}: {refusal}") from refusal
                if not self._held:
                    await self._steps.resume(engine)
            self._engines.append(engine)

    async def leave(self, engine: PushedEngine) -> None:
        """Leave an engine out of later pushes: its process is about to be stopped."""
        async with self._one_at_a_time:
            await self._stop_catching_up([engine])
            if engine in self._behind:
                del self._behind[engine]
            else:
                self._engines.remove(engine)
            self._forget(engine)

    def greeted(self, engine: PushedEngine, ready: EngineReady) -> None:
        """What ``engine`` said when it came. One that outlived its controller stands still, and need not be sent again
        what it holds. Before its first push."""
        self._steps.greeted(engine, ready)

    def join(self, engine: PushedEngine, ready: EngineReady) -> None:
        """Bring an engine, which took the place of one that was lost, to the live version, beside the run; then it
        serves. Where nothing is live yet it follows the first push."""
        self.greeted(engine, ready)
        self._behind[engine] = None
        self._joined.add(engine)
        if self._live is not None and not self._pushing:  # else the push sees to it when it ends
            self._catch_up(engine, self._live)

    def lose(self, engine: PushedEngine) -> None:
        """Leave ``engine`` out of everything, at once: its host died. Of what is under way, too."""
        if engine in self._engines:
            self._engines.remove(engine)
        if (catching := self._behind.pop(engine, None)) is not None:
            catching.give_up()
        self._forget(engine)

    def _forget(self, engine: PushedEngine) -> None:
        self._steps.forget(engine)
        self._refusals.pop(engine, None)
        for among in (self._need_anchor, self._suspects, self._joined):
            among.discard(engine)
        if self._canary is not None:
            self._canary.forget(engine)

    def _hold(self, held: bool) -> None:
        changed, self._held = held != self._held, held
        if changed and self._on_hold is not None:
            self._on_hold(held)

    async def _anchor_of(self, policy_version: int) -> WeightAnnouncement:
        """The trainer is asked one question at a time."""
        async with self._one_anchor:
            return await self._anchor(policy_version)

    async def _push(self, announced: WeightAnnouncement) -> PushReport:
        started = self._staged_at = anyio.current_time()
        late_text = f"version {announced.policy_version} was not live on every engine"
        held_since = min(
            (at for engine, at in self._steps.paused_at.items() if engine not in self._behind), default=started
        )
        await self._stop_catching_up(list(self._behind))
        deadline = self._steps.deadline()  # not before: a commit beside the run may have taken as long as it could
        canary = self._compared(announced)
        self._first_live, self._refusals = anyio.Event(), {}
        sound = [engine for engine in self._engines if engine not in self._suspects]
        pauses = await self._on_all(announced, sound, late_text, deadline)
        staged_s = self._staged_at - started
        refused = [engine for engine in self._engines if engine in self._refusals or engine in self._suspects]
        late = [engine for engine in self._engines if engine not in pauses and engine not in refused]
        anchor = None
        if refused or self._need_anchor:
            with self._steps.in_time(late_text, deadline):
                anchor = await self._anchor_of(announced.policy_version)
            pauses |= await self._on_all(anchor, [e for e in refused if e in self._engines], late_text, deadline)
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
            paused_s=max(pauses.values(), default=0.0),  # none: all are lost, and whoever comes takes this version
            total_s=anyio.current_time() - started,
            payload_bytes=sum(s.payload_bytes for s in announced.sources),
            changed_share=changed / max(sum(s.total_elements for s in announced.sources), 1),
            reanchored=len(refused),
            held_s=started - held_since,
            behind=len(self._behind),
            canary=canary,
        )

    async def _on_all(
        self, announced: WeightAnnouncement, engines: Sequence[PushedEngine], late: str, deadline: float
    ) -> dict[PushedEngine, float]:
        """Seconds that each engine stood still for its commit; those that refused, were late or lost are left out."""
        pauses: dict[PushedEngine, float] = {}
        failed: EngineError | None = None

        async def one(engine: PushedEngine) -> None:
            try:
                if await self._stage_in_time(engine, announced):
                    pauses[engine] = await self._steps.commit(engine, announced)
                    self._first_live.set()
            except WeightError as error:
                self._refusals[engine] = error

        async with anyio.create_task_group() as watch:
            if self._service is not None and self._patience_s:
                watch.start_soon(self._give_up_staging)
            try:
                await self._steps.on_each(one, engines, late, deadline)
            except EngineError as error:  # out of the group as it is
                failed = error
            watch.cancel_scope.cancel()
        if failed is not None:
            raise failed
        return pauses

    async def _stage_in_time(self, engine: PushedEngine, announced: WeightAnnouncement) -> bool:
        with anyio.CancelScope() as scope:
            self._staging[engine] = scope
            try:
                await self._steps.stage(engine, announced)
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
        self._canary.refuse(suspects, self._suspects)
        self._suspects = {engine for engine in suspects if engine in self._engines}
        return report

    # ---- engines that are behind -------------------------------------------------------------------

    async def _leave_service(self, leaving: Sequence[PushedEngine], policy_version: int) -> None:
        alone = len(leaving) == len(self._engines)
        for engine in leaving:
            refusal = self._refusals.get(engine)
            if self._service is None or alone:
                error = EngineError(f"an engine refused version {policy_version} as delta and as anchor: {refusal}")
                error.__cause__ = refusal
                self._steps.go_on_without(engine, error)
        for engine in () if alone else leaving:
            assert self._service is not None
            self._engines.remove(engine)
            self._behind[engine] = None
            late = f"it was still fetching version {policy_version} {self._patience_s:g} s after others had it"
            await self._service.take_out(engine, str(self._refusals.get(engine, late)))

    def _catch_up(self, engine: PushedEngine, announced: WeightAnnouncement) -> None:
        catching = self._behind[engine] = CatchingUp()
        service = self._service
        assert service is not None

        async def work() -> None:
            try:
                await self._catch_up_with(service, engine, announced, catching)
            except WeightError as error:
                self._refused_beside(engine, error)
            except EngineError as error:
                self._steps.go_on_without(engine, error)
            finally:
                catching.ended.set()

        service.beside(work)

    async def _catch_up_with(
        self, service: EngineService, engine: PushedEngine, announced: WeightAnnouncement, catching: CatchingUp
    ) -> None:
        try:
            held = await self._fetched_and_committed(engine, announced, catching)
        except WeightError:
            if engine not in self._joined or announced.base_version is None or self._pushing:
                raise
            with anyio.CancelScope(shield=True):  # nobody else may ask before the trainer has answered
                anchor = await self._anchor_of(announced.policy_version)
            held = await self._fetched_and_committed(engine, anchor, catching)
        if held:
            with self._steps.in_time("an engine that holds the live version was not resumed", self._steps.deadline()):
                await self._back_in_service(service, engine)

    async def _fetched_and_committed(
        self, engine: PushedEngine, announced: WeightAnnouncement, catching: CatchingUp
    ) -> bool:
        """False: a push wants it to hold something newer. Fetching may take as long as it does."""
        with catching.fetching():
            await self._steps.stage(engine, announced)
        if catching.given_up:
            return False
        version = announced.policy_version
        with self._steps.in_time(f"version {version} was not committed beside the run", self._steps.deadline()):
            await self._steps.verified_commit(engine, announced)
        return True

    def _refused_beside(self, engine: PushedEngine, refusal: WeightError) -> None:
        """The next push tries again, with the anchor of its own version. Where nobody serves none would ever come."""
        if engine not in self._behind:
            return
        self._behind[engine] = None
        self._need_anchor.add(engine)
        if not self._engines and not self._pushing and isinstance(refusal, VersionLeft):
            self.stranded()
        elif not self._engines and not self._pushing:
            self._steps.go_on_without(engine, EngineError(f"it refused what is live, and no other serves: {refusal}"))

    async def _back_in_service(self, service: EngineService, engine: PushedEngine) -> None:
        if not self._held:
            await self._steps.resume(engine)
            if self._held:  # since it was told to go on
                await self._steps.pause(engine)
        if engine not in self._behind:
            return  # it was lost meanwhile
        del self._behind[engine]
        self._need_anchor.discard(engine)
        self._joined.discard(engine)
        self._engines.append(engine)
        await service.take_back(engine)

    async def _stop_catching_up(self, engines: Sequence[PushedEngine]) -> None:
        """Give up what is being fetched; wait for what is being committed."""
        for engine in engines:
            catching = self._behind.get(engine)
            if catching is not None:
                catching.give_up()
                await catching.ended.wait()

    # ---- one engine --------------------------------------------------------------------------------

    async def _takes(self, engine: PushedEngine, announced: WeightAnnouncement) -> bool:
        """Stage and commit; leaves the engine paused. False when it refused, for the reason that is then noted."""
        try:
            await engine.stage(announced)
            await self._steps.verified_commit(engine, announced)
        except WeightError as error:
            self._refusals[engine] = error
            return False
        return True
