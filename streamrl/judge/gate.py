"""When a judge beside the actor is awake: questions wait at a gate, are let in as a batch, and it rests after them.

``GatePolicy`` decides and has no clock; ``JudgeGate`` holds the callers and carries it out. The controller sends
``ActorLoad``, and gets ``JudgeReady`` and ``JudgeReport``.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec

from streamrl.base.messages import Message
from streamrl.recipe.judge import Judge, YieldKind


class ActorLoad(Message, frozen=True):
    """``share``: of what the actor's engines can run at once, how much they run or have waiting (0 to 1)."""

    share: float


class JudgeReady(Message, frozen=True):
    """First message of a judge to a controller (again after a restart of either): it answers questions."""

    max_model_len: int


class JudgeReport(Message, frozen=True):
    """What a judge did since it said that it is ready, and what it does now. ``batches``: times it was woken, or began
    again with nobody inside. ``waited_s``: seconds that questions waited to be let in, together; ``awake_s``: that it
    was not at rest. ``waiting``, ``inside``: questions that wait, and that it is answering."""

    questions: int = 0
    batches: int = 0
    waited_s: float = 0.0
    awake_s: float = 0.0
    waiting: int = 0
    inside: int = 0

    def after(self, past: JudgeReport) -> JudgeReport:
        """The report with the counters of a judge before this one added."""
        return JudgeReport(
            questions=self.questions + past.questions,
            batches=self.batches + past.batches,
            waited_s=self.waited_s + past.waited_s,
            awake_s=self.awake_s + past.awake_s,
            waiting=self.waiting,
            inside=self.inside,
        )


JudgeOrder = ActorLoad
JudgeEvent = JudgeReady | JudgeReport


class GatePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """``batch`` questions, or one that has waited for ``batch_wait_s``, make a batch; it begins while the actor runs at
    most ``actor_share`` of what it can, or when a question has waited for ``max_wait_s``."""

    batch: int
    batch_wait_s: float
    actor_share: float
    max_wait_s: float

    def lets_in(self, waiting: int, oldest_s: float, *, actor: float, awake: bool) -> bool:
        """Whether those that wait may go in. ``oldest_s``: for how long the first has waited; ``awake``: the batch
        before is still being answered, and they join it."""
        if not waiting:
            return False
        if oldest_s >= self.max_wait_s:
            return True
        return actor <= self.actor_share and (awake or waiting >= self.batch or oldest_s >= self.batch_wait_s)

    def look_again_s(self, waiting: int, oldest_s: float) -> float | None:
        """Seconds after which time alone may change the answer; None: never."""
        if not waiting:
            return None
        ahead = [moment - oldest_s for moment in (self.batch_wait_s, self.max_wait_s) if moment > oldest_s]
        return min(ahead, default=0.0)


def gate_policy(judge: Judge) -> GatePolicy:
    """That of a recipe. A judge that never yields lets every question in while the actor leaves it room."""
    yields = judge.when_idle is not YieldKind.NEVER
    return GatePolicy(
        batch=judge.batch if yields else 1,
        batch_wait_s=judge.batch_wait_s if yields else 0.0,
        actor_share=judge.actor_share,
        max_wait_s=judge.max_wait_s,
    )


class _Question:
    def __init__(self, since: float) -> None:
        self.since = since
        self.let_in = anyio.Event()


class JudgeGate:
    """``wake`` comes before the first of a batch is let in, ``rest`` after the last has left. ``run`` beside it all."""

    def __init__(
        self,
        policy: GatePolicy,
        wake: Callable[[], Awaitable[None]],
        rest: Callable[[], Awaitable[None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._wake = wake
        self._rest = rest
        self._clock = clock
        self._waiting: list[_Question] = []
        self._inside = 0
        self._actor = 0.0
        self._awake_since: float | None = None
        self._changed = anyio.Event()
        self._questions = self._batches = 0
        self._waited_s = self._awake_s = 0.0

    @asynccontextmanager
    async def question(self) -> AsyncIterator[None]:
        """The judge answers inside. A caller that gives up while it waits leaves no trace."""
        asked = _Question(self._clock())
        self._waiting.append(asked)
        self._notify()
        try:
            await asked.let_in.wait()
            yield
        finally:
            if asked.let_in.is_set():
                self._inside -= 1
            else:
                self._waiting.remove(asked)
            self._notify()

    def actor_runs(self, share: float) -> None:
        """What share of its capacity the actor uses from now on."""
        if share != self._actor:
            self._actor = share
            self._notify()

    def report(self) -> JudgeReport:
        """What happened so far."""
        awake_s = self._awake_s
        if self._awake_since is not None:
            awake_s += self._clock() - self._awake_since
        return JudgeReport(
            questions=self._questions,
            batches=self._batches,
            waited_s=self._waited_s,
            awake_s=awake_s,
            waiting=len(self._waiting),
            inside=self._inside,
        )

    async def run(self) -> None:
        """Until cancelled. The judge rests at first. What ``wake`` and ``rest`` raise comes out of here."""
        await self._rest()
        while True:
            changed = self._changed
            oldest_s = self._clock() - self._waiting[0].since if self._waiting else 0.0
            awake = self._awake_since is not None
            if self._policy.lets_in(len(self._waiting), oldest_s, actor=self._actor, awake=awake):
                await self._let_in()
            elif awake and not self._inside:
                await self._put_to_rest()
            else:
                look_again_s = self._policy.look_again_s(len(self._waiting), oldest_s)
                with anyio.move_on_after(look_again_s):
                    await changed.wait()

    async def _let_in(self) -> None:
        if self._awake_since is None:
            await self._wake()
            self._awake_since = self._clock()
            self._batches += 1
        now = self._clock()
        for asked in self._waiting:
            self._waited_s += now - asked.since
            asked.let_in.set()
        self._questions += len(self._waiting)
        self._inside += len(self._waiting)
        self._waiting = []

    async def _put_to_rest(self) -> None:
        await self._rest()
        if self._awake_since is not None:
            self._awake_s += self._clock() - self._awake_since
            self._awake_since = None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
