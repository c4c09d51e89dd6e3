"""A weight push, as one transaction over all engines.

Each engine for itself: stage while it generates; pause; apply and verify on the live weights; resume. One that refuses
the delta (wrong base, wrong digest, a commit that failed half-way) takes an anchor before it serves again.

An engine that refuses the anchor too, that dies, or that is late fails. Where ``on_failure`` lets the run continue
without it, it is left out of this push and of later ones, and started again; a started engine is ``admit``ted: brought
to the live version while the others sample, and pushed to from then on. Otherwise its failure ends the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import anyio

from streamrl.base.errors import EngineError, VersionLeft, WeightError
from streamrl.base.messages import PauseMode, WeightAnnouncement
from streamrl.base.waits import Waits
from streamrl.contracts import CanaryReport, Engine, PushReport
from streamrl.engines.push.verify import WeightCanary
from streamrl.recipe.scheduling import InFlight

Limit = Callable[[], AbstractContextManager[None]]
Routed = Callable[[WeightAnnouncement, str, Collection[str]], WeightAnnouncement]
"""The announcement of a version to an engine, given its name and those that take the version with it, or hold it."""


class WeightSync:
    """Pushes announced versions to ``engines``, by name.

    ``anchor`` has the trainer publish a version complete (``VersionLeft``: it has moved on). ``on_pause`` is called
    with True when all engines are paused, by a push or ahead of it, with False when that ends. ``on_failure`` is given
    an engine and why it failed, and returns whether the run continues without it (None: it does not).

    ``canary``: compares what engines compute after each push with what the trainer does; it needs ``run``. Engines
    beyond its limit take the next version as an anchor; one that is beyond it even then ends the run. ``waits``: where
    each wait for an engine is named while it lasts. ``routed``: see ``push.relay_tree``.

    ``push``, ``pause``, ``resume`` and the last step of ``admit`` exclude each other. ``on_version_left`` is called
    where no engine holds what is live and none can be brought to it: only the next version helps."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        anchor: Callable[[int], Awaitable[WeightAnnouncement]],
        *,
        in_flight: InFlight,
        timeout_s: float,
        on_pause: Callable[[bool], None] | None = None,
        on_failure: Callable[[Engine, str], bool] | None = None,
        canary: WeightCanary | None = None,
        waits: Waits | None = None,
        routed: Routed = lambda announced, _name, _engines: announced,
    ) -> None:
        self._engines = {engine: name for name, engine in engines.items()}
        self._anchor = anchor
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._on_pause = on_pause
        self._on_failure = on_failure
        self._canary = canary
        self._waits = waits or Waits()
        self._routed = routed
        self._live: WeightAnnouncement | None = None
        self._pushed = anyio.Event()
        self._paused = False  # ahead of a push
        self._noted_pause = False
        self.paused_engines: set[Engine] = set()
        """Engines that sample nothing now."""
        self._one_at_a_time = anyio.Lock()
        self._one_anchor = anyio.Lock()  # the trainer is asked for one at a time
        self.on_version_left: Callable[[], object] = lambda: None

    async def run(self) -> None:
        """Run what goes on beside pushes, the canary's requests, until it is cancelled."""
        if self._canary is not None:
            await self._canary.run()

    # ---- all engines -------------------------------------------------------------------------------

    async def push(self, announced: WeightAnnouncement) -> PushReport:
        """Make ``announced`` live on every engine; ends a pause. Raises ``EngineError`` when that fails or is late."""
        async with self._one_at_a_time:
            self._paused = False  # each engine resumes by itself
            self._live = None  # engines may hold ``announced`` from here on: none must be brought to the one before
            report = await self._push(announced)
            self._live = announced
            self._pushed.set()
            self._pushed = anyio.Event()
            return report

    async def pause(self) -> None:
        """Pause all engines until the next push or ``resume``: requests submitted from now on wait for it, and their
        first token is computed after the commit. Requests in flight are treated as a push would treat them."""
        async with self._one_at_a_time:
            await _on_each(self._pause, list(self._engines), self._limit("not every engine was paused"), self._failed)
            self._paused = True

    async def resume(self) -> None:
        """Resume paused engines without a push: requests submitted meanwhile are sampled by the live version."""
        async with self._one_at_a_time:
            paused = [engine for engine in self._engines if engine in self.paused_engines]
            self._paused = False
            await _on_each(self._resume, paused, self._limit("not every engine was resumed"), self._failed)

    async def _push(self, announced: WeightAnnouncement) -> PushReport:
        started = anyio.current_time()
        limit = self._limit(f"version {announced.policy_version} was not live on every engine")
        report = None
        deviating = set[Engine]()
        if self._canary is not None:
            report = self._canary.compare(announced.policy_version - 1, announced.probe_logprobs)
            deviating = self._canary.deviating
        pauses: dict[Engine, float] = {}
        refusals: dict[Engine, WeightError] = {}
        staged_at = started

        async def take(engine: Engine, version: WeightAnnouncement, names: Mapping[Engine, str]) -> None:
            nonlocal staged_at
            try:
                await self._stage(engine, self._routed(version, names[engine], names.values()))
                staged_at = max(staged_at, began := anyio.current_time())
                await self._commit(engine, version)
                await self._resume(engine)
                pauses[engine] = anyio.current_time() - began
            except WeightError as error:
                refusals[engine] = error

        sound = {engine: name for engine, name in self._engines.items() if engine not in deviating}
        await _on_each(partial(take, version=announced, names=sound), list(sound), limit, self._failed)
        again = {engine: name for engine, name in self._engines.items() if engine not in pauses}
        if again:
            with limit():
                anchor = await self._anchor_of(announced.policy_version)
            await _on_each(partial(take, version=anchor, names=again), list(again), limit, self._failed)
        for engine in [engine for engine in self._engines if engine not in pauses]:
            self._failed(engine, _refused(self._engines[engine], announced, refusals[engine]))
        if self._canary is not None:
            self._canary.ask(list(self._engines))
        return _report(announced, started, staged_at, list(pauses.values()), len(again), report)

    def _note_pause(self) -> None:
        paused = bool(self._engines) and self._engines.keys() <= self.paused_engines
        changed = paused != self._noted_pause
        self._noted_pause = paused
        if changed and self._on_pause is not None:
            self._on_pause(paused)

    # ---- engines that come and go ------------------------------------------------------------------

    async def admit(self, name: str, engine: Engine, waits: Callable[[], object] = lambda: None) -> None:
        """Bring a started engine to the live version while the others sample; later pushes reach
        it. It is sampling when this returns, unless all are paused.

        It gets what was pushed last, for which it fetches the deltas that it lacks, and an anchor if it refuses that.
        An anchor is served until the next version is on all others: where a push was faster than its fetch, the pushes
        wait for the next attempt. ``waits`` is called where only the next version helps: what the others sample may be
        needed for that. Raises ``EngineError`` when it refuses the anchor, dies, or is late."""
        alone: anyio.Lock | nullcontext[None] = nullcontext()
        while True:
            while self._live is None:
                await self._pushed.wait()
            try:
                async with alone:
                    live = self._live
                    pushed = self._pushed
                    limit = self._limit(f"version {live.policy_version} was not live on {name}")
                    with limit():
                        await self._catch_up(name, engine, live)
            except EngineError as error:
                if self._live is live or not isinstance(error.__cause__, WeightError):
                    raise
                alone = self._one_at_a_time
                continue
            except VersionLeft:
                waits()
                if not self._engines and self._live is live:
                    self.on_version_left()
                await pushed.wait()
                continue
            async with self._one_at_a_time:
                if self._live is live:  # else a push was faster: one delta more
                    if not self._paused:
                        with limit():
                            await self._resume(engine)
                    self._engines[engine] = name
                    return

    async def _catch_up(self, name: str, engine: Engine, live: WeightAnnouncement) -> None:
        announced = live
        while True:
            try:
                await self._stage(engine, self._routed(announced, name, self._engines.values()))
                return await self._commit(engine, announced)
            except WeightError as refusal:
                if announced is not live:
                    raise _refused(name, live, refusal) from refusal
            with anyio.CancelScope(shield=True):  # a push must not ask before the trainer has answered
                announced = await self._anchor_of(live.policy_version)

    async def leave(self, engine: Engine) -> None:
        """Leave ``engine`` out of later pushes, since it is to stop or sleep. A push that is under way ends first."""
        async with self._one_at_a_time:
            self.remove(engine)

    def remove(self, engine: Engine) -> None:
        """Leave ``engine`` out of this push and of later ones: it died."""
        self._engines.pop(engine, None)
        self.paused_engines.discard(engine)
        if self._canary is not None:
            self._canary.forget(engine)

    def _failed(self, engine: Engine, error: EngineError) -> None:
        """Raises ``error`` where the run ends by it."""
        if engine in self._engines:  # else it was removed meanwhile
            if self._on_failure is None or not self._on_failure(engine, str(error)):
                raise error
            self.remove(engine)

    async def _anchor_of(self, policy_version: int) -> WeightAnnouncement:
        async with self._one_anchor:
            return await self._anchor(policy_version)

    # ---- one engine --------------------------------------------------------------------------------

    async def _stage(self, engine: Engine, announced: WeightAnnouncement) -> None:
        with self._waiting(engine, f"fetch version {announced.policy_version}"):
            await engine.stage(announced)

    async def _commit(self, engine: Engine, announced: WeightAnnouncement) -> None:
        """Pause, commit and verify; leaves the engine paused, which samples only by weights that were verified. Raises
        ``WeightError`` where it refuses, or where the live weights are not what was published."""
        await self._pause(engine)
        with self._waiting(engine, f"commit version {announced.policy_version}"):
            done = await engine.commit(announced.policy_version)
        if done.state_hash != announced.state_hash:
            raise WeightError(
                f"live weights hash to {done.state_hash:016x} at version {announced.policy_version}, "
                f"the trainer published {announced.state_hash:016x}"
            )

    async def _pause(self, engine: Engine) -> None:
        """Pause an engine, unless it was paused ahead, or its commit was refused: then it is paused already."""
        if engine in self.paused_engines:
            return
        self.paused_engines.add(engine)
        mode = PauseMode.ABORT if self._in_flight is InFlight.RESUME else PauseMode.KEEP
        with self._waiting(engine, "pause"):
            await engine.pause(mode, clear_cache=self._in_flight is not InFlight.KEEP)
        self._note_pause()

    async def _resume(self, engine: Engine) -> None:
        with self._waiting(engine, "resume"):
            await engine.resume()
        self.paused_engines.discard(engine)
        self._note_pause()

    def _waiting(self, engine: Engine, step: str) -> AbstractContextManager[None]:
        name = self._engines.get(engine, "an engine that was started")
        return self._waits.waiting_for(f"{name} to {step}", who="the weight sync")

    # ---- in time, or without it --------------------------------------------------------------------

    def _limit(self, failure: str) -> Limit:
        return partial(_in_time, failure, anyio.current_time() + self._timeout_s, self._timeout_s)


