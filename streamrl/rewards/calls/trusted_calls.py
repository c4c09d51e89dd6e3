"""Calls of functions that the recipe trusts: in this process, coroutines on its loop, others at once.

Nothing that they do comes out as an exception. A coroutine that swallows its cancellation is left behind and counted;
one that blocks the loop ends the process (``ExitTimer``).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from typing import NamedTuple

from streamrl.base.types import RewardFailureKind
from streamrl.rewards.calls.call_child import PoolCall
from streamrl.rewards.calls.call_process import describe_raised, late_message
from streamrl.rewards.signature import RewardFunction
from streamrl.rewards.values import CallResult, CheckedValue, check_returned, failed

_CLOSE_LIMIT_S = 1.0
_HELD_S = 0.25  # a loop that turns so late was held

_log = logging.getLogger(__name__)


class _Begun(NamedTuple):
    call: PoolCall
    started: float
    late_at: float


class TrustedCalls:
    """``tasks`` must live as long as the worker: what swallows its cancellation stays in it."""

    def __init__(self, tasks: asyncio.TaskGroup, functions: dict[int, RewardFunction]) -> None:
        self._tasks = tasks
        self._functions = functions
        self._running: dict[asyncio.Task[tuple[CheckedValue, ...]], _Begun] = {}
        self._late: set[asyncio.Task[tuple[CheckedValue, ...]]] = set()
        self._looking: asyncio.TimerHandle | None = None
        self._looks_at = math.inf

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

    async def aclose(self) -> None:
        """Let built-in rewards give back what they hold: connections, a model, a sandbox. Idempotent."""
        async with asyncio.TaskGroup() as closing:
            for function in self._functions.values():
                closing.create_task(_give_back(function))
        self._functions = {}

    def _await(self, call: PoolCall, function: RewardFunction, started: float) -> None:
        task = self._tasks.create_task(_run(call, function))
        self._running[task] = _Begun(call, started, started + call.limit_s)
        task.add_done_callback(self._ended)
        self._look_at(started + call.limit_s)

    def _ended(self, task: asyncio.Task[tuple[CheckedValue, ...]]) -> None:
        begun = self._running.pop(task, None)
        if begun is None:  # it was late
            return
        if task.cancelled():
            message = "CancelledError: it was cancelled by itself"
            values = failed(RewardFailureKind.RAISED, message, begun.call.count)
        else:
            values = task.result()
        _finish(begun.call, values, time.perf_counter() - begun.started)

    def _look_at(self, at: float) -> None:
        """One timer for all calls, set for the first that may be late: most end long before."""
        if at < self._looks_at:
            if self._looking is not None:
                self._looking.cancel()
            self._looks_at = at
            self._looking = asyncio.get_running_loop().call_later(at - time.perf_counter(), self._look)

    def _look(self) -> None:
        now = time.perf_counter()
        held_s = now - self._looks_at
        self._looking, self._looks_at = None, math.inf
        if held_s > _HELD_S:
            # By an import, or by one of them: the others could not go on, and take now what they waited for.
            for task, begun in self._running.items():
                self._running[task] = begun._replace(late_at=begun.late_at + held_s + _HELD_S)
        late = [task for task, begun in self._running.items() if begun.late_at <= now]
        for task in late:
            call, started, _ = self._running.pop(task)
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            task.cancel()
            _finish(call, failed(RewardFailureKind.TIMED_OUT, late_message(call.limit_s), call.count), now - started)
        if self._running:
            self._look_at(min(begun.late_at for begun in self._running.values()))


async def _give_back(function: RewardFunction) -> None:
    aclose = getattr(function.call, "aclose", None)
    if aclose is None or ":" in function.signature.spec:  # a user's function is one for all versions
        return
    try:
        await asyncio.wait_for(aclose(), _CLOSE_LIMIT_S)
    except Exception as error:  # noqa: BLE001 - it is over with this reward, and others go on
        _log.warning("closing reward %s failed: %s: %s", function.name, type(error).__name__, error)


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
