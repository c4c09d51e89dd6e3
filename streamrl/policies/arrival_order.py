"""The order in which answers count in a deterministic run: one that does not depend on who was faster. Pure.

Without it control takes what happens in the order in which it happens. Which group wins a race, which prompt refills a
dropped one and what the group sizing has seen then depend on the clock, and two runs of one recipe differ, however
exactly engines and trainer compute. With it an answer waits until it is certain that none before it is missing:

1. What control asked others for is taken first, one kind after the other: prompts, checkpoint, evaluation, step, push.
   Nothing else is decided while one of them is on its way.
2. Outcomes of trajectories are taken as if every engine sampled one token of every request in each tick of a common
   clock: a trajectory ends ``tokens`` ticks after its launch, which is at the tick of the outcome that led to it; equal
   ticks go by group and sample. So *everything that was launched must have ended before the first of it counts*.

A race then has the winners that it would have on an ideal engine, but all its losers have been waited for: what a race
gains in time is given away. The same holds of a batch whose groups could be trained while others still run. This is for
verification: a run that was killed trains the batches of one that was not, bit for bit.

It needs rounds that are on-policy (what a token is must not depend on when weights changed) and that decide by outcomes
alone; times that are measured are not told to policies. A stop takes effect at once, whenever it comes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from streamrl.base.types import Record, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent

if TYPE_CHECKING:
    from streamrl.control.state import ControlState

Outcome = on.TrajectoryScored | on.TrajectoryFailed
Answer = on.PromptsDrawn | on.CheckpointDone | on.EvaluationDone | on.BatchTrained | on.WeightsLive

_Tick = tuple[int, int, int, int]  # ticks, group, sample, attempt


class KeptArrivals(Record, frozen=True):
    """An ``ArrivalOrder`` as a record. ``launched``: what has not ended, with the tick of its launch; ``ended``:
    outcomes that wait, with the tick of the launch; ``answers``. Between two events no late outcome waits."""

    now: int = 0
    launched: tuple[tuple[TrajectoryId, int], ...] = ()
    ended: tuple[tuple[int, Outcome], ...] = ()
    answers: tuple[Answer, ...] = ()


class ArrivalOrder:
    """What arrived and does not count yet. Told every event with ``arrived`` and every order with ``ordered``."""

    def __init__(self) -> None:
        self._now = 0
        self._launched: dict[TrajectoryId, int] = {}
        self._ended: dict[TrajectoryId, tuple[int, Outcome]] = {}
        self._ticks: list[tuple[_Tick, TrajectoryId]] = []  # of those that ended; some were cancelled since
        self._late: deque[Outcome] = deque()
        self._answers: dict[type[Answer], Answer] = {}

    def arrived(self, event: ControlEvent, state: ControlState) -> ControlEvent | None:
        """``event`` happened. What counts next: itself, another one that waited for it, or nothing yet."""
        match event:
            case on.TrajectoryScored() | on.TrajectoryFailed():
                if event.id in self._ended:
                    return None  # told twice
                if event.id not in self._launched:
                    return event  # cancelled before: it decides nothing
                self._end(event, self._launched.pop(event.id))
            case on.PromptsDrawn() | on.CheckpointDone() | on.EvaluationDone() | on.BatchTrained() | on.WeightsLive():
                if not _awaited(event, state):
                    return None  # told twice
                self._answers.setdefault(type(event), event)
            case _:
                return event
        return self.next(state)

    def next(self, state: ControlState) -> ControlEvent | None:
        """What counts now, after all that counted before; None: something that may come before it is missing."""
        if self._late:
            return self._late.popleft()
        for kind, asked in (
            (on.PromptsDrawn, state.supply.asked > 0),
            (on.CheckpointDone, state.due.checkpointing is not None),
            (on.EvaluationDone, state.due.evaluating is not None),
            (on.BatchTrained, state.batch.closed),
            (on.WeightsLive, state.publishing is not None),
        ):
            if asked:
                return self._answers.pop(kind, None)
        if self._launched:
            return None
        while self._ticks:
            (tick, *_), identity = heapq.heappop(self._ticks)
            if identity in self._ended:
                self._now = tick
                return self._ended.pop(identity)[1]
        return None

    def ordered(self, actions: Iterable[ControlAction]) -> None:
        """Control ordered ``actions`` after the event that counted last."""
        for action in actions:
            match action:
                case do.LaunchGroup():
                    self._launched |= dict.fromkeys(action.ids, self._now)
                case do.CancelGroup() | do.ForgetTrajectories():
                    for trajectory in action.ids:
                        self._launched.pop(trajectory, None)
                        ended = self._ended.pop(trajectory, None)
                        if ended is not None:
                            self._late.append(ended[1])
                case do.FinishRun() | do.StopRun():
                    self._late.clear()  # nothing counts any more, and these decide nothing

    def waits(self, trajectory: TrajectoryId) -> bool:
        """Whether the outcome of ``trajectory`` is here and does not count yet."""
        return trajectory in self._ended

    def answered(self, kind: type[Answer]) -> bool:
        """Whether an answer of ``kind`` is here and does not count yet."""
        return kind in self._answers

    def keep(self) -> KeptArrivals:
        """All of it."""
        return KeptArrivals(
            now=self._now,
            launched=tuple(self._launched.items()),
            ended=tuple(self._ended.values()),
            answers=tuple(self._answers.values()),
        )

    def restore(self, kept: KeptArrivals) -> None:
        """The inverse, on a new one."""
        self._now, self._launched = kept.now, dict(kept.launched)
        for launched, outcome in kept.ended:
            self._end(outcome, launched)
        self._answers = {type(answer): answer for answer in kept.answers}

    def _end(self, outcome: Outcome, launched: int) -> None:
        identity = outcome.id
        self._ended[identity] = (launched, outcome)
        tick = (launched + outcome.tokens, identity.group_id, identity.sample, identity.attempt)
        heapq.heappush(self._ticks, (tick, identity))


def _awaited(answer: Answer, state: ControlState) -> bool:
    """Whether control waits for exactly this one."""
    match answer:
        case on.PromptsDrawn():
            return state.supply.asked > 0
        case on.CheckpointDone(policy_version=version):
            return state.due.checkpointing == version
        case on.EvaluationDone(policy_version=version):
            return state.due.evaluating == version
        case on.BatchTrained(batch_id=batch_id, policy_version=version):
            return state.batch.closed and (batch_id, version) == (state.batch.batch_id, state.trainer_version + 1)
        case on.WeightsLive(policy_version=version):
            return state.publishing == version