async def _on_each(
    step: Callable[[Engine], Coroutine[None, None, object]],
    engines: Sequence[Engine],
    limit: Limit,
    leave_out: Callable[[Engine, EngineError], None],
) -> None:
    """Do ``step`` on all of ``engines`` at once, and leave out those that fail. Raises what ``leave_out`` raises, alone
    and not in a group: the run cannot continue without that engine."""
    failed: list[EngineError] = []

    async def one(engine: Engine) -> None:
        try:
            with limit():
                await step(engine)
        except EngineError as error:
            try:
                leave_out(engine, error)
            except EngineError as fatal:
                failed.append(fatal)
                group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for engine in engines:
            group.start_soon(one, engine)
    if failed:
        raise failed[0]


def _report(
    announced: WeightAnnouncement,
    started: float,
    staged_at: float,
    pauses: Sequence[float],
    reanchored: int,
    canary: CanaryReport | None,
) -> PushReport:
    sources = announced.sources
    return PushReport(
        policy_version=announced.policy_version,
        staged_s=staged_at - started,
        paused_s=max(pauses, default=0.0),  # none: all are lost, and those to come take this version
        total_s=anyio.current_time() - started,
        payload_bytes=sum(s.payload_bytes for s in sources),
        changed_share=sum(s.changed_elements for s in sources) / max(sum(s.total_elements for s in sources), 1),
        reanchored=reanchored,
        canary=canary,
    )


def _refused(name: str, announced: WeightAnnouncement, refusal: WeightError) -> EngineError:
    error = EngineError(f"{name} refused version {announced.policy_version} as delta and as anchor: {refusal}")
    error.__cause__ = refusal
    return error


@contextmanager
def _in_time(failure: str, deadline: float, timeout_s: float) -> Iterator[None]:
    """Raises ``EngineError`` where what is done within is not done at ``deadline``."""
    try:
        with anyio.fail_after(deadline - anyio.current_time()):
            yield
    except TimeoutError as error:
        raise EngineError(f"{failure} within {timeout_s:g} s (weights.advanced.push_timeout_s)") from error
