"""Engines that die are started again while the others go on: what one served is submitted to the others, and its
successor serves when it holds the live version.

The supervisor, or a person, starts the host again; here its slot is opened for it. An engine that makes no progress,
or fails in a weight push, is ended first, and is then a dead one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from streamrl.base.concurrent_calls import start_unless_ending
from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineReady
from streamrl.base.run_events import EngineBack, EngineLost, KillEngine, StopEngine, SupervisorOrder
from streamrl.engines.engine import Engine, WeightPush
from streamrl.engines.pool import LOST, EnginePool
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.engines.slots import EngineSlot
from streamrl.recipe.sections import Engines

LOOK_S = 0.5
LONGEST_LOOK_S = 2.0
"""No more than this counts between two looks: what delays the looks delays what would have been heard, too."""
LONGEST_PAUSE_S = 60.0
"""Between the death of a host and the start of the next one (``supervise.restart_policy``)."""

log = logging.getLogger(__name__)


class ProgressWatch:
    """Tells an engine that makes no progress from a slow one, by what it does and not by what it says of itself.

    ``silence_timeout_s``: it reports a few times a second, so nothing at all for so long means that its process
    is stopped. ``progress_timeout_s``: requests are open, it is not paused, and none made progress for so long."""

    def __init__(self, *, silence_timeout_s: float, progress_timeout_s: float) -> None:
        self._limits = silence_timeout_s, progress_timeout_s
        self._looked = -math.inf
        self._heard = -1
        self._progress: tuple[int, ...] = ()
        self._silent = self._stalled = 0.0

    def look(self, now: float, *, heard: int, progress: tuple[int, ...], owes: bool) -> str:
        """Return why it is to be ended; empty while it is not. ``now`` in seconds; ``heard``: how many events came from
        it so far; ``progress``: counters that grow when a request makes progress; ``owes``: whether they should."""
        seconds, self._looked = min(now - self._looked, LONGEST_LOOK_S), now
        self._silent = self._silent + seconds if heard == self._heard else 0.0
        self._stalled = self._stalled + seconds if owes and progress == self._progress else 0.0
        self._heard, self._progress = heard, progress
        silence_timeout_s, progress_timeout_s = self._limits
        if self._silent >= silence_timeout_s:
            return f"nothing was heard from it for {self._silent:.0f} s (engines.advanced.silence_timeout_s)"
        if self._stalled >= progress_timeout_s:
            return f"none of its requests made progress for {self._stalled:.0f} s (engines.advanced.progress_timeout_s)"
        return ""


class EngineRecovery:
    """``run`` beside everything else; ``start``; ``attend`` as soon as there is a weight sync; ``aclose`` at the end.

    ``settings``: the recipe's section ``engines``. ``order`` reaches the supervisor, ``emit`` the observers of the run.
    """

    def __init__(
        self,
        slots: Mapping[str, EngineSlot],
        settings: Engines,
        *,
        order: Callable[[SupervisorOrder], Awaitable[None]],
        emit: Callable[[EngineLost | EngineBack], Awaitable[None]],
    ) -> None:
        self._slots = dict(slots)
        self._settings = settings
        self._order = order
        self._emit = emit
        self._group: TaskGroup | None = None
        self._ready: dict[str, tuple[RemoteEngine, EngineReady]] = {}
        self._died_once: set[str] = set()
        self._changed = anyio.Event()
        self._pool: EnginePool | None = None
        self._sync: WeightPush | None = None
        self._attended = anyio.Event()
        self._restarts = 0
        for slot in self._slots.values():
            slot.death_is_fatal = False

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of a step, counted since the start of the run's controller."""
        lost = self._pool.lost_requests if self._pool else 0
        return {"engines/restarts_total": float(self._restarts), "engines/lost_requests_total": float(lost)}

    # ---- life --------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch the engines, and wait for those that were lost; until ``aclose``. The slots must run beside it.

        Raises ``EngineError`` when no engine is there for long, or one comes back with another model.
        """
        watches: dict[RemoteEngine, ProgressWatch] = {}
        limit = self._settings.start_timeout_s + LONGEST_PAUSE_S
        limits = {
            "silence_timeout_s": self._settings.silence_timeout_s,
            "progress_timeout_s": self._settings.progress_timeout_s,
        }
        alone_since = math.inf
        async with anyio.create_task_group() as self._group:
            task_status.started()
            while True:
                await anyio.sleep(LOOK_S)
                now, attached = anyio.current_time(), list(self._pool.attached.values() if self._pool else ())
                alone_since = now if attached or self._pool is None else min(alone_since, now)
                if now - alone_since > limit:
                    raise EngineError(f"no engine was there for {limit:g} s; the logs of their hosts say why they died")
                watches = {engine: watches.get(engine) or ProgressWatch(**limits) for engine, _ in self._ready.values()}
                for engine, watch in watches.items():
                    reason = watch.look(now, heard=engine.heard, progress=engine.progress, owes=engine.owes_progress)
                    if reason:
                        self.on_failure(engine, reason)

    async def start(self, names: Sequence[str]) -> tuple[EnginePool, EngineReady]:
        """Open the slots of ``names`` and wait until each engine is ready, but not for one that has died: that joins
        later. At least one is ready.

        Returns the pool, and what all of ``names`` are together. Raises ``EngineError`` when they are not of one model.
        """
        assert self._group is not None, "run() was not started"
        for name in names:
            self._group.start_soon(self._serve, name)
        while not (alive := self._alive) or not self._died_once.union(self._ready).issuperset(names):
            await self._changed.wait()
            self._changed = anyio.Event()
        absent = [name for name in names if name not in alive]
        engines = {name: engine for name, (engine, _) in alive.items()}
        pool = EnginePool(engines, absent=absent, reason=LOST, fatal_deaths=self._settings.fatal_deaths)
        ready = pool.joined([ready for _, ready in alive.values()])
        self._pool = pool
        return pool, msgspec.structs.replace(
            ready,
            max_num_seqs=ready.max_num_seqs * len(names) // len(alive),
            kv_tokens=ready.kv_tokens * len(names) // len(alive),
        )

    @property
    def _alive(self) -> dict[str, tuple[RemoteEngine, EngineReady]]:
        return {name: pair for name, pair in self._ready.items() if not pair[0].failure}

    def attend(self, sync: WeightPush) -> None:
        """From now on ``sync``, which has the engines of the pool, is given those that are started again."""
        self._sync = sync
        self._attended.set()

    async def aclose(self) -> None:
        """The run ends: no engine is waited for any more, and hosts that are starting are ended."""
        assert self._group is not None, "run() was not started"
        self._group.cancel_scope.cancel()
        attached = self._pool.attached if self._pool else {}
        for name, slot in self._slots.items():
            if name not in attached:
                slot.retire()
                await self._order(StopEngine(engine=name))
                await slot.abandon()

    def on_failure(self, engine: Engine, reason: str) -> bool:
        """End ``engine``, if it has not died, and start it again. Returns that the run continues without it."""
        assert isinstance(engine, RemoteEngine)
        if not engine.failure:
            log.warning("%s is ended: %s", engine.name, reason)
            self._start(self._kill, engine, KillEngine(engine=engine.name, reason=reason, pid=engine.pid))
            engine.give_up(reason)
        return True

    # ---- one engine --------------------------------------------------------------------------------

    async def _serve(self, name: str) -> None:
        """One host after another."""
        slot, missed_since = self._slots[name], math.inf
        while True:
            engine = await slot.open()
            ready = await self._until_ready(engine)
            if ready is not None:
                self._ready[name] = engine, ready
                self._changed.set()
                try:
                    if self._pool is not None and await self._join(name, engine):
                        self._restarts += 1
                        await self._emit(EngineBack(engine=name, seconds=anyio.current_time() - missed_since))
                        missed_since = math.inf
                    await engine.failed.wait()
                finally:
                    del self._ready[name]
                await self._lose(name, engine)
            missed_since = min(missed_since, anyio.current_time())
            self._died_once.add(name)
            self._changed.set()
            await slot.wait_closed()

    async def _until_ready(self, engine: RemoteEngine) -> EngineReady | None:
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
        await self._kill(engine, KillEngine(engine=engine.name, reason=reason, older_than_s=limit))
        return None

    async def _join(self, name: str, engine: RemoteEngine) -> bool:
        """False: it failed meanwhile."""
        await self._attended.wait()
        assert self._pool is not None
        assert self._sync is not None
        try:
            await self._pool.attach(name, engine)
        except EngineError:
            if engine.failure:
                return False
            raise
        try:
            await self._sync.admit(name, engine)
        except EngineError as error:
            self.on_failure(engine, str(error))
            return False
        self._pool.readmit(name, LOST)
        log.warning("%s serves: it holds the live weights", name)
        return True

    async def _lose(self, name: str, engine: RemoteEngine) -> None:
        requests = engine.lost_requests
        if self._pool is not None:
            self._pool.lose(name)
        if self._sync is not None:
            self._sync.remove(engine)
        log.warning("%s is lost (%s) with %d requests, which the others sample", name, engine.failure, requests)
        await self._emit(EngineLost(engine=name, reason=engine.failure, requests=requests))
        if engine.pid:
            self._start(self._kill_if_away, engine)

    async def _kill_if_away(self, engine: RemoteEngine) -> None:
        """A stream breaks where heartbeats stop, too: its host may live, and be stopped."""
        limit = self._settings.silence_timeout_s
        await anyio.sleep(limit)
        if engine.name not in self._ready:
            reason = (
                f"it did not come back within {limit:g} s (engines.advanced.silence_timeout_s) of being lost "
                f"({engine.failure})"
            )
            await self._order(KillEngine(engine=engine.name, reason=reason, pid=engine.pid))

    async def _kill(self, engine: RemoteEngine, order: KillEngine) -> None:
        await self._order(order)
        slot = self._slots[engine.name]
        if slot.engine is engine:
            await slot.abandon()

    def _start(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        assert self._group is not None, "run() was not started"
        start_unless_ending(self._group, work, *arguments)  # type: ignore[arg-type]
