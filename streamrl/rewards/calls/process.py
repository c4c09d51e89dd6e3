"""A call process: it calls the user's functions, one after the other on the main thread, or coroutines on a loop.

``fork_server`` forks it and runs ``run_call_process`` in it; ``pool`` in the reward worker sends the calls. When a call
outlives its limit, the process is killed with everything that it started, so nothing here tries to stop a running
function."""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import gc
import inspect
import math
import operator
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from streamrl.base.run_process import usable_cores
from streamrl.base.types import RewardFailureKind
from streamrl.recipe.user_code import describe_error
from streamrl.rewards.calls.frames import READY, CallAnswer, CallOrder, Clock, FrameReader, SharedStatus, to_frame
from streamrl.rewards.signature import RewardFunction
from streamrl.rewards.values import CheckedValues, check_returned, failed

_MOST_CALLS = 20_000  # the process is replaced after them, which frees what user code leaks in small portions
# Usage is read after each of the first calls, then after every 64th: reading it takes 50 us.
_CHECK_EACH = 128
_CHECK_EVERY = 64
_MOST_THREADS = 32
_MOST_CAUSES = 8
_STOP_GRACE_S = 1.0  # time that a cancelled coroutine has to end
_CPU_MARGIN_S = 5
_CORES = usable_cores()
_exit = os._exit  # user code may replace it
# Small: the unused part of a large block would fragment the heap, which then grows with every call.
_RECEIVE_BYTES = 1 << 16


def limit_process(memory_bytes: int) -> None:
    """Forbid core dumps, and more than ``memory_bytes`` of address space beyond the present one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _usage()[0] + memory_bytes
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _usage() -> tuple[int, int, int, int]:
    """Address space and resident memory of this process in bytes, number of its threads and of its descriptors."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    resident = int(fields[21]) * resource.getpagesize()
    return int(fields[20]), resident, int(fields[17]), len(os.listdir("/proc/self/fd"))


