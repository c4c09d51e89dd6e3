"""Calls of a user's sinks and observers. Each object has a thread of its own and a bounded queue before it, so that one
that blocks, fails or never returns neither ends nor delays the run: its errors and what it missed are counted."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from streamrl.base.errors import RecipeError
from streamrl.base.messages import WeightAnnouncement
from streamrl.base.run_events import RunWarning
from streamrl.base.stage_messages import RewardOutcome
from streamrl.base.types import ScoredTrajectory
from streamrl.contracts import Observer, PushReport
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
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
        self._target, self._name = target, name
        self._waiting: queue.Queue[Callable[[], Any] | None] = queue.Queue(MOST_WAITING)
        self._ended = threading.Event()
        self.errors = self.dropped = 0
        self.first_error = ""
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
        """Queue a call of ``last`` and wait until everything queued is done, at most ``CLOSE_S``."""
        self.call(last)
        with anyio.CancelScope(shield=True):
            ended = await anyio.to_thread.run_sync(self._end)
        if not ended or self.errors > 1 or self.dropped:
            state = "" if ended else f"did not return from its calls in {CLOSE_S:g} s; "
            log.warning("%s: %s%d errors, %d calls dropped", self._name, state, self.errors, self.dropped)

    def _end(self) -> bool:
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return False
        return self._ended.wait(CLOSE_S)

    def _run(self) -> None:
        with asyncio.Runner() as self._loop:
            while (call := self._waiting.get()) is not None:
                call()
        self._ended.set()

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        try:
            result = getattr(self._target, method)(*arguments, **named)
            if inspect.isawaitable(result):
                self._loop.run(_awaited(result))
        except BaseException as error:
            self.errors += 1
            if self.errors == 1:
                self.first_error = f"{self._name} failed in {method}: {describe_error(error)}"
                log.warning("%s; the run goes on, more errors of it are counted", self.first_error, exc_info=error)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def observer_class(spec: str) -> type[Observer]:
    """Import the class that ``spec`` names. Raises ``RecipeError`` where it is no observer that a run can make."""
    named = load_user_object(spec)
    if not isinstance(named, type) or not issubclass(named, Observer):
        raise RecipeError([f'"{spec}" is no class that inherits streamrl.contracts.Observer: name one'])
    if unused := {"prepare", "run"} & set(vars(named)):
        raise RecipeError([f'"{spec}" has {", ".join(sorted(unused))}, which is never called: use on_ methods and end'])
    try:
        inspect.signature(named).bind()
    except TypeError as error:
        raise RecipeError([f'"{spec}" is made without arguments, and needs some: {error}']) from error
    return named


def load_observer(spec: str) -> Observer:
    """Make an observer of the class that ``spec`` names. Raises ``RecipeError``."""
    named = observer_class(spec)
    try:
        return named()
    except Exception as error:
        raise RecipeError([f'run.observers: "{spec}" cannot be made: {describe_error(error)}: correct it']) from error


class UserObservers(Observer):
    """The observers that a recipe names. ``emit`` is given a warning of the first error of each."""

    def __init__(
        self, observers: Sequence[tuple[str, Observer]], emit: Callable[[RunWarning], Awaitable[None]]
    ) -> None:
        self._emit = emit
        self._unreported = [(UserCalls(observer, f"observer {name}"), type(observer)) for name, observer in observers]
        self._calls = list(self._unreported)
        self._step = 0

    def figures(self) -> dict[str, float]:
        """Metrics of what went wrong since the run began; none where nothing did."""
        figures = {
            "health/observer_errors_total": float(sum(calls.errors for calls, _ in self._calls)),
            "health/observer_calls_dropped_total": float(sum(calls.dropped for calls, _ in self._calls)),
        }
        return {name: value for name, value in figures.items() if value}

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """Pass the call on."""
        self._call("on_began", anchor)

    async def on_event(self, event: ControlEvent) -> None:
        """Pass the call on, and warn of a first error."""
        self._call("on_event", event)
        for one in [one for one in self._unreported if one[0].first_error]:
            self._unreported.remove(one)
            await self._emit(RunWarning(step=self._step, message=f"{one[0].first_error}; the run goes on"))

    async def on_action(self, action: ControlAction) -> None:
        """Pass the call on."""
        self._call("on_action", action)

    def on_outcome(self, outcome: RewardOutcome) -> None:
        """Pass the call on."""
        self._call("on_outcome", outcome)

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: dict[str, float]) -> None:
        """Pass the call on."""
        self._step = policy_version
        self._call("on_trained", policy_version, tuple(batch), dict(metrics))

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Pass the call on."""
        self._call("on_weights_live", push, last=last)

    async def on_progress(self) -> None:
        """Pass the call on."""
        self._call("on_progress")

    async def aclose(self) -> None:
        """End every observer: each has ``CLOSE_S`` for the calls that wait."""
        async with anyio.create_task_group() as closing:
            for calls, _ in self._calls:
                closing.start_soon(calls.aclose, "end")

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        for calls, kind in self._calls:
            if getattr(kind, method) is not getattr(Observer, method):  # else it would only fill the queue
                calls.call(method, *arguments, **named)
