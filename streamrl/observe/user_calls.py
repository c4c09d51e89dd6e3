"""Calls of a user's sinks and observers. Each object has a thread of its own and a bounded queue before it, so that one
that blocks, fails or never returns neither ends nor delays the run: its errors and the calls that it missed are
counted."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from streamrl.base.errors import RecipeError
from streamrl.contracts import Observer
from streamrl.recipe.user_code import describe_error, load_user_object

MOST_WAITING = 4096
"""Calls that wait for one object; those beyond are dropped."""
CLOSE_S = 10.0
"""How long the end of a run waits for calls that are not made yet."""

log = logging.getLogger(__name__)


class UserCalls:
    """Calls the methods of ``target`` one at a time, in order, in a thread; those that return an awaitable on an event
    loop of that thread. ``name`` is for messages."""

    def __init__(self, target: object, name: str) -> None:
        self._target = target
        self._name = name
        self._waiting: queue.Queue[Callable[[], Any] | None] = queue.Queue(MOST_WAITING)
        self._ended = threading.Event()
        self.errors = 0
        self.dropped = 0
        threading.Thread(target=self._run, name=f"calls of {name}", daemon=True).start()

    def call(self, method: str, *arguments: Any, **named: Any) -> None:
        """Queue a call. Returns at once; a call that finds the queue full is dropped and counted."""
        try:
            self._waiting.put_nowait(partial(self._call, method, *arguments, **named))
        except queue.Full:
            if not self.dropped:
                log.warning("%s is %d calls behind: more are dropped and counted", self._name, MOST_WAITING)
            self.dropped += 1

    async def aclose(self, last: str) -> None:
        """Wait until everything queued and a call of ``last`` is done, at most ``CLOSE_S``."""
        self._last = last
        with anyio.CancelScope(shield=True):
            ended = await anyio.to_thread.run_sync(self._end)
        if not ended or self.errors > 1 or self.dropped:
            state = "" if ended else f"did not return from its calls in {CLOSE_S:g} s; "
            log.warning("%s: %s%d errors, %d calls dropped", self._name, state, self.errors, self.dropped)

    def _end(self) -> bool:
        until = time.monotonic() + CLOSE_S
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return False
        return self._ended.wait(until - time.monotonic())

    def _run(self) -> None:
        with asyncio.Runner() as self._loop:
            while (call := self._waiting.get()) is not None:
                call()
            self._call(self._last)
        self._ended.set()

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        try:
            result = getattr(self._target, method)(*arguments, **named)
            if inspect.isawaitable(result):
                self._loop.run(_awaited(result))
        except BaseException as error:
            self.errors += 1
            if self.errors == 1:
                failure = f"{self._name} failed in {method}: {describe_error(error)}"
                log.warning("%s; the run goes on, more errors of it are counted", failure, exc_info=error)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


async def close_all(calls: Sequence[UserCalls], last: str) -> None:
    """Close all at once: each has ``CLOSE_S``."""
    async with anyio.create_task_group() as closing:
        for one in calls:
            closing.start_soon(one.aclose, last)


def observer_class(spec: str) -> type[Observer]:
    """Import the class that ``spec`` names. Raises ``RecipeError`` where it is no observer that a run can make."""
    named = load_user_object(spec)
    if not isinstance(named, type) or not issubclass(named, Observer):
        raise RecipeError(f'"{spec}" is no class that inherits streamrl.contracts.Observer: name one')
    if unused := {"prepare", "run"} & set(vars(named)):
        raise RecipeError(f'"{spec}" has {", ".join(sorted(unused))}, which is never called: use on_ methods and end')
    try:
        inspect.signature(named).bind()
    except TypeError as error:
        raise RecipeError(f'"{spec}" is made without arguments, and needs some: {error}') from error
    return named


class UserObserver(Observer):
    """An observer of the class that ``spec`` names, on a thread of its own: the ``on_`` methods that the class has
    queue a call, the others do nothing. ``calls.aclose("end")`` ends it. Raises ``RecipeError``."""

    def __init__(self, spec: str) -> None:
        named = observer_class(spec)
        try:
            self.calls = UserCalls(named(), f"observer {spec}")
        except Exception as error:
            problem = f'run.advanced.observers: "{spec}" cannot be made: {describe_error(error)}: correct it'
            raise RecipeError(problem) from error
        for name, method in vars(Observer).items():
            if name.startswith("on_") and getattr(named, name) is not method:
                call = partial(self.calls.call, name)
                setattr(self, name, partial(_queued, call) if inspect.iscoroutinefunction(method) else call)


async def _queued(call: Callable[..., None], *arguments: Any, **named: Any) -> None:
    call(*arguments, **named)


def observer_figures(observers: Sequence[UserObserver]) -> dict[str, float]:
    """Metrics of errors and dropped calls since the run began; none where there were none."""
    errors, dropped = (sum(getattr(one.calls, kind) for one in observers) for kind in ("errors", "dropped"))
    figures = {"health/observer_errors_total": errors, "health/observer_calls_dropped_total": dropped}
    return {name: float(value) for name, value in figures.items() if value}
