"""The lifecycles of engine hosts: a host is started when its set of engines is used, brought to the live version, and
stopped when another set is used; one that dies in use is started again while the others serve.

Each engine has one task here, whatever happens to it. The supervisor, or a person, starts its hosts; here its two
streams are bound anew for each: a late message of one is never taken for the next one's. An engine that makes no
progress, or fails in a weight push, is ended first, and is then a dead one. Its requests are submitted to the others. A
host of a set that is not in use ends, or sleeps (on CUDA): it gives the device's memory back. One that dies asleep is
started when its set is used next."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from streamrl.base.concurrent_calls import start_unless_ending
from streamrl.base.errors import EngineError, StreamBroken
from streamrl.base.messages import EngineEvent, EngineOrder, EngineReady
from streamrl.base.run_events import EngineBack, EngineLost, KillEngine, StartEngine, StopEngine, SupervisorOrder
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.contracts import Engine
from streamrl.engines.pool import UNAVAILABLE, EnginePool
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.recipe.sections import Engines

WINDOW = 4096
LOOK_S = 0.5
LONGEST_LOOK_S = 2.0
"""No more than this counts between two looks: what delays the looks delays what would have been heard, too."""
LONGEST_PAUSE_S = 60.0
"""Between the death of a host and the start of the next one (``supervise.restart_policy``)."""
DRAIN_SECONDS = 60.0
"""An engine that has not dropped its requests by then does not work any more."""
PATIENCE_SECONDS = 20.0
"""For vLLM to stop when its orders have ended. The supervisor ends what takes longer."""
STOP_SECONDS = 60.0
"""Then, too, the stream of a host that was killed has long been broken."""

log = logging.getLogger(__name__)


class ProgressWatch:
    """Detector of engines that make no progress, as opposed to slow ones, by what they do and not by what they report.
    ``silence_timeout_s``: it reports a few times a second, so nothing at all for so long means that its process is
    stopped. ``progress_timeout_s``: requests are open, it is not paused, and none made progress for so long."""

    def __init__(self, settings: Engines) -> None:
        self._settings = settings
        self._looked = -math.inf
        self._received = -1
        self._progress: tuple[int, ...] = ()
        self._silent = 0.0
        self._stalled = 0.0

    def check(self, now: float, *, received: int, progress: tuple[int, ...], busy: bool) -> str:
        """Return why it is to be ended; empty while it is not. ``now`` in seconds; ``received``: how many events came
        from it; ``progress``: counters that grow when a request makes progress; ``busy``: whether they should."""
        seconds = min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        self._silent = self._silent + seconds if received == self._received else 0.0
        self._stalled = self._stalled + seconds if busy and progress == self._progress else 0.0
        self._received = received
        self._progress = progress
        if self._silent >= self._settings.silence_timeout_s:
            return f"nothing was heard from it for {self._silent:.0f} s (engines.advanced.silence_timeout_s)"
        if self._stalled >= self._settings.progress_timeout_s:
            return f"none of its requests made progress for {self._stalled:.0f} s (engines.advanced.progress_timeout_s)"
        return ""


class _EngineSlot:
    """One engine. ``endpoints``: of its orders and its events. ``in_use``: its set is. ``awake``: it has a host, or one
    is being started, which takes memory. ``stopped``: the supervisor starts one only when it is ordered. ``joined``: it
    holds the live version. ``late``: it died, or waits for the next version, after its set was put to use."""

    def __init__(self, name: str, endpoints: tuple[str, str], hosts: EngineHosts, *, in_use: bool) -> None:
        self.name = name
        self._endpoints = endpoints
        self.stopped = not in_use
        self.awake = False
        self.joined = False
        self.ready: tuple[RemoteEngine, EngineReady] | None = None
        self._hosts = hosts
        self._settings = hosts.settings
        self._admission = anyio.CancelScope()
        self._listening = anyio.CancelScope()
        self._engine: RemoteEngine | None = None
        self._closed = anyio.Event()
        self._closed.set()
        self.use(in_use)

    async def run(self) -> None:
        """One host after another, while its set is in use."""
        missed_since = math.inf
        while True:
            if not self.in_use:
                missed_since = math.inf
                await self._stop()
                await self._hosts.until(lambda: self.in_use)
            self.awake = True
            assert self._hosts.streams is not None, "run() was not started"
            engine = await self._hosts.streams.start(self._listen)
            self._hosts.begin(self._note_changes, engine)
            if self.stopped:
                self.stopped = False
                await self._hosts.order(StartEngine(engine=self.name))
            ready = await self._until_ready(engine)
            if ready is not None:
                self.ready = engine, ready
                self._hosts.notify()
                try:
                    missed_since = await self._serve(engine, missed_since)
                finally:
                    self.joined = False
                    self.ready = None
            if self.in_use:
                missed_since = min(missed_since, anyio.current_time())
                self._mark_late()
                await self._closed.wait()

    async def _listen(self, *, task_status: TaskStatus[RemoteEngine]) -> None:
        """Listen to one host until it has ended, or is given up. Raises ``EngineError`` naming the engine whose host
        died, where that ends the run."""
        name = self.name
        guard = self._hosts.guard
        orders_at, events_at = self._endpoints
        sender = zmq_sender(EngineOrder, orders_at, bind=True, window=WINDOW, guard=guard, name=f"{name}.orders")
        receiver = zmq_receiver(
            EngineEvent, events_at, bind=True, window=WINDOW, guard=guard, name=f"{name}.completions"
        )
        self._closed = anyio.Event()
        try:
            with anyio.CancelScope() as self._listening:
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
            self._closed.set()

    async def abandon(self) -> None:
        """Stop listening to its host: it is being ended, perhaps before it ever was ready."""
        self._listening.cancel()
        await self._closed.wait()

    def use(self, in_use: bool) -> None:
        """Say whether its set is in use: it serves from now on, or leaves."""
        self.in_use = in_use
        self.late = False
        if not in_use:
            self._admission.cancel()

    def fail(self, engine: RemoteEngine, reason: str) -> None:
        """End its host, which makes no progress, so that it is started again."""
        log.warning("%s is ended: %s", self.name, reason)
        self._hosts.begin(self._kill, engine, KillEngine(engine=self.name, reason=reason, pid=engine.pid))
        engine.give_up(reason)

    async def _serve(self, engine: RemoteEngine, missed_since: float) -> float:
        """Serve until the engine fails, or was stopped. Returns since when it is missed."""
        hosts = self._hosts
        while True:
            if hosts.pool is not None and self.in_use and await self._join(engine, hosts.pool):
                if missed_since < math.inf:
                    hosts.restarts += 1
                    await hosts.emit(EngineBack(engine=self.name, seconds=anyio.current_time() - missed_since))
                missed_since = math.inf
            await hosts.until(lambda: engine.failure or not self.in_use)
            if engine.failure:
                await self._lose(engine)
                return missed_since
            if not await self._leave(engine):
                return missed_since

    async def _until_ready(self, engine: RemoteEngine) -> EngineReady | None:
        """Wait for the engine. None: its host died while it started, its set is not in use any more, or it takes too
        long."""
        limit = self._settings.start_timeout_s
        hosts = self._hosts
        reason = f"not ready within {limit:g} s of being started (engines.advanced.start_timeout_s)"
        pause_s = LONGEST_PAUSE_S if self.late else 0.0
        with anyio.move_on_after(limit + pause_s if hosts.pool is not None or self.late else None):
            await hosts.until(lambda: engine.readiness or engine.failure or not self.in_use)
            if engine.failure:
                log.warning("%s did not become ready: %s", self.name, engine.failure)
                hosts.alone_since = anyio.current_time()
            return engine.readiness if not engine.failure else None
        if not self._settings.restarts:
            raise EngineError(f"{self.name}: {reason}")
        await self._kill(engine, KillEngine(engine=self.name, reason=f"it was {reason}", older_than_s=limit))
        return None

    async def _join(self, engine: RemoteEngine, pool: EnginePool) -> bool:
        """Have it hold the live version. False: it failed meanwhile, or its set is not in use any more."""
        if self.joined:
            return True
        with anyio.CancelScope() as self._admission:
            await self._hosts.until(lambda: self._hosts.sync)
            assert self._hosts.sync is not None
            try:
                await pool.attach(self.name, engine)
                await self._hosts.sync.admit(self.name, engine, self._mark_late)
            except EngineError as error:
                if not self._settings.restarts or not (engine.failure or self.name in pool.attached):
                    raise
                if not engine.failure:
                    self.fail(engine, str(error))
                return False
            self.joined = True
            if self.in_use and not self._hosts.switching:
                pool.readmit(self.name, UNAVAILABLE)
            log.warning("%s holds the live weights", self.name)
            self._hosts.notify()
        return self.joined

    async def _lose(self, engine: RemoteEngine) -> None:
        requests = engine.lost_requests
        if self._hosts.pool is not None:
            self._hosts.pool.lose(self.name)
        if self._hosts.sync is not None:
            self._hosts.sync.remove(engine)
        log.warning("%s is lost (%s) with %d requests, which the others sample", self.name, engine.failure, requests)
        await self._hosts.emit(EngineLost(engine=self.name, reason=engine.failure, requests=requests))
        if engine.pid:
            self._hosts.begin(self._kill_if_away, engine)

    async def _leave(self, engine: RemoteEngine) -> bool:
        """Take it out of everything, since another set is used. True: it slept, and is awake again."""
        hosts = self._hosts
        pool = self._hosts.pool
        sync = self._hosts.sync
        assert pool is not None
        assert sync is not None
        with anyio.move_on_after(DRAIN_SECONDS) as limit:
            await pool.drain(self.name, UNAVAILABLE)
        if limit.cancelled_caught:
            engine.give_up(f"requests were not dropped within {DRAIN_SECONDS:g} s of an abort")
            pool.lose(self.name)
        self.joined = False
        await sync.leave(engine)
        if self.name in pool.attached:
            pool.detach(self.name)
        if not hosts.sleeps or engine.failure:
            return False
        try:
            await hosts.order(StopEngine(engine=self.name, sleeps=True))
            await engine.sleep()
            self.awake = False
            hosts.notify()
            await hosts.until(lambda: engine.failure or self.in_use)
            if not self.in_use:
                raise EngineError(engine.failure)
            self.awake = True
            await hosts.order(StartEngine(engine=self.name))
            await engine.wake()
        except EngineError as error:
            log.warning("%s is lost while it slept: %s", self.name, error)
            return False
        return True

    async def _stop(self) -> None:
        """End its host, if there is one, or keep one from being started. The supervisor starts another only when this
        one is gone."""
        if self.stopped:
            return
        engine = self._engine
        serves = engine is not None and engine.readiness is not None and not engine.failure
        self.stopped = True
        await self._hosts.order(StopEngine(engine=self.name, patience_s=PATIENCE_SECONDS if serves else 0.0))
        if engine is not None and serves:
            with anyio.move_on_after(STOP_SECONDS):
                with suppress(StreamBroken):  # it ended before its orders did
                    await engine.aclose()
                await self._closed.wait()
        await self.abandon()
        self.awake = False
        self._hosts.notify()

    async def _kill_if_away(self, engine: RemoteEngine) -> None:
        """A stream breaks where heartbeats stop, too: its host may live, and be stopped."""
        limit = self._settings.silence_timeout_s
        await anyio.sleep(limit)
        if self.in_use and self.ready is None:
            reason = (
                f"it did not come back within {limit:g} s (engines.advanced.silence_timeout_s) of being lost "
                f"({engine.failure})"
            )
            await self._hosts.order(KillEngine(engine=self.name, reason=reason, pid=engine.pid))

    async def _kill(self, engine: RemoteEngine, order: KillEngine) -> None:
        await self._hosts.order(order)
        if self._engine is engine:
            await self.abandon()

    def _mark_late(self) -> None:
        self.late = True
        self._hosts.notify()

    async def _note_changes(self, engine: RemoteEngine) -> None:
        """Say when it is ready and when it fails."""
        with suppress(EngineError):
            await engine.start()
        self._hosts.notify()
        await engine.failed.wait()
        self._hosts.notify()


class EngineHosts:
    """``run`` beside everything else; ``start`` the first set; ``set_weight_sync`` as soon as there is a weight
    sync; ``use`` another set between rounds; ``aclose`` at the end.

    ``endpoints``: of the orders and of the events of all engines, by name. ``settings``: the recipe's section
    ``engines``; where it allows no restarts, the death of an engine in use ends the run. ``guard``: which hosts may
    connect over tcp. ``sleeps``: engines of a set that is not in use keep their process. ``order`` reaches the
    supervisor, ``emit`` the observers of the run."""

    def __init__(
        self,
        endpoints: Mapping[str, tuple[str, str]],
        settings: Engines,
        *,
        order: Callable[[SupervisorOrder], Awaitable[None]],
        emit: Callable[[EngineLost | EngineBack], Awaitable[None]],
        guard: KeyGuard | None = None,
        sleeps: bool = False,
    ) -> None:
        self.settings = settings
        self.order = order
        self.emit = emit
        self.guard = guard
        self.sleeps = sleeps
        self.pool: EnginePool | None = None
        self.sync: WeightSync | None = None
        self.switching = True
        """Engines that join serve when the others do, too."""
        self.restarts = 0
        self.alone_since = 0.0
        """When there was an engine last, or a start of one failed: the next one has as much time."""
        self.streams: TaskGroup | None = None
        """The tasks that listen to hosts; the group ends after the slots do."""
        self._group: TaskGroup | None = None
        self._changed = anyio.Event()
        self._endpoints = endpoints
        self._slots: dict[str, _EngineSlot] = {}

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of a step, counted since the start of the run's controller."""
        lost = self.pool.lost_requests if self.pool else 0
        return {"engines/restarts_total": float(self.restarts), "engines/lost_requests_total": float(lost)}

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache of an engine in use holds; 0: unknown."""
        return next((slot.ready[1].kv_tokens for slot in self._in_use if slot.ready), 0)

    @property
    def _in_use(self) -> list[_EngineSlot]:
        return [slot for slot in self._slots.values() if slot.in_use]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition`` holds, which is asked whenever anything changes."""
        while not condition():
            await self._changed.wait()

    def notify(self) -> None:
        """Say that something has changed."""
        self._changed.set()
        self._changed = anyio.Event()

    def begin(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Start ``work`` beside the others, unless the run ends."""
        assert self._group is not None, "run() was not started"
        start_unless_ending(self._group, work, *arguments)  # type: ignore[arg-type]

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch the engines, and wait for those that were lost; until ``aclose``, and until their hosts have ended.
        Raises ``EngineError`` when no engine is there for long, or one comes back with another model."""
        watches: dict[RemoteEngine, ProgressWatch] = {}
        limit = self.settings.start_timeout_s + LONGEST_PAUSE_S
        self.alone_since = anyio.current_time()
        async with anyio.create_task_group() as self.streams, anyio.create_task_group() as self._group:
            task_status.started()
            while True:
                await anyio.sleep(LOOK_S)
                now = anyio.current_time()
                pool = self.pool
                # Sets are of local engines: the supervisor knows when it starts none again, and ends the run.
                if pool is None or pool.attached or self.switching:
                    self.alone_since = now
                elif now - self.alone_since > limit:
                    raise EngineError(f"no engine was there for {limit:g} s; the logs of their hosts say why they died")
                engines = [slot.ready[0] for slot in self._slots.values() if slot.ready]
                watches = {engine: watches.get(engine) or ProgressWatch(self.settings) for engine in engines}
                for engine, watch in watches.items():
                    reason = watch.check(
                        now, received=engine.events_received, progress=engine.progress, busy=engine.has_open_requests
                    )
                    if reason:
                        self.on_failure(engine, reason)

    async def start(self, names: Sequence[str]) -> tuple[EnginePool, EngineReady]:
        """Use ``names``, which the supervisor starts by itself: wait until each engine is ready, but not for one that
        has died, which joins later. At least one is ready.

        Returns the pool of all engines, and what ``names`` are together. Raises ``EngineError`` when they are not of
        one model."""
        self._slots = {n: _EngineSlot(n, at, self, in_use=n in names) for n, at in self._endpoints.items()}
        for slot in self._slots.values():
            self.begin(slot.run)
        await self.until(lambda: self._alive() and all(slot.ready or slot.late for slot in self._in_use))
        alive = self._alive()
        engines = {name: engine for name, (engine, _) in alive.items()}
        fatal_deaths = self.settings.fatal_deaths if self.settings.restarts else None
        pool = EnginePool(engines, unavailable=[n for n in self._slots if n not in alive], fatal_deaths=fatal_deaths)
        ready = pool.joined([ready for _, ready in alive.values()])
        self.pool = pool
        self.switching = False
        for name in alive:
            self._slots[name].joined = True
        return pool, msgspec.structs.replace(
            ready,
            max_num_seqs=ready.max_num_seqs * len(names) // len(alive),
            kv_tokens=ready.kv_tokens * len(names) // len(alive),
        )

    def _alive(self) -> dict[str, tuple[RemoteEngine, EngineReady]]:
        return {n: slot.ready for n, slot in self._slots.items() if slot.ready and not slot.ready[0].failure}

    def set_weight_sync(self, sync: WeightSync) -> None:
        """Use ``sync``, which has the engines of the pool, for every engine that is started from now on."""
        self.sync = sync
        self.notify()

    async def use(self, names: Collection[str]) -> None:
        """Have these engines serve and no others, which stop *before* these are started: both at once may not fit the
        machine. Requests wait until this returns: when each of them serves or is late, since it died or its version
        is not to be had any more, and one serves."""
        assert self.pool is not None
        self.pool.withdraw(self.pool.names, UNAVAILABLE)
        self.switching = True
        self._have_in_use(())
        await self.until(lambda: not any(slot.awake for slot in self._slots.values()))
        self._have_in_use(names)
        joining = self._in_use
        await self.until(
            lambda: any(slot.joined for slot in joining) and all(slot.joined or slot.late for slot in joining)
        )
        self.switching = False
        for slot in joining:
            if slot.joined:
                self.pool.readmit(slot.name, UNAVAILABLE)

    def _have_in_use(self, names: Collection[str]) -> None:
        for slot in self._slots.values():
            slot.use(slot.name in names)
        self.notify()

    async def aclose(self) -> None:
        """The run ends: no engine is waited for any more, and hosts that start or sleep are ended. Those that serve end
        with the pool."""
        assert self._group is not None, "run() was not started"
        self._group.cancel_scope.cancel()
        attached = self.pool.attached if self.pool else {}
        for name, slot in self._slots.items():
            if slot.ready and not slot.awake:
                await slot.ready[0].aclose()
            elif name not in attached:
                if not slot.stopped:
                    await self.order(StopEngine(engine=name))
                await slot.abandon()

    def on_failure(self, engine: Engine, reason: str) -> bool:
        """End ``engine``, if it has not died, so that it is started again. Returns whether the run continues without
        it."""
        assert isinstance(engine, RemoteEngine)
        if self.settings.restarts and not engine.failure:
            self._slots[engine.name].fail(engine, reason)
        return bool(self.settings.restarts)
