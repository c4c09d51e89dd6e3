"""An event loop on virtual time, and processes on it that can be killed, hung and slowed as real ones are.

Time is frozen while anything can run and then jumps to the next timer. A process is a context variable: every
callback of its tasks carries it, so the loop knows whose callback it is about to run. Killed is frozen for ever: not
one line of it runs any more, no ``finally`` either, exactly as after SIGKILL; its tasks are kept (so that nothing
collects them) until the world ends. Hung is frozen for a while: its timers and messages wait in order.

Ready callbacks are run in the order in which asyncio promises to run them; what differs from seed to seed is time."""

from __future__ import annotations

import asyncio
import gc
import heapq
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any
from unittest import mock
from weakref import WeakSet

import anyio
import anyio.to_thread
import sniffio
from anyio._backends._asyncio import _task_states

PROCESS: ContextVar[SimulatedProcess | None] = ContextVar("PROCESS", default=None)

TURNS_WITHOUT_TIME = 2_000
"""Turns of the loop at one instant. More: somebody spins, as anyio does while it cancels what is shielded; in reality
that takes time, so time goes on."""

MOST_CALLBACKS = 1_500_000
"""Of one world, a hundred times what it usually needs."""

EPOCH_S = 1_700_000_000.0


class NothingCanHappen(AssertionError):
    """No callback is ready and no timer is set: everybody waits for somebody else."""


class SimulatedProcess:
    """One life of a process. ``parked``: what it would have done while it hung."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.dead = False
        self.hung_until = 0.0
        self.hangs = 0
        self.parked: deque[asyncio.Handle] = deque()
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.connections: list[Any] = []
        self.signals: list[Any] = []
        self.roots: list[asyncio.Task[Any]] = []
        self.at_end: list[Callable[[], None]] = []
        self.phases: Counter[str] = Counter()
        self.pid = 0
        self.collectives = 0
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def __repr__(self) -> str:
        return f"{self.name}#{self.incarnation}"


class _Task(asyncio.Task[Any]):
    """Hashed by number: sets of tasks (anyio has some) are walked in the same order in every run of a seed."""

    _count = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        _Task._count += 1
        self._number = _Task._count
        super().__init__(*arguments, **named)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class _Callback(asyncio.TimerHandle):
    """A handle without what asyncio keeps for its debug mode: making handles is a tenth of the work of a world."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._callback = callback
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]

    def _run(self) -> None:
        """What it raises ends the world: the product never leaves that to its loop."""
        self._context.run(self._callback, *self._args)

    def __repr__(self) -> str:
        return f"<callback {self._callback}>"


