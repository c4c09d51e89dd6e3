"""A weight push as one transaction over all engines. It runs in the controller, which makes it in ``launch.sampling``.

Each engine independently stages the version while it generates, pauses, applies the version, verifies the live weights,
and resumes. An engine that refuses the delta (made for another version, wrong digest, a commit that failed half-way)
takes an anchor, the complete version, before it serves again.

An engine fails when it refuses the anchor, too, when it dies, or when it is late. If ``on_failure`` lets the run
continue, the failed engine is excluded from this push and later ones, and started again (``elastic.engine_processes``).
A started engine is admitted: it gets the live version while the others sample, and later pushes reach it. Otherwise the
failure ends the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from anyio import CancelScope, Event, Lock, create_task_group, current_time, fail_after

from streamrl.base.concurrent_calls import all_of
from streamrl.base.errors import EngineError, VersionLeft, WeightError
from streamrl.base.messages import FirstProbe, PauseMode, WeightAnnouncement
from streamrl.base.waits import Waits
from streamrl.contracts import Engine, PushReport
from streamrl.engines.push.verify import WeightCanary
from streamrl.recipe.scheduling import InFlight
from streamrl.weights.distance import Mover

Limit = Callable[[], AbstractContextManager[None]]
AddRelays = Callable[[WeightAnnouncement, str, Collection[str]], WeightAnnouncement]
"""Returns the announcement of a version to one engine, with relays. Arguments: the announcement, the name of the
engine, and the names of the engines that take the version at the same time, or hold it."""


class WeightSync:
    """Pushes announced versions to the engines.

    ``engines``: engines by name
    ``anchor``: function that has the trainer publish a version complete; raises ``VersionLeft`` when the trainer has a
    newer version
    ``on_pause``: callback, with True when all engines are paused, by a push or ahead of it, and with False afterwards
    ``on_failure``: callback with a failed engine and the reason; returns whether the run continues without the engine
    (None: it never does)
    ``canary``: comparison of the engines' logprobs with the trainer's after each push, which needs ``run``. Engines
    beyond its limit take the next version as an anchor; an engine that is beyond the limit again ends the run
    ``waits``: list of current waits, in which each wait for an engine is named
    ``add_relays``: function that adds relays to an announcement (``push.relay_tree``)

    ``push``, ``pause``, ``resume`` and the last step of ``admit`` exclude each other. ``on_version_left`` is called
    when no engine holds the live version and no engine can get it: then only the next version helps."""

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
        add_relays: AddRelays = lambda announced, _name, _engines: announced,
    ) -> None:
        self._engines = {engine: name for name, engine in engines.items()}
        self._anchor = anchor
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._on_pause = on_pause
        self._on_failure = on_failure
        self._canary = canary
        self._waits = waits or Waits()
        self._add_relays = add_relays
        self._live: WeightAnnouncement | None = None
        self._pushed = Event()
        self._paused = False  # all engines, ahead of a push
        self._reported_pause = False
        self.paused_engines: set[Engine] = set()
        """Engines that are paused now."""
        self._one_at_a_time = Lock()
        self._one_anchor = Lock()  # the trainer publishes one anchor at a time
        self.on_version_left: Callable[[], object] = lambda: None

    async def run(self) -> None:
        """Run the requests of the canary, beside the pushes, until this call is cancelled."""
        if self._canary is not None:
            await self._canary.run()

    # ---- all engines -------------------------------------------------------------------------------

    async def push(self, announced: WeightAnnouncement) -> PushReport:
        """Make ``announced`` live on every engine, and end a pause. Raises ``EngineError`` for a failure that ends the
        run."""
        async with self._one_at_a_time:
            self._paused = False  # the push resumes each engine
            self._live = (
                None  # engines may hold ``announced`` from now on: no started engine may get the version before it
            )
            report = await self._push(announced)
            self._live = announced
            self._pushed.set()
            self._pushed = Event()
            return report

    async def check_first_tokens(self, probe: FirstProbe) -> None:
        """Compare what each engine computes with the trainer's ``probe`` of the live version, before anything is
        trained: engines of several sets, or on several kinds of GPUs, may differ. Raises ``EngineError`` where one
        differs by more than rounding does."""
        if self._canary is not None:
            await all_of([partial(self._canary.check_first, engine, probe) for engine in self._engines])

    async def pause(self) -> None:
        """Pause all engines until the next push or ``resume``. Requests that are submitted from now on wait for it, and
        their first token is sampled after the commit. Requests in flight are treated as in a push."""
        async with self._one_at_a_time:
            await _on_each(self._pause, list(self._engines), self._limit("not every engine was paused"), self._failed)
            self._paused = True

    async def resume(self) -> None:
        """Resume paused engines without a push. Requests that were submitted meanwhile are sampled by the live
        version."""
        async with self._one_at_a_time:
            paused = [engine for engine in self._engines if engine in self.paused_engines]
            self._paused = False
            await _on_each(self._resume, paused, self._limit("not every engine was resumed"), self._failed)

    async def _push(self, announced: WeightAnnouncement) -> PushReport:
        started = current_time()
        limit = self._limit(f"version {announced.policy_version} was not live on every engine")
        report = None
        deviating = set[Engine]()
        if self._canary is not None:
            report = self._canary.compare(announced.policy_version - 1, announced.probe_logprobs)
            deviating = self._canary.deviating
        pauses: dict[Engine, float] = {}
        from_memory: set[Engine] = set()
        refusals: dict[Engine, WeightError] = {}
        staged_at = started

        async def take(engine: Engine, version: WeightAnnouncement, names: Mapping[Engine, str]) -> None:
            nonlocal staged_at
            try:
                mover = await self._stage(engine, self._add_relays(version, names[engine], names.values()))
                if mover not in ("", Mover.ENCODED):
                    from_memory.add(engine)
                began = current_time()
                staged_at = max(staged_at, began)
                await self._commit(engine, version)
                await self._resume(engine)
                pauses[engine] = current_time() - began
            except WeightError as error:
                refusals[engine] = error

        sound = {engine: name for engine, name in self._engines.items() if engine not in deviating}
        await _on_each(partial(take, version=announced, names=sound), list(sound), limit, self._failed)
        refusing = {engine: name for engine, name in self._engines.items() if engine not in pauses}
        if refusing:
            with limit():
                anchor = await self._anchor_of(announced.policy_version)
            await _on_each(partial(take, version=anchor, names=refusing), list(refusing), limit, self._failed)
        for engine in [engine for engine in self._engines if engine not in pauses]:
            self._failed(engine, _refused(self._engines[engine], announced, refusals[engine]))
        if self._canary is not None:
            self._canary.ask(list(self._engines))
        sources = announced.sources
        changed_elements = sum(source.changed_elements for source in sources)
        total_elements = sum(source.total_elements for source in sources)
        return PushReport(
            policy_version=announced.policy_version,
            staged_s=staged_at - started,
            # Without a pause all engines are lost; started ones will get this version.
            paused_s=max(pauses.values(), default=0.0),
            total_s=current_time() - started,
            payload_bytes=sum(source.payload_bytes for source in sources),
            changed_share=changed_elements / max(total_elements, 1),
            reanchored=len(refusing),
            from_memory=len(from_memory),
            canary=report,
        )

    def _report_pause(self) -> None:
        paused = bool(self._engines) and self._engines.keys() <= self.paused_engines
        changed = paused != self._reported_pause
        self._reported_pause = paused
        if changed and self._on_pause is not None:
            self._on_pause(paused)

    # ---- engines that come and go ------------------------------------------------------------------

    async def admit(self, name: str, engine: Engine, waits: Callable[[], object] = lambda: None) -> None:
        """Give a started engine the live version while the others sample. Later pushes reach the engine. When this
        returns, it samples, unless all engines are paused.

        The engine gets the version of the last push, with all deltas that it lacks, or an anchor if it refuses this.
        The trainer serves an anchor until the next version is on all other engines. When a push ends before the engine
        has fetched, the next attempt holds ``_one_at_a_time``, so that no push can begin.

        ``waits``: callback when the engine must wait for the next version, for which samples of the others may be
        needed

        Raises ``EngineError`` when the engine refuses the anchor, dies, or is late."""
        alone: Lock | nullcontext[None] = nullcontext()
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
                alone = self._one_at_a_time  # a push came between, and the refusal is about an old version
                continue
            except VersionLeft:
                waits()
                if not self._engines and self._live is live:
                    self.on_version_left()
                await pushed.wait()
                continue
            async with self._one_at_a_time:
                if self._live is live:  # otherwise a push was faster, and the engine needs one more delta
                    if not self._paused:
                        with limit():
                            await self._resume(engine)
                    self._engines[engine] = name
                    if self._canary is not None:
                        self._canary.ask([engine])
                    return

    async def _catch_up(self, name: str, engine: Engine, live: WeightAnnouncement) -> None:
        announced = live
        if self._canary is not None and engine in self._canary.deviating:
            announced = await self._anchor_of(live.policy_version)
        while True:
            try:
                await self._stage(engine, self._add_relays(announced, name, self._engines.values()))
                return await self._commit(engine, announced)
            except WeightError as refusal:
                if announced is not live:
                    raise _refused(name, live, refusal) from refusal
            with CancelScope(shield=True):  # a push must not ask for an anchor before the trainer has answered
                announced = await self._anchor_of(live.policy_version)

    async def leave(self, engine: Engine) -> None:
        """Exclude ``engine`` from later pushes, since it is to stop or sleep. A push in progress ends first. An answer
        to the canary is compared with the next push all the same."""
        async with self._one_at_a_time:
            self._engines.pop(engine, None)
            self.paused_engines.discard(engine)
            if self._canary is not None:
                self._canary.end_probe(engine)

    def remove(self, engine: Engine) -> None:
        """Exclude ``engine`` from a push in progress and from later ones, since it died."""
        self._engines.pop(engine, None)
        self.paused_engines.discard(engine)
        if self._canary is not None:
            self._canary.forget(engine)

    def _failed(self, engine: Engine, error: EngineError) -> None:
        """Remove a failed engine. Raises ``error`` when the run cannot continue without the engine."""
        if engine in self._engines:  # otherwise it was removed meanwhile
            if self._on_failure is None or not self._on_failure(engine, str(error)):
                raise error
            self.remove(engine)

    async def _anchor_of(self, policy_version: int) -> WeightAnnouncement:
        async with self._one_anchor:
            return await self._anchor(policy_version)

    # ---- one engine --------------------------------------------------------------------------------

    async def _stage(self, engine: Engine, announced: WeightAnnouncement) -> str:
        """Have the engine stage a version. Returns the mover."""
        with self._waiting(engine, f"fetch version {announced.policy_version}"):
            return (await engine.stage(announced)).mover

    async def _commit(self, engine: Engine, announced: WeightAnnouncement) -> None:
        """Pause, commit and verify. The engine stays paused, so that it samples only with verified weights. Raises
        ``WeightError`` when the engine refuses, or its live weights are not the published ones."""
        await self._pause(engine)
        with self._waiting(engine, f"commit version {announced.policy_version}"):
            answer = await engine.commit(announced.policy_version)
        if answer.state_hash != announced.state_hash:
            raise WeightError(
                f"live weights hash to {answer.state_hash:016x} at version {announced.policy_version}, "
                f"the trainer published {announced.state_hash:016x}"
            )

    async def _pause(self, engine: Engine) -> None:
        """Pause an engine that is not paused yet. It is paused after a pause ahead of the push, or a refused commit."""
        if engine in self.paused_engines:
            return
        self.paused_engines.add(engine)
        mode = PauseMode.ABORT if self._in_flight is InFlight.RESUME else PauseMode.KEEP
        with self._waiting(engine, "pause"):
            await engine.pause(mode, clear_cache=self._in_flight is not InFlight.KEEP)
        self._report_pause()

    async def _resume(self, engine: Engine) -> None:
        with self._waiting(engine, "resume"):
            await engine.resume()
        self.paused_engines.discard(engine)
        self._report_pause()

    def _waiting(self, engine: Engine, step: str) -> AbstractContextManager[None]:
        name = self._engines.get(engine, "an engine that was started")
        return self._waits.waiting_for(f"{name} to {step}", who="the weight sync")

    # ---- time limit --------------------------------------------------------------------------------

    def _limit(self, failure: str) -> Limit:
        return partial(_in_time, failure, current_time() + self._timeout_s, self._timeout_s)


async def _on_each(
    step: Callable[[Engine], Coroutine[None, None, object]],
    engines: Sequence[Engine],
    limit: Limit,
    leave_out: Callable[[Engine, EngineError], None],
) -> None:
    """Run ``step`` on all of ``engines`` at once, and call ``leave_out`` for each that fails. Raises an error of
    ``leave_out``, not in an exception group: the run cannot continue without this engine."""
    fatal_errors: list[EngineError] = []

    async def run_step(engine: Engine) -> None:
        try:
            with limit():
                await step(engine)
        except EngineError as error:
            try:
                leave_out(engine, error)
            except EngineError as fatal:
                fatal_errors.append(fatal)
                group.cancel_scope.cancel()

    async with create_task_group() as group:
        for engine in engines:
            group.start_soon(run_step, engine)
    if fatal_errors:
        raise fatal_errors[0]


def _refused(name: str, announced: WeightAnnouncement, refusal: WeightError) -> EngineError:
    error = EngineError(f"{name} refused version {announced.policy_version} as delta and as anchor: {refusal}")
    error.__cause__ = refusal
    return error


@contextmanager
def _in_time(failure: str, deadline: float, timeout_s: float) -> Iterator[None]:
    """Cancel the body of the context at ``deadline``, and raise ``EngineError`` then."""
    try:
        with fail_after(deadline - current_time()):
            yield
    except TimeoutError as error:
        raise EngineError(f"{failure} within {timeout_s:g} s (weights.advanced.push_timeout_s)") from error