class _RecyclePolicy:
    """Rule that replaces a process between two calls, before a call fails: the process had many calls, or has used up
    half of the memory, threads or descriptors that it may use beyond its use after the first call."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._calls = 0
        self._limits: tuple[int, ...] = ()  # one limit for each value of ``_usage``

    def is_due(self) -> bool:
        """Return whether to replace the process. To be called once after each call."""
        self._calls += 1
        if self._calls > _CHECK_EACH and self._calls % _CHECK_EVERY:
            return False
        try:
            usage = _usage()
        except (OSError, MemoryError):  # too exhausted even to read /proc
            return True
        if not self._limits:
            addresses, resident, threads, descriptors = usage
            self._limits = (
                (addresses + resource.getrlimit(resource.RLIMIT_AS)[0]) // 2,
                resident + self._memory_bytes // 2,
                threads + _MOST_THREADS,
                (descriptors + resource.getrlimit(resource.RLIMIT_NOFILE)[0]) // 2,
            )
        return self._calls >= _MOST_CALLS or any(map(operator.gt, usage, self._limits))


def _is_exhausted(error: BaseException) -> bool:
    """Return whether user code raised because the process had no memory, threads or descriptors left."""
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):  # the chain of causes may be a circle
        if cause is None:
            break
        if isinstance(cause, OSError):
            if cause.errno in (errno.EMFILE, errno.ENOMEM):
                return True
        elif isinstance(cause, MemoryError) or "can't start new thread" in describe_error(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def count_of(order: CallOrder) -> int:
    """Count the completions of a call."""
    return len(order.completion) if isinstance(order.completion, list) else 1


class SyncServer:
    """Server of a process of plain functions. It answers each call before the next begins, so the oldest call without
    an answer is the running call."""

    def __init__(
        self, connection: socket.socket, page: SharedStatus, functions: Sequence[RewardFunction], memory_bytes: int
    ) -> None:
        self._connection = connection
        self._page = page
        self._retired = False
        self._functions = functions
        self._recycling = _RecyclePolicy(memory_bytes)
        self._pid = os.getpid()
        self._runner: asyncio.Runner | None = None
        self._cpu_limit_s = 0

    def serve(self) -> None:
        """Serve until the worker closes the connection."""
        frames: FrameReader[CallOrder] = FrameReader(CallOrder)
        self._connection.sendall(to_frame(READY))
        while received := self._connection.recv(_RECEIVE_BYTES):
            for order in frames.feed(received):
                # The pool gives a call that is not permitted to another process.
                if not self._retired and self._page.permits(order.sequence):
                    self._answer(order)

    def _answer(self, order: CallOrder) -> None:
        self._allow_cpu(order.limit_s)
        count = count_of(order)
        function = self._functions[order.function]
        exhausted = False
        started = Clock.perf_counter()
        try:
            returned = function.call(order.completion, **order.arguments)
            if inspect.isawaitable(returned):  # a decorator hides an async function
                returned = self._finish(returned)
            seconds = Clock.perf_counter() - started
            values = check_returned(returned, count, function.signature)
        except BaseException as error:  # noqa: BLE001 - SystemExit in a user's function is a failure of the reward
            seconds = Clock.perf_counter() - started
            values = failed(RewardFailureKind.RAISED, describe_error(error), count)
            exhausted = _is_exhausted(error)
            del error
        if os.getpid() != self._pid:  # the function forked, and this is the child
            _exit(0)
        with suppress(OSError, ValueError, AttributeError):  # user code may close or replace stdout
            sys.stdout.flush()
        self._retired = exhausted or self._recycling.is_due()
        answer = CallAnswer(order.sequence, seconds, list(values), self._retired, exhausted)
        self._connection.sendall(to_frame(answer))

    def _finish(self, pending: Awaitable[Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def finish() -> Any:
            return await pending

        return self._runner.run(finish())

    def _allow_cpu(self, limit_s: float) -> None:
        """Raise the limit on CPU time to what the next call may use. The kernel enforces it even where the worker is
        gone or busy."""
        required_s = math.ceil(Clock.process_time() + limit_s * _CORES) + _CPU_MARGIN_S
        if required_s > self._cpu_limit_s:
            self._cpu_limit_s = required_s + 60
            resource.setrlimit(resource.RLIMIT_CPU, (self._cpu_limit_s, resource.RLIM_INFINITY))


async def values_of_coroutine(
    function: RewardFunction, completion: Any, arguments: Mapping[str, Any], count: int
) -> tuple[CheckedValues, bool]:
    """The values of a call, and whether the process was exhausted. Raises nothing except ``CancelledError``."""
    try:
        returned = await function.call(completion, **arguments)
        return check_returned(returned, count, function.signature), False
    except asyncio.CancelledError:
        raise  # the caller knows whether it cancelled the call or user code did
    except BaseException as error:  # noqa: BLE001 - SystemExit in a user's coroutine is a failure of the reward
        return failed(RewardFailureKind.RAISED, describe_error(error), count), _is_exhausted(error)


class _ObservedCoroutine:
    """A coroutine whose every step is noted in the page, so the worker knows which coroutine blocks the loop."""

    def __init__(self, inner: Generator[Any, Any, Any], page: SharedStatus, sequence: int) -> None:
        self._inner = inner
        self._page = page
        self._sequence = sequence

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._inner.send
        argument = None
        while True:
            self._page.begin(self._sequence)
            try:
                yielded = step(argument)
            except StopIteration as end:
                return end.value
            finally:
                self._page.end()
            try:
                argument = yield yielded
                step = self._inner.send
            except BaseException as error:  # noqa: BLE001 - every exception is passed to the inner coroutine
                argument = error
                step = self._inner.throw


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose timers use ``Clock``, so user code that patches ``time`` does not affect them."""

    def time(self) -> float:
        return Clock.monotonic()


