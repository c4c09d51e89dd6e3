"""The death of an engine while the run goes on: it is left out, what it served is asked for elsewhere, and whoever
takes its place serves when it holds the live version.

Who started the host (the supervisor, or a person) starts it again; here its seat is opened for it. An engine that
stands still is ended first, and is then a dead one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineReady
from streamrl.base.nursery import start_unless_ending
from streamrl.base.run_events import EngineBack, EngineLost
from streamrl.engines.engine import Engine
from streamrl.engines.engine_pool import LOST, EnginePool
from streamrl.engines.engine_seat import EngineSeat
from streamrl.engines.pool_service import PoolService
from streamrl.engines.pooled_answers import joined_readiness
from streamrl.engines.progress_watch import ProgressWatch
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.recipe.sections import Recipe
from streamrl.supervise.supervisor_orders import KillEngine, StopEngine, SupervisorOrder

LOOK_S = 0.5
LONGEST_PAUSE_S = 60.0
"""Between the death of a host and the start of the next one (``processes.restarts``)."""

log = logging.getLogger(__name__)


class RecoverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """As in the recipe's section ``engines``."""

    silence_timeout_s: float = 30.0
    progress_timeout_s: float = 120.0
    start_timeout_s: float = 300.0
    fatal_deaths: int = 3


class JoinedPushes(Protocol):
    """The part of ``streamrl.sync.publisher.WeightPublisher`` that recovery needs."""

    def greeted(self, engine: Engine, ready: EngineReady) -> None: ...

    def join(self, engine: Engine, ready: EngineReady) -> None: ...

    def lose(self, engine: Engine) -> None: ...


def engine_recovery(
    recipe: Recipe,
    seats: Mapping[str, EngineSeat],
    *,
    tell: Callable[[SupervisorOrder], Awaitable[None]],
    emit: Callable[[EngineLost | EngineBack], Awaitable[None]],
) -> EngineRecovery | None:
    """None where the death of an engine ends the run of ``recipe``."""
    if not recipe.engine_restarts:
        return None
    engines = recipe.engines
    settings = RecoverySettings(
        silence_timeout_s=engines.silence_timeout_s,
        progress_timeout_s=engines.progress_timeout_s,
        start_timeout_s=engines.start_timeout_s,
        fatal_deaths=engines.fatal_deaths,
    )
    return EngineRecovery(seats, settings, tell=tell, emit=emit)


