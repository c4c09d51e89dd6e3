"""Calls of functions that the recipe trusts, in the calling process: coroutines on its loop, plain functions at once.

``reward_set`` calls them in the reward worker, or in the process of a command. A function never raises into the caller:
every exception becomes a failure. A coroutine that swallows its cancellation stays in the process and is counted. A
function that blocks the loop of a reward worker or an environment worker ends the process (``ExitTimer``)."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import logging
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE
from streamrl.base.types import RewardFailureKind
from streamrl.recipe.user_code import describe_error
from streamrl.rewards.calls.process import late_message, values_of_coroutine
from streamrl.rewards.signature import RewardFunction
from streamrl.rewards.values import CallResult, CheckedValues, check_returned, failed

_CLOSE_LIMIT_S = 1.0
_BLOCKED_S = 0.25  # a timer that is so late shows that an import or another call blocked the loop

_log = logging.getLogger(__name__)


def call_at_once(
    function: RewardFunction, completion: Any, arguments: Mapping[str, Any], count: int, limit_s: float
) -> CallResult:
    """The result of a plain function."""
    started = time.perf_counter()
    try:
        returned = function.call(completion, **arguments)
        if inspect.isawaitable(returned):
            message = "returned an awaitable: write async def, or trusted = false"
            if inspect.iscoroutine(returned):
                returned.close()
            values = failed(RewardFailureKind.WRONG_TYPE, message, count)
        else:
            values = check_returned(returned, count, function.signature)
    except BaseException as error:  # noqa: BLE001 - SystemExit in a user's function is a failure of the reward
        values = failed(RewardFailureKind.RAISED, describe_error(error), count)
    seconds = time.perf_counter() - started
    if seconds > limit_s:
        values = failed(RewardFailureKind.TIMED_OUT, late_message(limit_s), count)
    return CallResult(values, seconds, 0.0, limit_s)


class TrustedCoroutines:
    """Calls of coroutine functions. ``tasks``: task group of the coroutines, which must live as long as the worker: a
    coroutine that swallows its cancellation stays in it."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._late: set[asyncio.Task[tuple[CheckedValues, bool]]] = set()

    @property
    def stuck(self) -> int:
        """Coroutines past their limit that still run."""
        return len(self._late)

    async def call(
        self, function: RewardFunction, completion: Any, arguments: Mapping[str, Any], count: int, limit_s: float
    ) -> CallResult:
        """The result of a coroutine function, after ``limit_s`` at the latest."""
        started = time.perf_counter()
        task = self._tasks.create_task(values_of_coroutine(function, completion, arguments, count))
        deadline = started + limit_s
        try:
            while True:
                ended_tasks, _ = await asyncio.wait([task], timeout=deadline - time.perf_counter())
                if ended_tasks or time.perf_counter() - deadline <= _BLOCKED_S:
                    break
                deadline = time.perf_counter() + _BLOCKED_S  # the blocked loop did not run the task: extend its time
        finally:
            if not task.done():
                self._late.add(task)
                task.add_done_callback(self._late.discard)
                task.cancel()
        if task in self._late:
            values = failed(RewardFailureKind.TIMED_OUT, late_message(limit_s), count)
        elif task.cancelled():
            values = failed(RewardFailureKind.RAISED, "CancelledError: it was cancelled by itself", count)
        else:
            values, _ = task.result()
        return CallResult(values, time.perf_counter() - started, 0.0, limit_s)


async def close_functions(functions: Iterable[RewardFunction]) -> None:
    """Let built-in rewards release what they use: connections, a model, a sandbox."""
    async with asyncio.TaskGroup() as closing:
        for function in functions:
            if ":" not in function.signature.spec:  # versions share a user's function, so it is not closed
                closing.create_task(_close(function))


async def _close(function: RewardFunction) -> None:
    aclose = getattr(function.call, "aclose", None)
    if aclose is None:
        return
    try:
        await asyncio.wait_for(aclose(), _CLOSE_LIMIT_S)
    except Exception as error:  # noqa: BLE001 - the other rewards must be closed, too
        _log.warning("closing reward %s failed: %s: %s", function.signature.name, type(error).__name__, error)


_CLOCK_MONOTONIC = 1
_SIGEV_THREAD = 2
_STACKS_LEAD_S = 0.25  # time from the output of the stacks to the end of the process


class _SignalEvent(ctypes.Structure):
    """``struct sigevent`` of Linux (64 bytes): ``function(value)`` is called on expiry."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal_number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class ExitTimer:
    """Ends the process with ``exit_code`` unless ``rearm`` or ``disarm`` is called in time, even where Python cannot
    run.

    A regular expression that backtracks, or the power of a huge integer, holds the interpreter lock until it ends: no
    other Python thread runs. The POSIX timer calls the C library's ``_exit`` on a thread of the C library
    (``SIGEV_THREAD``, timer_create(2)). Shortly before, the stacks of all threads are written to stderr, so the log
    names the function that hung."""

    def __init__(self, exit_code: int) -> None:
        """Make the timer, disarmed. Raises ``OSError`` where the C library has no such timer (Linux has it)."""
        try:
            self._library = ctypes.CDLL(None, use_errno=True)
            exit_function = ctypes.cast(self._library._exit, ctypes.c_void_p).value
            create = self._library.timer_create
        except AttributeError as error:
            raise OSError("the C library has no POSIX timers") from error
        event = _SignalEvent(value=exit_code, notify=_SIGEV_THREAD, function=exit_function)
        self._timer = ctypes.c_void_p()
        if create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)) != 0:
            raise OSError(ctypes.get_errno(), "timer_create failed")

    def rearm(self, seconds: float) -> None:
        """End the process in ``seconds``, unless ``rearm`` or ``disarm`` is called before."""
        self._set(seconds)
        if sys.__stderr__ is not None and seconds > _STACKS_LEAD_S:
            faulthandler.dump_traceback_later(seconds - _STACKS_LEAD_S, file=sys.__stderr__)

    def disarm(self) -> None:
        """Stop the timer."""
        self._set(0.0)
        faulthandler.cancel_dump_traceback_later()

    def _set(self, seconds: float) -> None:
        full_seconds = int(seconds)
        value = _TimeSpec(full_seconds, int((seconds - full_seconds) * 1e9))
        if self._library.timer_settime(self._timer, 0, ctypes.byref(_TimerSpec(_TimeSpec(0, 0), value)), None) != 0:
            raise OSError(ctypes.get_errno(), "timer_settime failed")


def open_timer() -> ExitTimer | None:
    """Return a timer that ends the process with ``REWARD_RESTART_EXIT_CODE``, after which the supervisor starts another
    worker; None, with a warning: the system has no such timer."""
    try:
        return ExitTimer(REWARD_RESTART_EXIT_CODE)
    except OSError as error:
        _log.warning("no exit timer (%s): user code that blocks the loop cannot be stopped", error)
        return None
