"""The order in which answers count in a deterministic run: one that does not depend on who was faster. Pure.

Without it control takes what happens in the order in which it happens. Which group wins a race, which prompt refills a
dropped one and what the group sizing has seen then depend on the clock, and two runs of one recipe differ, however
exactly engines and trainer compute. With it an answer waits until it is certain that none before it is missing:

1. What control asked others for is taken first, one kind after the other: prompts, checkpoint, evaluation, step, push.
   Nothing else is decided while one of them is on its way.
2. Outcomes of trajectories are taken as if every engine sampled one token of every request in each tick of a common
   clock: a trajectory ends ``tokens`` ticks after its launch, which is at the tick of the outcome that led to it; equal
   ticks go by group and sample. So *everything that was launched must have ended before the first of it counts*.

A race then has the winners that it would have on an ideal engine, but it has waited for all its unfinished
trajectories: the time that a race gains is lost. The same holds of a batch whose groups could be trained while others
still run. This is for verification: a run that was killed trains the batches of one that was not, bit for bit.

It needs rounds that are on-policy (what a token is must not depend on when weights changed) and that decide by outcomes
alone; times that are measured are not told to policies. A stop takes effect at once, whenever it comes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Record, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.machine import Control, Steer, unsteered
from streamrl.control.model import Snapshot
from streamrl.control.pending import unanswered_orders
from streamrl.control.round_policy import GroupSizer, RoundPolicy
from streamrl.control.settings import ControlSettings

_Tick = tuple[int, int, int, int]  # ticks, group, sample, attempt


class Arrivals(Record, frozen=True):
    """Arrivals that do not count yet, as a snapshot has them. ``launched``: trajectories that have not ended, with the
    tick of their launch; ``ended``: outcomes that wait, with the same; ``answers``: those that wait."""

    now: int = 0
    launched: tuple[tuple[TrajectoryId, int], ...] = ()
    ended: tuple[tuple[int, on.Outcome], ...] = ()
    answers: tuple[on.Answer, ...] = ()


class DeterministicControl(Control):
    """``Control`` that takes events in an order which does not depend on when they arrive."""

    def __init__(
        self,
        settings: ControlSettings,
        policy: RoundPolicy,
        sizer: GroupSizer,
        snapshot: Snapshot | None = None,
        steer: Steer = unsteered,
    ) -> None:
        """Raises ``ValueError`` for rounds that are off-policy; else as ``Control``."""
        if not policy.on_policy:
            raise ValueError(
                f"deterministic rounds train on-policy, and {settings.policy or settings.rounds} at staleness "
                f"{settings.max_staleness} do not: which weights sample a token would depend on when they change"
            )
        super().__init__(settings, policy, sizer, snapshot, steer)
        self._now = 0
        self._launched: dict[TrajectoryId, int] = {}
        self._ended: dict[TrajectoryId, tuple[int, on.Outcome]] = {}
        self._ticks: list[tuple[_Tick, TrajectoryId]] = []  # of those that ended; some were cancelled since
        self._late: deque[on.Outcome] = deque()
        self._answers: dict[type[on.Answer], on.Answer] = {}
        if snapshot is not None:
            self._restore(msgspec.convert(snapshot.order or {}, Arrivals))

    def handle(self, event: ControlEvent) -> list[ControlAction]:
        """Take ``event`` and all that counts now, and return what is to be done, in order."""
        out: list[ControlAction] = []
        if isinstance(event, on.Measurement):
            return out
        counts: ControlEvent | None = event
        if not isinstance(event, on.RunContinued):
            counts = None if self.state.finished else self._arrived(event)
        while counts is not None:
            before = len(out)
            self._take(counts, out)
            self._note_orders(out[before:])
            counts = None if self.state.finished else self._next()
        return out

    def unanswered_orders(self) -> list[ControlAction]:
        """List orders as ``Control`` does, without those whose answer is here and does not count yet."""
        return unanswered_orders(self.state, answered=self._answers.keys(), ended=self._ended.keys())

    def snapshot(self) -> Snapshot:
        """Extend ``Control.snapshot`` by the arrivals that do not count yet."""
        arrivals = Arrivals(
            now=self._now,
            launched=tuple(self._launched.items()),
            ended=tuple(self._ended.values()),
            answers=tuple(self._answers.values()),
        )
        return msgspec.structs.replace(super().snapshot(), order=msgspec.to_builtins(arrivals))

    def _restore(self, arrivals: Arrivals) -> None:
        self._now = arrivals.now
        self._launched = dict(arrivals.launched)
        for launched, outcome in arrivals.ended:
            self._end(outcome, launched)
        self._answers = {type(answer): answer for answer in arrivals.answers}

    def _arrived(self, event: ControlEvent) -> ControlEvent | None:
        """``event`` happened. What counts next: itself, another one that waited for it, or nothing yet."""
        match event:
            case on.TrajectoryScored() | on.TrajectoryFailed():
                if event.id in self._ended:
                    return None  # it came twice
                if event.id not in self._launched:
                    return event  # dropped before: it decides nothing
                self._end(event, self._launched.pop(event.id))
            case _ if not isinstance(event, on.Answer):
                return event
            case _ if not self.state.pending.awaits(event):
                return None  # it came twice
            case _:
                self._answers.setdefault(type(event), event)
        return self._next()

    def _next(self) -> ControlEvent | None:
        """Return what counts now, after all that counted before; None: something that may come before it is missing."""
        if self._late:
            return self._late.popleft()
        for kind in self.state.pending.awaited:
            return self._answers.pop(kind, None)
        if self._launched:
            return None
        while self._ticks:
            (tick, *_), identity = heapq.heappop(self._ticks)
            if identity in self._ended:
                self._now = tick
                return self._ended.pop(identity)[1]
        return None

    def _note_orders(self, actions: Iterable[ControlAction]) -> None:
        for action in actions:
            match action:
                case do.LaunchGroup():
                    self._launched |= dict.fromkeys(action.ids, self._now)
                case do.Drop():
                    for trajectory in action.ids:
                        self._launched.pop(trajectory, None)
                        ended = self._ended.pop(trajectory, None)
                        if ended is not None:
                            self._late.append(ended[1])
                case do.End():
                    self._late.clear()  # nothing counts any more, and these decide nothing

    def _end(self, outcome: on.Outcome, launched: int) -> None:
        identity = outcome.id
        self._ended[identity] = (launched, outcome)
        tick = (launched + outcome.tokens, identity.group_id, identity.sample, identity.attempt)
        heapq.heappush(self._ticks, (tick, identity))


def check_order(snapshot: Snapshot, *, deterministic: bool) -> None:
    """Raise ``StreamRLError`` where the snapshot is of a run that is not, or is, deterministic as this one is."""
    if (snapshot.order is not None) != deterministic:
        raise StreamRLError(
            f"the run that was kept is {'not ' if snapshot.order is None else ''}deterministic, and these settings say "
            f"deterministic = {str(deterministic).lower()}: resume with its own recipe"
        )
