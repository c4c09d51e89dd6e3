"""The lifecycle of every engine process of a run: start, admission with the live version, death, restart, sleep, stop.

The controller makes one ``EngineProcesses`` in ``launch.processes``. The supervisor, or a person, starts the engine
processes themselves; the controller orders it to start, stop or kill one (``order``). Each engine has one task here,
``_EngineLifecycle.run``, which lives as long as the run and follows one engine process after another. For each process
it binds the two streams of the engine again, so a late message of a process never reaches its successor.

* Engines of the set in use: a started engine gets the live version, then it serves in the pool. When its process dies,
  its requests go to the other engines, which serve meanwhile, and the supervisor starts the process again. An engine
  that makes no progress, or fails in a weight push, is killed, and from then on is like one that died.
* An engine whose host needs its GPU for a while serves nothing (``set_availability``); its requests go to the others.
* Engines of other sets have no process, or a sleeping one (on CUDA), which has freed the device's memory. A process
  that dies asleep is started at the next use of its set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from logging import getLogger
from math import inf

import anyio
from anyio import CancelScope, Event, create_task_group, current_time, move_on_after, sleep
from anyio.abc import TaskGroup, TaskStatus
from msgspec.structs import replace

from streamrl.base.concurrent_calls import start_unless_ending
from streamrl.base.errors import EngineError, StreamBroken
from streamrl.base.messages import EngineEvent, EngineOrder, EngineReady
from streamrl.base.notifier import Notifier
from streamrl.base.run_events import EngineBack, EngineLost, KillEngine, StartEngine, StopEngine, SupervisorOrder
from streamrl.base.types import Metrics
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.contracts import Engine
from streamrl.control.events import UserOrder
from streamrl.engines.pool import LENT, UNAVAILABLE, EnginePool
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.recipe.sections import Engines

WINDOW = 4096
"""Largest number of messages that a stream buffers."""
LOOK_S = 0.5
"""Interval in which the progress of all engines is checked."""
LONGEST_LOOK_S = 2.0
"""Longest time that counts between two checks: when the controller is too busy to check in time, it is also too busy to
receive events."""
LONGEST_PAUSE_S = 60.0
"""Longest pause of the supervisor between the death of a process and its next start (``processes.restart_policy``)."""
DRAIN_SECONDS = 60.0
"""Time within which an engine must drop aborted requests; otherwise it counts as failed."""
PATIENCE_SECONDS = 20.0
"""Time that the supervisor gives vLLM to stop when its orders have ended."""
STOP_SECONDS = 60.0
"""Time to wait for the end of a stopped process. By then the stream of a killed one is broken, too."""

log = getLogger(__name__)


class ProgressWatch:
    """Detector of engines that make no progress, as opposed to slow ones.

    An engine process sends events a few times a second: after ``silence_timeout_s`` without one it counts as suspended.
    An engine counts as stuck when it has open requests, is not paused, and none of the requests makes progress for
    ``progress_timeout_s``."""

    def __init__(self, settings: Engines) -> None:
        self._settings = settings
        self._looked = -inf
        self._received = -1
        self._progress: tuple[int, ...] = ()
        self._silent_s = 0.0
        self._stalled_s = 0.0

    def check(self, now: float, *, received: int, progress: tuple[int, ...], busy: bool) -> str:
        """Return the reason to kill the engine process; empty without one.

        ``now``: time in seconds
        ``received``: number of events from the process
        ``progress``: counters, one of which grows when a request makes progress
        ``busy``: whether a counter should grow"""
        seconds = min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        self._silent_s = self._silent_s + seconds if received == self._received else 0.0
        self._stalled_s = self._stalled_s + seconds if busy and progress == self._progress else 0.0
        self._received = received
        self._progress = progress
        if self._silent_s >= self._settings.silence_timeout_s:
            return f"nothing was heard from it for {self._silent_s:.0f} s (engines.advanced.silence_timeout_s)"
        if self._stalled_s >= self._settings.progress_timeout_s:
            return (
                f"none of its requests made progress for {self._stalled_s:.0f} s (engines.advanced.progress_timeout_s)"
            )
        return ""


class _EngineLifecycle:
    """One engine of the run, with its current process.

    ``endpoints``: endpoints of its orders and its events
    ``in_use``: whether its set is in use
    ``late``: whether switches do not wait for the engine: it died, or waits for the next version, since its set is used
    ``stopped``: whether the supervisor starts its process only after a ``StartEngine`` order
    ``takes_memory``: whether a process of the engine takes device memory: a sleeping one does not
    ``has_live_version``: whether the engine holds the live version
    ``ready``: the engine of a ready process, with its readiness"""

    def __init__(self, name: str, endpoints: tuple[str, str], processes: EngineProcesses, *, in_use: bool) -> None:
        self.name = name
        self._endpoints = endpoints
        self.stopped = processes.starts_inactive or not in_use
        self.takes_memory = False
        self.has_live_version = False
        self.ready: tuple[RemoteEngine, EngineReady] | None = None
        self._processes = processes
        self._settings = processes.settings
        self._admission = CancelScope()
        self._listening = CancelScope()
        self._engine: RemoteEngine | None = None  # the engine whose streams are open
        self._streams_closed = Event()
        self._streams_closed.set()
        self.set_in_use(in_use)

    # ---- calls of EngineProcesses ----------------------------------------------------------------------

    def set_in_use(self, in_use: bool) -> None:
        """Set whether the engine's set is in use: the task then has it serve, or leave."""
        self.in_use = in_use
        self.late = False
        if not in_use:
            self._admission.cancel()

    def fail(self, engine: RemoteEngine, reason: str) -> None:
        """Have the process of a stuck engine killed, and fail its requests at once. The supervisor starts it again."""
        log.warning("%s is ended: %s", self.name, reason)
        self._processes.begin(self._kill, engine, KillEngine(engine=self.name, reason=reason, pid=engine.pid))
        engine.give_up(reason)

    async def abandon(self) -> None:
        """Close the streams of a process that is being ended, perhaps before it was ready."""
        self._listening.cancel()
        await self._streams_closed.wait()

    # ---- one process after another -----------------------------------------------------------------

    async def run(self) -> None:
        """Follow one engine process after another, for ever."""
        missing_since = inf  # time since which the set is in use and the engine does not serve
        while True:
            if not self.in_use:
                missing_since = inf
                await self._stop()
                await self._processes.until(lambda: self.in_use)
            engine = await self._open_streams()
            ready = await self._until_ready(engine)
            if ready is not None:
                self.ready = engine, ready
                self._processes.notify()
                try:
                    missing_since = await self._serve(engine, missing_since)
                finally:
                    self.has_live_version = False
                    self.ready = None
            if self.in_use:  # the process died, or was not ready in time
                missing_since = min(missing_since, current_time())
                self._mark_late()
                await self._streams_closed.wait()

    async def _open_streams(self) -> RemoteEngine:
        """Open the streams of the next process, and have the supervisor start it, unless it does so by itself."""
        self.takes_memory = True
        assert self._processes.streams is not None, "run() was not started"
        engine: RemoteEngine = await self._processes.streams.start(self._listen)
        self._processes.begin(self._processes.notify_changes, engine)
        if self.stopped:
            self.stopped = False
            await self._processes.order(StartEngine(engine=self.name))
        return engine

    async def _listen(self, *, task_status: TaskStatus[RemoteEngine]) -> None:
        """Keep the streams of one process open until it has ended, or ``abandon`` is called. Raises ``EngineError``
        naming the engine for a death that ends the run."""
        name = self.name
        guard = self._processes.guard
        orders_at, events_at = self._endpoints
        sender = zmq_sender(EngineOrder, orders_at, bind=True, window=WINDOW, guard=guard, name=f"{name}.orders")
        receiver = zmq_receiver(
            EngineEvent, events_at, bind=True, window=WINDOW, guard=guard, name=f"{name}.completions"
        )
        self._streams_closed = Event()
        try:
            with CancelScope() as self._listening:
                async with sender as orders, receiver as events:
                    self._engine = RemoteEngine(name, orders, events)
                    task_status.started(self._engine)
                    try:
                        await self._engine.run()
                    except EngineError:
                        if self.in_use and not self._settings.restarts:
                            raise
        finally:
            self._engine = None
            self._streams_closed.set()

    async def _until_ready(self, engine: RemoteEngine) -> EngineReady | None:
        """Wait for the first message of the process. Returns None when the process died while it started, its set is
        not in use any more, or it was killed since it took too long. Raises ``EngineError`` for a start that takes too
        long in a run without restarts."""
        limit = self._settings.start_timeout_s
        processes = self._processes
        reason = f"not ready within {limit:g} s of being started (engines.advanced.start_timeout_s)"
        pause_s = LONGEST_PAUSE_S if self.late else 0.0
        # The first start of a run has no limit.
        with move_on_after(limit + pause_s if processes.pool is not None or self.late else None):
            await processes.until(lambda: engine.readiness or engine.failure or not self.in_use)
            if engine.failure:
                log.warning("%s did not become ready: %s", self.name, engine.failure)
                processes.without_engine_since = current_time()
                return None
            return engine.readiness
        if not self._settings.restarts:
            raise EngineError(f"{self.name}: {reason}")
        await self._kill(engine, KillEngine(engine=self.name, reason=f"it was {reason}", older_than_s=limit))
        return None

    def _mark_late(self) -> None:
        self.late = True
        self._processes.notify()

    # ---- a ready process ---------------------------------------------------------------------------

    async def _serve(self, engine: RemoteEngine, missing_since: float) -> float:
        """Serve whenever the set is in use, and sleep otherwise. Returns the new ``missing_since`` when the process has
        died, or is to stop."""
        processes = self._processes
        while True:
            if processes.pool is not None and self.in_use and await self._join(engine, processes.pool):
                if missing_since < inf:
                    processes.restarts += 1
                    await processes.emit(EngineBack(engine=self.name, seconds=current_time() - missing_since))
                missing_since = inf
            await processes.until(lambda: engine.failure or not self.in_use or self._admission.cancel_called)
            if engine.failure:
                await self._lose(engine)
                return missing_since
            await self._leave(engine)
            if not self.in_use and not await self._sleep_until_used(engine):
                return missing_since

    async def _join(self, engine: RemoteEngine, pool: EnginePool) -> bool:
        """Attach the engine to the pool, and give it the live version. Returns False when the engine failed meanwhile,
        or its set is not in use any more. Raises ``EngineError`` for an engine with another model."""
        if self.has_live_version:
            return True
        with CancelScope() as self._admission:
            await self._processes.until(lambda: self._processes.sync)
            assert self._processes.sync is not None
            try:
                await pool.attach(self.name, engine)
                await self._processes.sync.admit(self.name, engine, self._mark_late)
            except EngineError as error:
                other_model = not engine.failure and self.name not in pool.attached
                if not self._settings.restarts or other_model:
                    raise
                if not engine.failure:
                    self.fail(engine, str(error))
                return False
            self.has_live_version = True
            if self.in_use and not self._processes.switching:
                pool.readmit(self.name, UNAVAILABLE)
            log.warning("%s holds the live weights", self.name)
            self._processes.notify()
        return self.has_live_version

    async def _lose(self, engine: RemoteEngine) -> None:
        """Remove a dead engine from the pool and from weight pushes."""
        requests = engine.lost_requests
        if self._processes.pool is not None:
            self._processes.pool.lose(self.name)
        if self._processes.sync is not None:
            self._processes.sync.remove(engine)
        log.warning("%s is lost (%s) with %d requests, which the others sample", self.name, engine.failure, requests)
        await self._processes.emit(EngineLost(engine=self.name, reason=engine.failure, requests=requests))
        if engine.pid:
            self._processes.begin(self._kill_if_missing, engine)

    async def _leave(self, engine: RemoteEngine) -> None:
        """Drain the engine and remove it from the pool and from weight pushes, since another set is used, or its
        host needs the GPU."""
        pool = self._processes.pool
        sync = self._processes.sync
        assert pool is not None
        assert sync is not None
        with move_on_after(DRAIN_SECONDS) as limit:
            await pool.drain(self.name, UNAVAILABLE)
        if limit.cancelled_caught:
            engine.give_up(f"requests were not dropped within {DRAIN_SECONDS:g} s of an abort")
            pool.lose(self.name)
        self.has_live_version = False
        await sync.leave(engine)
        if self.name in pool.attached:
            pool.detach(self.name)

    async def _sleep_until_used(self, engine: RemoteEngine) -> bool:
        """Have an engine that has left sleep until its set is in use again. Returns whether it is awake again; False
        when engines do not sleep in this run, its host needs the memory, or it died."""
        processes = self._processes
        if not processes.sleeps or engine.failure or self.name in processes.withdrawn:
            return False
        try:
            await processes.order(StopEngine(engine=self.name, sleeps=True))
            await engine.sleep()
            self.takes_memory = False
            processes.notify()
            await processes.until(lambda: engine.failure or self.in_use)
            if not self.in_use:
                raise EngineError(engine.failure)
            self.takes_memory = True
            await processes.order(StartEngine(engine=self.name))
            await engine.wake()
        except EngineError as error:
            log.warning("%s is lost while it slept: %s", self.name, error)
            return False
        return True

    # ---- end of a process --------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Have the supervisor end the process, if there is one, and start no other before an order. The supervisor
        starts the next process only after the end of this one."""
        if self.stopped:
            return
        engine = self._engine
        serves = engine is not None and engine.readiness is not None and not engine.failure
        self.stopped = True
        await self._processes.order(StopEngine(engine=self.name, patience_s=PATIENCE_SECONDS if serves else 0.0))
        if engine is not None and serves:
            with move_on_after(STOP_SECONDS):
                with suppress(StreamBroken):  # the process ended before its orders did
                    await engine.aclose()
                await self._streams_closed.wait()
        await self.abandon()
        self.takes_memory = False
        self._processes.notify()

    async def _kill_if_missing(self, engine: RemoteEngine) -> None:
        """Have the process of a lost engine killed, unless an engine is ready again in time. The process may still
        exist, suspended: a stream also breaks when heartbeats are missing."""
        limit = self._settings.silence_timeout_s
        await sleep(limit)
        if self.in_use and self.ready is None:
            reason = (
                f"it did not come back within {limit:g} s (engines.advanced.silence_timeout_s) of being lost "
                f"({engine.failure})"
            )
            await self._processes.order(KillEngine(engine=self.name, reason=reason, pid=engine.pid))

    async def _kill(self, engine: RemoteEngine, order: KillEngine) -> None:
        await self._processes.order(order)
        if self._engine is engine:
            await self.abandon()


class EngineProcesses:
    """The engine processes of a run. Run ``run`` as a task, ``start`` the first set, call ``set_weight_sync`` as soon
    as there is a weight sync, ``use`` another set between rounds, and ``aclose`` at the end.

    ``endpoints``: endpoints of the orders and of the events of each engine, by name
    ``settings``: section ``engines`` of the recipe; without restarts, the death of an engine in use ends the run
    ``order``: function that sends an order to the supervisor
    ``emit``: function that sends an event to the observers of the run
    ``guard``: keys of the processes that may connect over TCP
    ``sleeps``: whether engines of a set that is not in use keep their processes
    ``starts_inactive``: whether the supervisor leaves every engine to an order of the controller, also at the start
    of the run (engines in turns, which start after the ranks have moved their state away)"""

    def __init__(
        self,
        endpoints: Mapping[str, tuple[str, str]],
        settings: Engines,
        *,
        order: Callable[[SupervisorOrder], Awaitable[None]],
        emit: Callable[[EngineLost | EngineBack], Awaitable[None]],
        guard: KeyGuard | None = None,
        sleeps: bool = False,
        starts_inactive: bool = False,
    ) -> None:
        self.settings = settings
        self.order = order
        self.emit = emit
        self.guard = guard
        self.sleeps = sleeps
        self.starts_inactive = starts_inactive
        self.pool: EnginePool | None = None
        self.sync: WeightSync | None = None
        self.switching = True
        """Whether a set is being put to use. Engines that get the live version then serve when the switch ends."""
        self.restarts = 0
        """Number of engines that died, or were killed, and serve again."""
        self.without_engine_since = 0.0
        """Time since which the pool has no engine. A failed start resets it, so that the next start has the full
        time."""
        self.streams: TaskGroup | None = None
        """Tasks with the open streams of the processes. This group ends after the tasks of the engines."""
        self._group: TaskGroup | None = None
        self._changed = Notifier()
        self._endpoints = endpoints
        self._lifecycles: dict[str, _EngineLifecycle] = {}
        self._set_engines: Collection[str] = ()  # names of the set in use
        self.withdrawn: set[str] = set()
        """Names of the engines whose processes have ended for their hosts."""

    @property
    def figures(self) -> Metrics:
        """Metrics of a step, counted since the start of this controller."""
        lost_requests = 0
        if self.pool is not None:
            lost_requests = self.pool.lost_requests
        return {"engines/restarts_total": float(self.restarts), "engines/lost_requests_total": float(lost_requests)}

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache of an engine in use, in tokens; 0: unknown."""
        return next((lifecycle.ready[1].kv_tokens for lifecycle in self._in_use if lifecycle.ready), 0)

    @property
    def _in_use(self) -> list[_EngineLifecycle]:
        return [lifecycle for lifecycle in self._lifecycles.values() if lifecycle.in_use]

    # ---- tasks and notifications -------------------------------------------------------------------

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition`` holds. It is called again after every ``notify``."""
        while not condition():
            await self._changed.wait()

    def notify(self) -> None:
        """Wake the tasks that wait in ``until``, since a state has changed."""
        self._changed.notify()

    async def notify_changes(self, engine: RemoteEngine) -> None:
        """Notify when ``engine`` is ready, and when it fails."""
        with suppress(EngineError):
            await engine.start()
        self.notify()
        await engine.failed.wait()
        self.notify()

    def begin(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Start ``work`` as a task, unless the run ends."""
        assert self._group is not None, "run() was not started"
        start_unless_ending(self._group, work, *arguments)  # type: ignore[arg-type]

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follow and watch the engine processes until ``aclose`` is called and the processes have ended. Raises
        ``EngineError`` when no engine is there for long, or a restarted one has another model."""
        watches: dict[RemoteEngine, ProgressWatch] = {}
        self.without_engine_since = current_time()
        async with create_task_group() as self.streams, create_task_group() as self._group:
            task_status.started()
            while True:
                await sleep(LOOK_S)
                now = current_time()
                self._require_engine(now)
                engines = [lifecycle.ready[0] for lifecycle in self._lifecycles.values() if lifecycle.ready]
                watches = {engine: watches.get(engine) or ProgressWatch(self.settings) for engine in engines}
                for engine, watch in watches.items():
                    reason = watch.check(
                        now, received=engine.events_received, progress=engine.progress, busy=engine.has_open_requests
                    )
                    if reason:
                        self.on_failure(engine, reason)

    def _require_engine(self, now: float) -> None:
        """Raise ``EngineError`` when the pool has been without an engine for too long. A switch has no limit here: sets
        are of local engines, for which the supervisor ends the run when it gives up the restarts."""
        limit = self.settings.start_timeout_s + LONGEST_PAUSE_S
        if self.pool is None or self.pool.attached or self.switching or self.withdrawn:
            self.without_engine_since = now
        elif now - self.without_engine_since > limit:
            raise EngineError(f"no engine was there for {limit:g} s; their logs say why they died")

    # ---- sets of engines ---------------------------------------------------------------------------

    async def start(self, names: Sequence[str]) -> tuple[EnginePool, EngineReady]:
        """Use the engines ``names``. Waits until each of them is ready or has died, and at least one is ready; engines
        that died join later.

        Returns the pool of all engines, and the combined readiness of ``names``. Raises ``EngineError`` when their
        models differ."""
        self._lifecycles = {
            name: _EngineLifecycle(name, endpoints, self, in_use=name in names)
            for name, endpoints in self._endpoints.items()
        }
        for lifecycle in self._lifecycles.values():
            self.begin(lifecycle.run)
        await self.until(lambda: self._alive() and all(lifecycle.ready or lifecycle.late for lifecycle in self._in_use))
        alive = self._alive()
        engines = {name: engine for name, (engine, _) in alive.items()}
        unavailable = [name for name in self._lifecycles if name not in alive]
        fatal_deaths = self.settings.fatal_deaths if self.settings.restarts else None
        pool = EnginePool(engines, unavailable=unavailable, fatal_deaths=fatal_deaths)
        ready = pool.joined([ready for _, ready in alive.values()])
        self.pool = pool
        self._set_engines = names
        self.switching = False
        for name in alive:
            self._lifecycles[name].has_live_version = True
        # Engines that died count as if they were ready: they will have the same size.
        return pool, replace(
            ready,
            max_num_seqs=ready.max_num_seqs * len(names) // len(alive),
            kv_tokens=ready.kv_tokens * len(names) // len(alive),
        )

    def _alive(self) -> dict[str, tuple[RemoteEngine, EngineReady]]:
        """Return the ready engines, with their readiness, by name."""
        return {
            name: lifecycle.ready
            for name, lifecycle in self._lifecycles.items()
            if lifecycle.ready and not lifecycle.ready[0].failure
        }

    def set_weight_sync(self, sync: WeightSync) -> None:
        """Use ``sync``, which has the engines of the pool, for every engine that is started from now on."""
        self.sync = sync
        self.notify()

    async def sleep_all(self) -> None:
        """Have no engine serve, until ``use``. Returns when all sleep or have stopped. Requests wait."""
        assert self.pool is not None
        self.pool.withdraw(self.pool.names, UNAVAILABLE)
        self.switching = True
        self._set_in_use(())
        await self.until(lambda: not any(lifecycle.takes_memory for lifecycle in self._lifecycles.values()))

    async def use(self, names: Collection[str]) -> None:
        """Have the engines ``names`` serve, and no others. The others stop *before* these start: the memory may not
        suffice for both. Requests wait until this returns: when at least one engine serves, and each other one serves
        or is late, because it died or its version is not available any more."""
        assert self.pool is not None
        await self.sleep_all()
        self._set_in_use(names)
        joining = self._in_use
        await self.until(
            lambda: (
                any(lifecycle.has_live_version for lifecycle in self._in_use)
                and all(lifecycle.has_live_version or lifecycle.late or not lifecycle.in_use for lifecycle in joining)
            )
        )
        self.switching = False
        for lifecycle in self._in_use:
            if lifecycle.has_live_version:
                self.pool.readmit(lifecycle.name, UNAVAILABLE)

    def set_availability(self, name: str, order: UserOrder) -> None:
        """Carry out a user's ``order`` about engine ``name``, whose host needs its GPU for a while, or not any more
        (``Steered``). The requests of an engine that serves nothing go on on the others at once, from their tokens."""
        assert self.pool is not None
        self.withdrawn.discard(name)
        self.pool.withdraw([name], LENT)
        if order == "return_engine":
            self.pool.readmit(name, LENT)
        elif order == "pause_engine":
            self.begin(self.pool.drain, name, LENT)
        else:
            self.withdrawn.add(name)
        self._set_in_use(self._set_engines)

    def _set_in_use(self, names: Collection[str]) -> None:
        self._set_engines = names
        for lifecycle in self._lifecycles.values():
            in_use = lifecycle.name in names and lifecycle.name not in self.withdrawn
            if in_use != lifecycle.in_use:
                lifecycle.set_in_use(in_use)
        self.notify()

    async def aclose(self) -> None:
        """End the waits for engines, and the processes that start or sleep, since the run ends. The processes of
        serving engines end with the pool."""
        assert self._group is not None, "run() was not started"
        self._group.cancel_scope.cancel()
        attached: Collection[str] = ()
        if self.pool is not None:
            attached = self.pool.attached
        for name, lifecycle in self._lifecycles.items():
            if lifecycle.ready and not lifecycle.takes_memory:  # it sleeps
                await lifecycle.ready[0].aclose()
            elif name not in attached:
                if not lifecycle.stopped:
                    await self.order(StopEngine(engine=name))
                await lifecycle.abandon()

    def on_failure(self, engine: Engine, reason: str) -> bool:
        """Have the process of ``engine`` killed, if it has not died, so that it is started again. Returns whether the
        run continues without the engine. The weight sync calls this, too."""
        assert isinstance(engine, RemoteEngine)
        if self.settings.restarts and not engine.failure:
            self._lifecycles[engine.name].fail(engine, reason)
        return bool(self.settings.restarts)
