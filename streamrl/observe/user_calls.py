"""Calls of the sinks and observers of a user. Each object has its own thread and a bounded queue, so that an object
that blocks, fails or never returns neither ends nor delays the run: its errors and its dropped calls are counted.

``Pipeline`` (``launch/pipeline.py``) calls the user's sinks in the process of its caller. The controller
(``launch/run_controller.py``) calls the observers of ``run.advanced.observers`` in its own process."""

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
from anyio import to_thread

from streamrl.base.errors import RecipeError
from streamrl.base.types import Metrics
from streamrl.contracts import Observer
from streamrl.recipe.user_code import describe_error, load_user_object

MOST_WAITING = 4096
"""Calls that wait for one object. Further calls are dropped."""
CLOSE_S = 10.0
"""Seconds that the end of a run waits for queued calls."""

log = logging.getLogger(__name__)


class UserCalls:
    """Calls the methods of ``target`` one at a time, in order, in a thread. An awaitable that a method returns is
    awaited on the event loop of the thread. ``name``: name of the target in messages."""

    def __init__(self, target: object, name: str) -> None:
        self._target = target
        self._name = name
        self._waiting: queue.Queue[Callable[[], Any] | None] = queue.Queue(MOST_WAITING)
        self._all_done = threading.Event()
        self.errors = 0
        self.dropped = 0
        threading.Thread(target=self._run, name=f"calls of {name}", daemon=True).start()

    def call(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Queue a call and return at once. Where the queue is full the call is dropped and counted."""
        try:
            self._waiting.put_nowait(partial(self._call, method, *arguments, **keywords))
        except queue.Full:
            if not self.dropped:
                log.warning("%s is %d calls behind: more are dropped and counted", self._name, MOST_WAITING)
            self.dropped += 1

    async def aclose(self, last: str) -> None:
        """Wait for the queued calls and a call of the method ``last``, at most ``CLOSE_S``."""
        self._last = last
        with anyio.CancelScope(shield=True):
            all_done = await to_thread.run_sync(self._end)
        if not all_done or self.errors > 1 or self.dropped:
            state = ""
            if not all_done:
                state = f"did not return from its calls in {CLOSE_S:g} s; "
            log.warning("%s: %s%d errors, %d calls dropped", self._name, state, self.errors, self.dropped)

    def _end(self) -> bool:
        """Queue the end, and return whether all calls were done in time."""
        until = time.monotonic() + CLOSE_S
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return False
        return self._all_done.wait(until - time.monotonic())

    def _run(self) -> None:
        with asyncio.Runner() as self._loop:
            while (call := self._waiting.get()) is not None:
                call()
            self._call(self._last)
        self._all_done.set()

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> None:
        try:
            result = getattr(self._target, method)(*arguments, **keywords)
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
    """Close all targets concurrently. Each one has ``CLOSE_S`` to finish its calls."""
    async with anyio.create_task_group() as closing:
        for target in calls:
            closing.start_soon(target.aclose, last)


def observer_class(spec: str) -> type[Observer]:
    """Import the class that ``spec`` names. Raises ``RecipeError`` where a run cannot make an observer of it."""
    loaded = load_user_object(spec)
    if not isinstance(loaded, type) or not issubclass(loaded, Observer):
        raise RecipeError(f'"{spec}" is no class that inherits streamrl.contracts.Observer: name one')
    if unused := {"prepare", "run"} & set(vars(loaded)):
        raise RecipeError(f'"{spec}" has {", ".join(sorted(unused))}, which is never called: use on_ methods and end')
    try:
        inspect.signature(loaded).bind()
    except TypeError as error:
        raise RecipeError(f'"{spec}" is made without arguments, and needs some: {error}') from error
    return loaded


class UserObserver(Observer):
    """An observer of the class that ``spec`` names, with its own thread. The ``on_`` methods that the class overrides
    queue a call, the others do nothing. ``calls.aclose("end")`` ends the observer. Raises ``RecipeError``."""

    def __init__(self, spec: str) -> None:
        loaded = observer_class(spec)
        try:
            self.calls = UserCalls(loaded(), f"observer {spec}")
        except Exception as error:
            problem = f'run.advanced.observers: "{spec}" cannot be made: {describe_error(error)}: correct it'
            raise RecipeError(problem) from error
        for name, method in vars(Observer).items():
            if name.startswith("on_") and getattr(loaded, name) is not method:
                call = partial(self.calls.call, name)
                setattr(self, name, partial(_queued, call) if inspect.iscoroutinefunction(method) else call)


async def _queued(call: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
    call(*arguments, **keywords)


def observer_figures(observers: Sequence[UserObserver]) -> Metrics:
    """Return metrics of errors and dropped calls since the run began, without those that are zero."""
    errors = sum(observer.calls.errors for observer in observers)
    dropped = sum(observer.calls.dropped for observer in observers)
    figures = {"health/observer_errors_total": errors, "health/observer_calls_dropped_total": dropped}
    return {name: float(value) for name, value in figures.items() if value}
