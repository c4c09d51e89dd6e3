"""Calls of functions that the recipe trusts: in this process, coroutines on its loop, others at once.

Nothing that they do comes out as an exception. A coroutine that swallows its cancellation is left behind and counted;
one that blocks the loop ends the process (``ExitTimer``).
"""

from __future__ import annotations

import asyncio
import inspect
import time

from streamrl.rewards.call_child import PoolCall
from streamrl.rewards.call_process import describe_raised, late_message
from streamrl.rewards.signature import RewardFunction
from streamrl.rewards.values import CallResult, CheckedValue, check_returned, failed
from streamrl.types import RewardFailureKind


class TrustedCalls:
    """``tasks`` must live as long as the worker: what swallows its cancellation stays in it."""

    def __init__(self, tasks: asyncio.TaskGroup, functions: dict[int, RewardFunction]) -> None:
        self._tasks = tasks
        self._functions = functions
        self._late: set[asyncio.Task[tuple[CheckedValue, ...]]] = set()

    @property
    def stuck(self) -> int:
        """Coroutines past their limit that still run."""
        return len(self._late)

    def submit(self, call: PoolCall) -> None:
        """``call.on_done`` is called once, now or later."""
        started = time.perf_counter()
        function = self._functions[call.function]
        if function.signature.is_async:
            self._await(call, function, started)
            return
        try:
            returned = function.call(call.completion, **call.arguments)
            if inspect.isawaitable(returned):
                message = "returned an awaitable: write async def, or trusted = false"
                if inspect.iscoroutine(returned):
                    returned.close()
                values = failed(RewardFailureKind.WRONG_TYPE, message, call.count)
            else:
                values = check_returned(returned, call.count, per_group=function.signature.per_group)
        except BaseException as error:  # noqa: BLE001 - SystemExit of a user's function is a failed reward, not our end
            values = (describe_raised(error),) * call.count
        seconds = time.perf_counter() - started
        if seconds > call.limit_s:
            values = failed(RewardFailureKind.TIMED_OUT, late_message(call.limit_s), call.count)
        _finish(call, values, seconds)

    def _await(self, call: PoolCall, function: RewardFunction, started: float) -> None:
        task = self._tasks.create_task(_run(call, function))

        def too_late() -> None:
            task.remove_done_callback(ended)
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            task.cancel()
            values = failed(RewardFailureKind.TIMED_OUT, late_message(call.limit_s), call.count)
            _finish(call, values, time.perf_counter() - started)

        timer = asyncio.get_running_loop().call_later(call.limit_s, too_late)

        def ended(task: asyncio.Task[tuple[CheckedValue, ...]]) -> None:
            timer.cancel()
            if task.cancelled():
                message = "CancelledError: it was cancelled by itself"
                values = failed(RewardFailureKind.RAISED, message, call.count)
            else:
                values = task.result()
            _finish(call, values, time.perf_counter() - started)

        task.add_done_callback(ended)


async def _run(call: PoolCall, function: RewardFunction) -> tuple[CheckedValue, ...]:
    try:
        returned = await function.call(call.completion, **call.arguments)
        return check_returned(returned, call.count, per_group=function.signature.per_group)
    except asyncio.CancelledError:
        raise  # by us, or by itself: the callback sees which
    except BaseException as error:  # noqa: BLE001 - SystemExit of a user's coroutine is a failed reward, not our end
        return (describe_raised(error),) * call.count


def _finish(call: PoolCall, values: tuple[CheckedValue, ...], seconds: float) -> None:
    waited = max(time.monotonic() - call.asked_at - seconds, 0.0)
    call.on_done(CallResult(values, seconds, waited, call.limit_s))
