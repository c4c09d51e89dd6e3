"""One call of a user's reward function: with a time limit, and with an end whatever the function does.

Nothing that a function does comes out of ``CallRunner.call`` as an exception: it is a value or a ``CallFailure``.
What cannot be stopped (a thread, a coroutine that swallows its cancellation) is left behind and counted.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from streamrl.rewards.signature import RewardFunction
from streamrl.types import RewardFailureKind
from streamrl.user_code import describe_error


class CallFailure(msgspec.Struct, frozen=True):
    """Why a call gave no value."""

    kind: RewardFailureKind
    message: str


class CallResult(msgspec.Struct, frozen=True):
    """What a function returned (``value``, unchecked), or the failure. ``seconds``: wall time of the function."""

    value: Any = None
    failure: CallFailure | None = None
    seconds: float = 0.0


class _Call:
    """A call that was started. ``in_thread``: a thread is inside the user's function; ``late``: past its limit."""

    def __init__(self) -> None:
        self.in_thread = False
        self.late = False
        self.task: asyncio.Task[CallResult] | None = None

    @property
    def running(self) -> bool:
        return self.in_thread or (self.task is not None and not self.task.done())


class CallRunner:
    """Runs calls, at most ``concurrency`` at once. Coroutines run on the loop, other functions in threads.

    ``tasks`` must live as long as the worker: a coroutine that swallows its cancellation stays in it, and would
    otherwise keep the scoring of its group from ending.
    """

    def __init__(self, tasks: asyncio.TaskGroup, concurrency: int) -> None:
        self._tasks = tasks
        self._slots = asyncio.Semaphore(concurrency)
        # The slots bound the calls; a thread that was left behind must not take the place of a new one.
        self._threads = anyio.CapacityLimiter(math.inf)
        self._calls: set[_Call] = set()

    @property
    def stuck(self) -> int:
        """Calls past their time limit that still run."""
        return sum(call.late for call in self._running_calls())

    @property
    def busy(self) -> int:
        """Calls that still run, late or not."""
        return len(self._running_calls())

    def _running_calls(self) -> set[_Call]:
        self._calls = {call for call in self._calls if call.running}
        return self._calls

    async def call(
        self, function: RewardFunction, time_limit_s: float, completion: str | list[str], arguments: Mapping[str, Any]
    ) -> CallResult:
        """Call ``function(completion, **arguments)``. A value that comes after ``time_limit_s`` is a failure too."""
        async with self._slots:
            call = _Call()
            started = time.monotonic()
            bound = functools.partial(function.call, completion, **arguments)
            running = _run(call, bound, self._threads, is_async=function.signature.is_async)
            call.task = self._tasks.create_task(running, name=f"reward {function.name}")
            self._calls.add(call)
            # wait(), unlike timeout(), returns although the task swallows its cancellation.
            done, _ = await asyncio.wait({call.task}, timeout=time_limit_s)
            seconds = time.monotonic() - started
            if done and call.task.cancelled():
                failure = CallFailure(RewardFailureKind.RAISED, "CancelledError: it was cancelled by itself")
                return CallResult(failure=failure, seconds=seconds)
            if done and call.task.result().seconds <= time_limit_s:
                self._calls.discard(call)
                return call.task.result()
            call.late = True
            call.task.cancel()
            message = f"gave no reward within its time limit of {time_limit_s:g} s"
            return CallResult(failure=CallFailure(RewardFailureKind.TIMED_OUT, message), seconds=seconds)


async def _run(call: _Call, bound: Callable[[], Any], threads: anyio.CapacityLimiter, *, is_async: bool) -> CallResult:
    started = time.monotonic()
    if is_async:
        result = await _await_user(bound)
    else:
        call.in_thread = True
        result = await anyio.to_thread.run_sync(_run_in_thread, call, bound, abandon_on_cancel=True, limiter=threads)
        if inspect.isawaitable(result.value):  # a decorator that hides an async function
            pending = result.value
            result = await _await_user(lambda: pending)
    return msgspec.structs.replace(result, seconds=time.monotonic() - started)


def _run_in_thread(call: _Call, bound: Callable[[], Any]) -> CallResult:
    try:
        return CallResult(value=bound())
    except BaseException as error:  # noqa: BLE001 - SystemExit of a user's function is a failed reward, not our end
        return _raised(error)
    finally:
        call.in_thread = False


async def _await_user(start: Callable[[], Awaitable[Any]]) -> CallResult:
    try:
        return CallResult(value=await start())
    except asyncio.CancelledError:
        raise  # by us (the limit is over, the worker ends) or by itself: ``call`` sees which
    except BaseException as error:  # noqa: BLE001 - SystemExit of a user's coroutine is a failed reward, not our end
        return _raised(error)


def _raised(error: BaseException) -> CallResult:
    return CallResult(failure=CallFailure(RewardFailureKind.RAISED, describe_error(error)))
