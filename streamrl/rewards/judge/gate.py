"""Sharing of devices between the actor and a judge beside it: questions wait at a gate and are admitted as a batch,
after which the judge rests. ``admits`` decides and has no clock; ``JudgeBatcher`` holds the callers and carries it out.
The controller sends ``ActorLoad``, and gets ``JudgeReady`` and ``JudgeReport``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from msgspec import structs

from streamrl.base.messages import Message
from streamrl.base.notifier import Notifier
from streamrl.recipe.judge import Judge, YieldKind


class ActorLoad(Message, frozen=True):
    """``share``: of what the actor's engines can run at once, how much they run or have waiting (0 to 1)."""

    share: float


class JudgeReady(Message, frozen=True):
    """First message of a judge to a controller (again after a restart of either): it answers questions."""

    max_model_len: int


class JudgeReport(Message, frozen=True):
    """Counters of a judge since it was ready. ``batches``: times it was woken, or began again with no question inside.
    ``waited_s``: seconds that questions waited to be admitted, together; ``awake_s``: seconds that it was not at rest.
    ``waiting``, ``inside``: questions that wait, and that it is answering."""

    questions: int = 0
    batches: int = 0
    waited_s: float = 0.0
    awake_s: float = 0.0
    waiting: int = 0
    inside: int = 0

    def after(self, past: JudgeReport) -> JudgeReport:
        """The report with the counters of a judge before this one added."""
        counters = ("questions", "batches", "waited_s", "awake_s")
        return structs.replace(self, **{name: getattr(self, name) + getattr(past, name) for name in counters})


JudgeOrder = ActorLoad
JudgeEvent = JudgeReady | JudgeReport


def admits(judge: Judge, waiting: int, oldest_s: float, *, actor: float, awake: bool) -> bool:
    """Return whether those that wait may go in. ``oldest_s``: for how long the first has waited; ``awake``: the batch
    before is still being answered, and they join it. A judge that is never idle makes no batches."""
    if not waiting:
        return False
    if oldest_s >= judge.max_wait_s:
        return True
    joins = awake or judge.when_idle is YieldKind.NEVER
    return actor <= judge.actor_share and (joins or waiting >= judge.batch or oldest_s >= judge.batch_wait_s)


def next_check_s(judge: Judge, waiting: int, oldest_s: float) -> float | None:
    """Seconds after which time alone may change the answer; None: never."""
    if not waiting:
        return None
    ahead = [moment - oldest_s for moment in (judge.batch_wait_s, judge.max_wait_s) if moment > oldest_s]
    return min(ahead, default=0.0)


class JudgeBatcher:
    """``wake`` comes before the first of a batch is let in, ``rest`` after the last has left. ``run`` beside it all."""

    def __init__(self, judge: Judge, wake: Callable[[], Awaitable[None]], rest: Callable[[], Awaitable[None]]) -> None:
        self._judge = judge
        self._wake = wake
        self._rest = rest
        self._waiting: list[tuple[float, anyio.Event]] = []  # since when, and what lets it in
        self._inside = 0
        self._actor = 0.0
        self._awake_since: float | None = None
        self._changed = Notifier()
        self._questions = 0
        self._batches = 0
        self._waited_s = 0.0
        self._awake_s = 0.0

    @asynccontextmanager
    async def question(self) -> AsyncIterator[None]:
        """The judge answers inside. A caller that gives up while it waits leaves no trace."""
        asked = (time.monotonic(), anyio.Event())
        self._waiting.append(asked)
        self._changed.notify()
        try:
            await asked[1].wait()
            yield
        finally:
            if asked[1].is_set():
                self._inside -= 1
            else:
                self._waiting.remove(asked)
            self._changed.notify()

    def actor_runs(self, share: float) -> None:
        """Set the share of its capacity that the actor uses from now on."""
        if share != self._actor:
            self._actor = share
            self._changed.notify()

    def report(self) -> JudgeReport:
        """Report the counters since the start."""
        awake_s = self._awake_s
        if self._awake_since is not None:
            awake_s += time.monotonic() - self._awake_since
        return JudgeReport(
            questions=self._questions,
            batches=self._batches,
            waited_s=self._waited_s,
            awake_s=awake_s,
            waiting=len(self._waiting),
            inside=self._inside,
        )

    async def run(self) -> None:
        """Run until cancelled. The judge rests at first. Exceptions of ``wake`` and ``rest`` are raised here."""
        await self._rest()
        while True:
            oldest_s = time.monotonic() - self._waiting[0][0] if self._waiting else 0.0
            awake = self._awake_since is not None
            if admits(self._judge, len(self._waiting), oldest_s, actor=self._actor, awake=awake):
                await self._admit()
            elif awake and not self._inside:
                await self._put_to_rest()
            else:
                with anyio.move_on_after(next_check_s(self._judge, len(self._waiting), oldest_s)):
                    await self._changed.wait()

    async def _admit(self) -> None:
        if self._awake_since is None:
            await self._wake()
            self._awake_since = time.monotonic()
            self._batches += 1
        now = time.monotonic()
        for since, let_in in self._waiting:
            self._waited_s += now - since
            let_in.set()
        self._questions += len(self._waiting)
        self._inside += len(self._waiting)
        self._waiting = []

    async def _put_to_rest(self) -> None:
        await self._rest()
        if self._awake_since is not None:
            self._awake_s += time.monotonic() - self._awake_since
            self._awake_since = None