class VirtualLoop(asyncio.BaseEventLoop):
    """``compute_s``: how long a function takes that is given to a thread; ``computes`` is called at both ends, and
    ``together`` ends it: at once, or when others have come as far."""

    _ready: deque[Any]  # of BaseEventLoop, which its stub leaves out

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.callbacks = 0
        self.compute_s: Callable[[], float] = lambda: 0.0
        self.computes: Callable[[Any, bool], None] = lambda func, begins: None
        self.together: Callable[[Any, Callable[[], None]], None] = lambda func, run: run()
        self._lanes: dict[Any, deque[Callable[[], None]]] = {}
        self._timers: list[tuple[float, int, _Callback]] = []
        self._timers_set = 0
        self._turns = 0
        self._halted = 0
        self._graveyard: list[asyncio.Task[Any]] = []
        _Task._count = 0
        self.set_task_factory(_make_task)

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = _Callback(callback, args, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        handle = _Callback(callback, args, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def time(self) -> float:
        return self.now

    # ---- processes -------------------------------------------------------------------------------

    def kill(self, process: SimulatedProcess) -> None:
        """Nothing of it runs any more."""
        if process.dead:
            return
        if process.hung_until <= self.now:
            self._halted += 1
        process.dead = True
        process.parked.clear()
        self._bury(process)

    def _bury(self, process: SimulatedProcess) -> None:
        for task in list(process.tasks):
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                self._graveyard.append(task)

    def hang(self, process: SimulatedProcess, seconds: float) -> None:
        """It does nothing for so long, then goes on."""
        if process.dead:
            return
        if process.hung_until <= self.now:
            self._halted += 1
        process.hangs += 1
        process.hung_until = max(process.hung_until, self.now + seconds)
        self.call_at(process.hung_until, self._wake, process, process.hangs, context=_world_context())

    def _wake(self, process: SimulatedProcess, hang: int) -> None:
        if process.dead or hang != process.hangs:
            return
        self._halted -= 1
        process.hung_until = 0.0
        self._ready.extend(process.parked)
        process.parked.clear()

    # ---- the loop --------------------------------------------------------------------------------

    def _run_once(self) -> None:
        ready = self._ready
        self._turns += 1
        if not ready or self._turns > TURNS_WITHOUT_TIME:
            self._advance()
        self.callbacks += len(ready)
        if self.callbacks > MOST_CALLBACKS:
            raise NothingCanHappen(f"{self.callbacks} callbacks in {self.now:.0f} s: something spins")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._halted:
                process = handle._context.get(PROCESS)
                if process is not None and (process.dead or process.hung_until > self.now):
                    if not process.dead:
                        process.parked.append(handle)
                    continue
            handle._run()

    def _advance(self) -> None:
        self._turns = 0
        timers, ready = self._timers, self._ready
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            if not ready:
                raise NothingCanHappen(f"at {self.now:.3f} s: no timer is set and nothing is ready")
            return
        now = self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            if not handle._cancelled:
                ready.append(handle)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """``func`` runs at the end of the time that it takes, all at once; one after the other in each executor."""
        future = self.create_future()
        lane = self._lanes.setdefault(executor, deque())

        def begin() -> None:
            if future.cancelled():  # before its turn came; later nothing can stop it
                following()
            else:
                self.computes(func, True)
                self.call_later(self.compute_s(), lambda: self.together(func, end))

        def end() -> None:
            self.computes(func, False)
            try:
                result = func(*arguments)
            except BaseException as error:  # noqa: BLE001 - it belongs to the task that waits
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)
            following()

        def following() -> None:
            lane.popleft()
            if lane:
                lane[0]()

        lane.append(begin)
        if len(lane) == 1:
            begin()
        return future

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    def burn(self) -> None:
        """The world is over: end what was frozen, whatever its ``finally`` blocks do."""
        self._ready.clear()
        self._timers.clear()
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._close_all()
                # anyio's states are kept by the tasks that they keep: a campaign would hold every world it has run.
                for task in [task for task in _task_states if task.get_loop() is self]:
                    del _task_states[task]
                gc.collect()
        finally:
            sys.unraisablehook = hook

    def _close_all(self) -> None:
        for task in (*self._graveyard, *asyncio.all_tasks(self)):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            try:
                task.get_coro().close()
            except BaseException:  # noqa: BLE001 - no task is left that could raise it
                continue
        self._graveyard.clear()
        self._ready.clear()
        self._timers.clear()


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
    task = _Task(coroutine, loop=loop, **named)
    context = named.get("context")
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks.add(task)
    return task


def _world_context() -> Context:
    context = copy_context()
    context.run(PROCESS.set, None)
    return context


class Clock:
    """What modules see of ``time``: virtual seconds. The wall clock may jump; the others never do."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.jump_s = 0.0

    def monotonic(self) -> float:
        return self._loop.now

    def monotonic_ns(self) -> int:
        return int(self._loop.now * 1e9)

    def wall(self) -> float:
        return EPOCH_S + self._loop.now + self.jump_s


_PLACES: dict[int, list[tuple[Any, str]]] = {}


def places_of(original: Any) -> list[tuple[Any, str]]:
    """Every module of the product that has ``original`` under some name."""
    if id(original) not in _PLACES:
        modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "streamrl"]
        _PLACES[id(original)] = [
            (module, name) for module in modules for name, value in vars(module).items() if value is original
        ]
    return _PLACES[id(original)]


@contextmanager
def virtual_clock(loop: VirtualLoop, random: Random) -> Iterator[Clock]:
    """Everybody's clock is virtual, and what a thread would do takes a moment of it."""
    clock = Clock(loop)

    async def run_sync(func: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        with anyio.CancelScope(shield=True):
            await asyncio.sleep(random.expovariate(1 / 0.002))
        return func(*arguments)

    clocks = {
        time.monotonic: clock.monotonic,
        time.monotonic_ns: clock.monotonic_ns,
        time.perf_counter: clock.monotonic,
        time.time: clock.wall,
    }
    with ExitStack() as stack:
        for real, virtual in clocks.items():
            for owner, name in [(time, real.__name__), *places_of(real)]:
                stack.enter_context(mock.patch.object(owner, name, virtual))
        stack.enter_context(mock.patch("anyio.to_thread.run_sync", run_sync))
        # anyio asks a hundred thousand times a minute
        stack.enter_context(mock.patch.object(sniffio.thread_local, "name", "asyncio"))
        yield clock
