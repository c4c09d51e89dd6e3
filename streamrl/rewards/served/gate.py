"""Sharing of devices between the actor's engines and a served model (judge, teacher): questions wait at a gate and are
admitted as a batch, after which the model rests.

``QuestionBatcher`` runs in the process of the model (``server``). ``admits`` is its decision, pure and without a clock.
The messages between the model and the controller (``link``) are here, too: the controller sends ``ActorLoad`` and
receives ``ModelReady`` and ``ModelReport``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from msgspec.structs import replace

from streamrl.base.messages import Message
from streamrl.base.notifier import Notifier
from streamrl.recipe.served_models import ServedModel, YieldKind


class ActorLoad(Message, frozen=True):
    """Load of the actor. ``share``: requests that its engines run or have waiting, as a share of the requests that they
    can run at once (0 to 1)."""

    share: float


class ModelReady(Message, frozen=True):
    """First message of a model to a controller, and again after a restart of either. The model answers questions from
    now on."""

    max_model_len: int


class ModelReport(Message, frozen=True):
    """Counters of a model since it was ready. ``questions``: admitted questions; ``batches``: number of times that the
    model was woken; ``waited_s``: seconds that all questions together waited to be admitted; ``awake_s``: seconds that
    the model was not at rest; ``waiting``: questions that wait now; ``inside``: questions that are being answered
    now."""

    questions: int = 0
    batches: int = 0
    waited_s: float = 0.0
    awake_s: float = 0.0
    waiting: int = 0
    inside: int = 0

    def after(self, past: ModelReport) -> ModelReport:
        """The report with the counters of a model before this one added."""
        counters = ("questions", "batches", "waited_s", "awake_s")
        return replace(self, **{name: getattr(self, name) + getattr(past, name) for name in counters})


ModelOrder = ActorLoad
ModelEvent = ModelReady | ModelReport


def admits(settings: ServedModel, waiting: int, oldest_s: float, *, actor: float, awake: bool) -> bool:
    """Return whether the waiting questions are admitted.

    ``waiting``: number of waiting questions; ``oldest_s``: seconds that the first of them has waited; ``actor``: load
    of the actor, 0 to 1; ``awake``: the batch before is still being answered, and the questions join it. A model that
    is never put to rest makes no batches."""
    if not waiting:
        return False
    if oldest_s >= settings.max_wait_s:
        return True
    joins = awake or settings.when_idle is YieldKind.NEVER
    return actor <= settings.actor_share and (joins or waiting >= settings.batch or oldest_s >= settings.batch_wait_s)


def next_check_s(settings: ServedModel, waiting: int, oldest_s: float) -> float | None:
    """Seconds after which the result of ``admits`` may change without a new question; None: never."""
    if not waiting:
        return None
    ahead = [moment - oldest_s for moment in (settings.batch_wait_s, settings.max_wait_s) if moment > oldest_s]
    return min(ahead, default=0.0)


class QuestionBatcher:
    """Gate of a model. ``wake``: called before the first question of a batch is admitted; ``put_to_rest``: called after
    the last one is answered. ``run`` must run as long as questions come."""

    def __init__(
        self, settings: ServedModel, wake: Callable[[], Awaitable[None]], put_to_rest: Callable[[], Awaitable[None]]
    ) -> None:
        self._settings = settings
        self._wake = wake
        self._put_to_rest = put_to_rest
        self._waiting: list[tuple[float, anyio.Event]] = []  # start of the wait, and event that admits the question
        self._inside = 0
        self._actor_load = 0.0
        self._awake_since: float | None = None
        self._changed = Notifier()
        self._questions = 0
        self._batches = 0
        self._waited_s = 0.0
        self._awake_s = 0.0

    @asynccontextmanager
    async def question(self) -> AsyncIterator[None]:
        """Wait until the question is admitted; the model answers it inside of the block. A caller may be cancelled
        while it waits."""
        admitted = anyio.Event()
        entry = (time.monotonic(), admitted)
        self._waiting.append(entry)
        self._changed.notify()
        try:
            await admitted.wait()
            yield
        finally:
            if admitted.is_set():
                self._inside -= 1
            else:
                self._waiting.remove(entry)
            self._changed.notify()

    def actor_runs(self, share: float) -> None:
        """Set the share of its capacity that the actor uses from now on."""
        if share != self._actor_load:
            self._actor_load = share
            self._changed.notify()

    def report(self) -> ModelReport:
        """Report the counters since the start."""
        awake_s = self._awake_s
        if self._awake_since is not None:
            awake_s += time.monotonic() - self._awake_since
        return ModelReport(
            questions=self._questions,
            batches=self._batches,
            waited_s=self._waited_s,
            awake_s=awake_s,
            waiting=len(self._waiting),
            inside=self._inside,
        )

    async def run(self) -> None:
        """Run until cancelled. The model rests at first. Raises exceptions of ``wake`` and ``put_to_rest``."""
        await self._put_to_rest()
        while True:
            oldest_s = time.monotonic() - self._waiting[0][0] if self._waiting else 0.0
            awake = self._awake_since is not None
            if admits(self._settings, len(self._waiting), oldest_s, actor=self._actor_load, awake=awake):
                await self._admit()
            elif awake and not self._inside:
                await self._end_batch()
            else:
                with anyio.move_on_after(next_check_s(self._settings, len(self._waiting), oldest_s)):
                    await self._changed.wait()

    async def _admit(self) -> None:
        if self._awake_since is None:
            await self._wake()
            self._awake_since = time.monotonic()
            self._batches += 1
        now = time.monotonic()
        for waiting_since, admitted in self._waiting:
            self._waited_s += now - waiting_since
            admitted.set()
        self._questions += len(self._waiting)
        self._inside += len(self._waiting)
        self._waiting = []

    async def _end_batch(self) -> None:
        await self._put_to_rest()
        if self._awake_since is not None:
            self._awake_s += time.monotonic() - self._awake_since
            self._awake_since = None