class EngineRecovery(PoolService):
    """``run`` beside everything else; ``start``; ``attend`` as soon as there is a publisher; ``aclose`` at the end.

    ``tell`` reaches the supervisor, ``emit`` whoever observes the run.
    """

    def __init__(
        self,
        seats: Mapping[str, EngineSeat],
        settings: RecoverySettings = RecoverySettings(),  # noqa: B008 - frozen
        *,
        tell: Callable[[SupervisorOrder], Awaitable[None]],
        emit: Callable[[EngineLost | EngineBack], Awaitable[None]],
    ) -> None:
        self._group: TaskGroup | None = None
        self._seats = dict(seats)
        self._settings = settings
        self._tell = tell
        self._emit = emit
        self._started: EnginePool | None = None
        self._greetings: dict[str, tuple[RemoteEngine, EngineReady]] = {}
        self._died_once: set[str] = set()
        self._changed = anyio.Event()
        self._publisher: JoinedPushes | None = None
        self._attended = anyio.Event()
        self._gone: list[RemoteEngine] = []
        self._watches: dict[RemoteEngine, ProgressWatch] = {}
        self._missed: dict[str, float] = {}
        self._alone_since = math.inf
        self.restarts = 0
        """Engines that came back."""
        for seat in self._seats.values():
            seat.died = self._died

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of a step, counted since the start of the run's controller."""
        lost = self._started.lost_requests if self._started else 0
        return {"engines/restarts_total": float(self.restarts), "engines/lost_requests_total": float(lost)}

    # ---- life --------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch the engines, and wait for those that were lost; until ``aclose``. The seats must run beside it.

        Raises ``EngineError`` when no engine is there for long, or one comes back with another model.
        """
        async with anyio.create_task_group() as self._group:
            task_status.started()
            while True:
                await anyio.sleep(LOOK_S)
                self._look()

    async def start(self, names: Sequence[str], *, patience_s: float = math.inf) -> tuple[EnginePool, EngineReady]:
        """Open the seats of ``names`` and wait until each engine is ready, but not for one that has died, nor longer
        than ``patience_s`` after the first: those join later. At least one is ready.

        Returns the pool, and what all of ``names`` are together. Raises ``EngineError`` when they are not of one model.
        """
        group = self._running
        for name in names:
            group.start_soon(self._fill, name)
        while not self._greetings:
            await self._next_change()
        with anyio.move_on_after(patience_s):
            while not self._greetings or not self._died_once.union(self._greetings).issuperset(names):
                await self._next_change()
        while not self._greetings:
            await self._next_change()
        there = [name for name in names if name in self._greetings]
        readiness = [self._greetings[name][1] for name in there]
        self._pool = self._started = EnginePool(
            [self._greetings[name][0] for name in there],
            absent=[name for name in names if name not in there],
            by=LOST,
            fatal_deaths=self._settings.fatal_deaths,
            readiness=readiness,
        )
        self._missed = {name: anyio.current_time() for name in names if name not in there}
        return self._started, joined_readiness(names, readiness)

    def attend(self, publisher: JoinedPushes) -> None:
        """From now on ``publisher``, which has the engines of the pool, is told of who is lost and who comes back."""
        self._publisher = publisher
        for engine, ready in self._greetings.values():
            publisher.greeted(engine, ready)
        for engine in self._gone:
            publisher.lose(engine)
        self._attended.set()

    async def aclose(self) -> None:
        """The run ends: nobody is waited for any more, and hosts that are starting are ended."""
        self._running.cancel_scope.cancel()
        attached = self._started.attached if self._started else {}
        for name, seat in self._seats.items():
            if name not in attached:
                seat.retire()
                await self._tell(StopEngine(engine=name))
                await seat.abandon()

    # ---- as a service of pushes --------------------------------------------------------------------

    async def take_back(self, engine: object) -> None:
        """Readmit it: it holds the live version."""
        await super().take_back(engine)
        name = self._name_of(engine)
        since = None if name is None else self._missed.pop(name, None)
        if name is not None and since is not None:
            self.restarts += 1
            await self._emit(EngineBack(engine=name, seconds=anyio.current_time() - since))

    def lost(self, engine: object, reason: str) -> bool:
        """It is left out, and ended, if it has not died."""
        assert isinstance(engine, RemoteEngine)
        if not engine.failure:
            log.warning("%s is ended: %s", engine.name, reason)
            pid = engine.pid
            engine.give_up(reason)
            start_unless_ending(
                self._running, self._end, engine, KillEngine(engine=engine.name, reason=reason, pid=pid)
            )
        self._died(engine, engine.failure)
        return True

    # ---- inside ------------------------------------------------------------------------------------

    @property
    def _running(self) -> TaskGroup:
        assert self._group is not None, "run() was not started"
        return self._group

    async def _next_change(self) -> None:
        await self._changed.wait()
        self._changed = anyio.Event()

    def _died(self, engine: RemoteEngine, reason: str) -> None:
        """Told by its seat, or by whoever saw it first. Once more is no news."""
        name = engine.name
        self._watches.pop(engine, None)
        greeted = self._greetings.get(name)
        if greeted is None or greeted[0] is not engine:
            return  # it was starting, which whoever waits for its greeting sees; or it is known
        del self._greetings[name]
        self._died_once.add(name)
        requests = self._started.lose(name) if self._started else 0
        if self._publisher is not None:
            self._publisher.lose(engine)
        else:
            self._gone.append(engine)
        self._missed.setdefault(name, anyio.current_time())
        lost = EngineLost(engine=name, reason=reason, requests=requests)
        start_unless_ending(self._running, self._replace, lost)
        if engine.pid:
            start_unless_ending(self._running, self._end_if_away, lost, engine.pid)

    async def _end_if_away(self, lost: EngineLost, pid: int) -> None:
        """A stream breaks where heartbeats stop, too: its host may live, and stand still."""
        limit = self._settings.silence_timeout_s
        await anyio.sleep(limit)
        if lost.engine not in self._greetings:
            reason = (
                f"it did not come back within {limit:g} s (engines.advanced.silence_timeout_s) of being lost "
                f"({lost.reason})"
            )
            await self._tell(KillEngine(engine=lost.engine, reason=reason, pid=pid))

    async def _replace(self, lost: EngineLost) -> None:
        log.warning("%s is lost (%s) with %d requests, which go elsewhere", lost.engine, lost.reason, lost.requests)
        await self._emit(lost)
        await self._fill(lost.engine)

    async def _fill(self, name: str) -> None:
        """Open the seat for one host after another, until one has taken it for good."""
        seat = self._seats[name]
        while True:
            await seat.emptied()
            engine = await seat.open()
            ready = await self._greeting(engine)
            if ready is not None and await self._take(name, engine, ready):
                return
            self._died_once.add(name)
            self._changed.set()

    async def _greeting(self, engine: RemoteEngine) -> EngineReady | None:
        """None: its host died while it started, or takes too long for one that is started again."""
        limit = self._settings.start_timeout_s
        again = engine.name in self._died_once
        with anyio.move_on_after(limit + LONGEST_PAUSE_S if again else None):
            try:
                return await engine.start()
            except EngineError as error:
                log.warning("%s did not become ready: %s", engine.name, error)
                return None
        reason = f"it was not ready within {limit:g} s of being started (engines.advanced.start_timeout_s)"
        await self._end(engine, KillEngine(engine=engine.name, reason=reason, older_than_s=limit))
        return None

    async def _take(self, name: str, engine: RemoteEngine, ready: EngineReady) -> bool:
        """False: it died since it greeted."""
        if self._started is not None:
            await self._attended.wait()
            try:
                await self._started.attach(name, engine)
            except EngineError:
                if engine.failure:
                    return False
                raise
        if engine.failure:
            if self._started is not None:
                self._started.lose(name)
            return False
        self._greetings[name] = engine, ready
        if self._publisher is not None:
            self._publisher.join(engine, ready)
        self._changed.set()
        return True

    async def _end(self, engine: RemoteEngine, order: KillEngine) -> None:
        await self._tell(order)
        seat = self._seats[engine.name]
        if seat.engine is engine:
            await seat.abandon()

    def _look(self) -> None:
        if self._started is None:
            return
        now, attached = anyio.current_time(), list(self._started.attached.values())
        self._alone_since = now if attached else min(self._alone_since, now)
        limit = self._settings.start_timeout_s + LONGEST_PAUSE_S
        if now - self._alone_since > limit:
            raise EngineError(f"no engine was there for {limit:g} s; the logs of their hosts say why they died")
        for engine in attached:
            assert isinstance(engine, RemoteEngine)
            watch = self._watches.get(engine)
            if watch is None:
                limits = self._settings
                watch = self._watches[engine] = ProgressWatch(
                    silence_timeout_s=limits.silence_timeout_s, progress_timeout_s=limits.progress_timeout_s
                )
            reason = watch.look(now, heard=engine.heard, progress=engine.progress, owes=engine.owes_progress)
            if reason:
                self.lost(engine, reason)
