"""Parts that a controller is given: each is made in ``launch``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
from anyio.abc import TaskGroup

from streamrl.base.errors import RecipeError
from streamrl.base.messages import WeightAnnouncement
from streamrl.base.stage_messages import EndedOutcome, RewardOutcome, RolloutOrder
from streamrl.base.types import Prompt, ScoredTrajectory
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.stream import SendStream
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.machine import Control


class PromptSource(Protocol):
    """Source of prompts; fewer than asked for means that it is exhausted."""

    async def draw(self, count: int) -> list[Prompt]: ...


class Push(Protocol):
    """Result of a weight push."""

    @property
    def policy_version(self) -> int: ...


class WeightPush(Protocol):
    """Makes versions live on the engines. ``on_version_left``: called where no engine holds the live one any more."""

    on_version_left: Callable[[], object]

    async def push(self, announced: WeightAnnouncement) -> Push: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


class Journal:
    """The log that a run resumes from: called before control gets to know of what happened. ``settled`` returns when
    everything so far is on the disk. This one writes nothing: a run that ends early is begun again."""

    async def begin(self, control: Control) -> None: ...

    def on_event(self, event: ControlEvent, control: Control) -> None: ...

    def drawn(self, prompts: Sequence[Prompt]) -> None: ...

    def scored(self, scored: ScoredTrajectory) -> None: ...

    def published(self, policy_version: int, state_hash: int) -> None: ...

    async def settled(self) -> None: ...


class Evaluations:
    """Held-out runs, one at a time. ``begin`` returns at once; ``run`` when all of it has ended, with what then stores
    it. ``cancel`` does nothing where none runs; ``why``: a warning says so. These are of a recipe without held-out
    prompts: control orders none."""

    def begin(self, policy_version: int, limit: int) -> None: ...

    async def run(self, orders: SendStream[RolloutOrder]) -> Callable[[], Awaitable[None]]:
        raise RecipeError(["evaluation.prompts: this run has no held-out runs"])

    def take(self, outcome: EndedOutcome) -> None: ...

    async def cancel(self, orders: SendStream[RolloutOrder], why: str = "") -> None: ...

    async def warn_cancelled(self, policy_version: int, why: str) -> None: ...


class Observer:
    """Base class of observers, which are called with what happens in a run. Every method does nothing until it is
    overridden. ``run`` is a task of its own from the first live version until ``end``; with ``notify`` an observer
    sends events to control."""

    async def run(self, notify: Callable[[ControlEvent], None]) -> None:
        """Run beside the rounds until ``end`` is called."""

    def end(self) -> None:
        """End ``run``: the last round is over."""

    async def prepare(self) -> None:
        """Prepare: nothing is published or sampled before this returns."""

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """Called once, when the first version of this controller is live on every engine."""

    async def on_event(self, event: ControlEvent) -> None:
        """Called with each event after it is journalled and before control handles it."""

    async def on_action(self, action: ControlAction, beside: TaskGroup) -> None:
        """Called with each action before it is carried out. ``beside``: the task group of the run."""

    def on_outcome(self, outcome: RewardOutcome) -> None:
        """Called with each outcome of a training trajectory on arrival, also of one that control has dropped."""

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: dict[str, float]) -> None:
        """Called after the optimizer step on ``batch``, before control is notified. ``metrics``: the trainer's."""

    async def on_weights_live(self, push: Push, *, last: bool) -> None:
        """Called when every engine serves the version, before control is notified. ``last``: no round follows."""

    async def on_progress(self) -> None:
        """Called after each event and each held-out outcome."""


class RunRecord(msgspec.Struct, frozen=True):
    """``control``: from the beginning, from the checkpoint that the run was forked from, or as an earlier life left it
    (``resumed``)."""

    control: Control
    store: TrajectoryStore
    journal: Journal
    resumed: bool = False