class LoopServer:
    """Server of the process of coroutines, which run side by side. A call past its limit is answered and cancelled; if
    its coroutine does not end, the process asks to be replaced."""

    def __init__(
        self, connection: socket.socket, page: SharedStatus, functions: Sequence[RewardFunction], memory_bytes: int
    ) -> None:
        self._connection = connection
        self._page = page
        self._functions = functions
        self._recycling = _RecyclePolicy(memory_bytes)
        self._answers: list[bytes] = [to_frame(READY)]
        self._has_answers = asyncio.Event()
        self._has_answers.set()

    async def serve(self) -> None:
        """Serve until the worker closes the connection."""
        frames: FrameReader[CallOrder] = FrameReader(CallOrder)
        loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        async with asyncio.TaskGroup() as calls:
            calls.create_task(self._write())
            while received := await loop.sock_recv(self._connection, _RECEIVE_BYTES):
                for order in frames.feed(received):
                    self._begin(order, calls)
            _exit(0)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while await self._has_answers.wait():
            self._has_answers.clear()
            answers = self._answers
            self._answers = []
            await loop.sock_sendall(self._connection, b"".join(answers))

    def _begin(self, order: CallOrder, calls: asyncio.TaskGroup) -> None:
        started = Clock.perf_counter()
        task = calls.create_task(self._call(order))
        loop = asyncio.get_running_loop()

        def answer_late_call() -> None:
            values = failed(RewardFailureKind.TIMED_OUT, late_message(order.limit_s), count_of(order))
            self._answer(order, Clock.perf_counter() - started, values)
            task.remove_done_callback(answer_call)
            task.cancel()
            loop.call_later(_STOP_GRACE_S, retire_if_stuck)

        def retire_if_stuck() -> None:
            if not task.done():  # the coroutine swallows its cancellation
                self._answer(CallOrder(0, 0, 0.0, "", {}), 0.0, (), retire=True)

        timer = loop.call_later(order.limit_s, answer_late_call)

        def answer_call(task: asyncio.Task[tuple[CheckedValues, bool]]) -> None:
            timer.cancel()
            seconds = Clock.perf_counter() - started
            if task.cancelled():
                message = "CancelledError: it was cancelled by itself"
                values = failed(RewardFailureKind.RAISED, message, count_of(order))
                exhausted = False
            else:
                values, exhausted = task.result()
            self._answer(order, seconds, values, exhausted=exhausted)

        task.add_done_callback(answer_call)

    async def _call(self, order: CallOrder) -> tuple[CheckedValues, bool]:
        call = values_of_coroutine(self._functions[order.function], order.completion, order.arguments, count_of(order))
        observed = _ObservedCoroutine(call.__await__(), self._page, order.sequence)
        result: tuple[CheckedValues, bool] = await observed
        return result

    def _answer(
        self, order: CallOrder, seconds: float, values: CheckedValues, *, retire: bool = False, exhausted: bool = False
    ) -> None:
        answer = CallAnswer(order.sequence, seconds, list(values), retire or self._recycling.is_due(), exhausted)
        self._answers.append(to_frame(answer))
        self._has_answers.set()


def late_message(limit_s: float) -> str:
    """Message of the failure of a call past its limit."""
    return f"gave no reward within its time limit of {limit_s:g} s"


def run_call_process(
    connection: socket.socket,
    page: SharedStatus,
    load: Callable[[], Sequence[RewardFunction]],
    *,
    loop: bool,
    memory_bytes: int,
) -> NoReturn:
    """Run a forked child until its connection ends, and exit. ``load``: function that returns the reward functions;
    ``loop``: the functions are coroutines."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        faulthandler.enable()
        functions = load()
        limit_process(memory_bytes)
        _seed_generators()
        gc.freeze()
        if loop:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                runner.run(LoopServer(connection, page, functions, memory_bytes).serve())
        else:
            SyncServer(connection, page, functions, memory_bytes).serve()
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # the worker is gone
    except BaseException as error:  # noqa: BLE001 - every error is written to the log, and the process ends
        sys.stderr.write(f"a reward process ends: {describe_error(error)}\n")
    finally:
        _exit(code)


def _seed_generators() -> None:
    """Seed random generators anew: without it every forked process would draw the same numbers."""
    if (random := sys.modules.get("random")) is not None:
        random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
