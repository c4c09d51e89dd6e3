"""Control of a deterministic run (``run.deterministic``): takes events in an order that does not depend on timing.
Pure.

``round_policies`` makes it in place of ``Control``, in the controller and in the simulator. ``Control`` takes events in
the order in which they arrive. The winners of a race, the prompt that replaces a dropped group and the lengths that the
group sizing observes then depend on the clock, and two runs of one recipe differ even where engines and trainer compute
the same. Here an event waits until no earlier one can be missing:

1. Answers to orders come first, one kind after the other: prompts, checkpoint, evaluation, step, push. Control decides
   nothing else while it waits for one of them.
2. Outcomes of trajectories are ordered as if every engine sampled one token of every request in each tick of a common
   clock. A trajectory ends ``tokens`` ticks after its launch, and its launch has the tick of the outcome that caused
   it; equal ticks are ordered by group and sample. So *all launched trajectories must have ended before control takes
   the first outcome*.

A race then has the winners that it would have on an ideal engine, but it waits for all its trajectories, so that it
saves no time; and no group is trained while others still run. The purpose is verification: a run that was killed and
resumed trains the same batches as one that was not killed, bit for bit.

Rounds must be on-policy (a token must not depend on when weights changed) and decide by outcomes alone; policies get no
measured times. A stop takes effect at once."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Record, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.machine import Control, Steer
from streamrl.control.round_policy import GroupSizer, RoundPolicy
from streamrl.control.run_state import Snapshot
from streamrl.control.settings import ControlSettings
from streamrl.control.unanswered_orders import unanswered_orders

_Tick = tuple[int, int, int, int]  # ticks, group, sample, attempt


class Arrivals(Record, frozen=True):
    """Events that have arrived and that control has not taken yet, as a snapshot has them.

    ``now``: tick of the last outcome taken;
    ``launched``: trajectories without an outcome, each with the tick of its launch;
    ``ended``: waiting outcomes, each with the tick of its launch;
    ``answers``: waiting answers."""

    now: int = 0
    launched: tuple[tuple[TrajectoryId, int], ...] = ()
    ended: tuple[tuple[int, on.Outcome], ...] = ()
    answers: tuple[on.Answer, ...] = ()


class DeterministicControl(Control):
    """``Control`` that takes events in an order which does not depend on the times of their arrival."""

    def __init__(
        self, settings: ControlSettings, policy: RoundPolicy, sizer: GroupSizer, snapshot: Snapshot | None, steer: Steer
    ) -> None:
        """Start or continue a run as ``Control`` does. Raises ``ValueError`` for rounds that are off-policy too."""
        if not policy.on_policy:
            raise ValueError(
                f"deterministic rounds train on-policy, and {settings.policy or settings.rounds} at staleness "
                f"{settings.max_staleness} do not: which weights sample a token would depend on when they change"
            )
        super().__init__(settings, policy, sizer, snapshot, steer)
        self._now = 0
        self._launched: dict[TrajectoryId, int] = {}
        self._outcomes: dict[TrajectoryId, tuple[int, on.Outcome]] = {}
        # A heap of the ticks of outcomes. Some of its trajectories may have been dropped since.
        self._ticks: list[tuple[_Tick, TrajectoryId]] = []
        # Outcomes of trajectories that control dropped before it took them: they decide nothing, and are taken at once.
        self._late: deque[on.Outcome] = deque()
        self._answers: dict[type[on.Answer], on.Answer] = {}
        if snapshot is not None:
            self._restore(msgspec.convert(snapshot.order or {}, Arrivals))

    def handle(self, event: ControlEvent) -> list[ControlAction]:
        """Receive ``event``, take all events that are due now, and return the actions that follow, in order."""
        out: list[ControlAction] = []
        if isinstance(event, on.Measurement):
            return out
        due: ControlEvent | None = event
        if not isinstance(event, on.RunContinued):
            due = None if self.state.finished else self._receive(event)
        while due is not None:
            first_new = len(out)
            self._take(due, out)
            self._note_orders(out[first_new:])
            due = None if self.state.finished else self._next()
        return out

    def unanswered_orders(self) -> list[ControlAction]:
        """Orders as those of ``Control``, without those whose answer has arrived and waits here."""
        return unanswered_orders(
            self.state,
            self.settings.shares,
            waiting_answers=self._answers.keys(),
            waiting_outcomes=self._outcomes.keys(),
        )

    def snapshot(self) -> Snapshot:
        """The snapshot of ``Control``, with the events that wait here."""
        arrivals = Arrivals(
            now=self._now,
            launched=tuple(self._launched.items()),
            ended=tuple(self._outcomes.values()),
            answers=tuple(self._answers.values()),
        )
        return replace(super().snapshot(), order=msgspec.to_builtins(arrivals))

    def _restore(self, arrivals: Arrivals) -> None:
        self._now = arrivals.now
        self._launched = dict(arrivals.launched)
        for launch_tick, outcome in arrivals.ended:
            self._add_outcome(outcome, launch_tick)
        self._answers = {type(answer): answer for answer in arrivals.answers}

    def _receive(self, event: ControlEvent) -> ControlEvent | None:
        """Receive ``event``. Returns the event that is due now: this one, or one that waited for it; None for none."""
        match event:
            case on.TrajectoryScored() | on.TrajectoryFailed():
                if event.id in self._outcomes:
                    return None  # the event came twice
                if event.id not in self._launched:
                    return event  # its trajectory was dropped: the event decides nothing
                self._add_outcome(event, self._launched.pop(event.id))
            case _ if not isinstance(event, on.Answer):
                return event
            case _ if not self.state.pending.awaits(event):
                return None  # the answer came twice
            case _:
                self._answers.setdefault(type(event), event)
        return self._next()

    def _next(self) -> ControlEvent | None:
        """The event that is due now; None while an event that may come before it is missing."""
        if self._late:
            return self._late.popleft()
        first_awaited = next(iter(self.state.pending.awaited), None)
        if first_awaited is not None:
            return self._answers.pop(first_awaited, None)
        if self._launched:
            return None
        while self._ticks:
            (tick, *_), trajectory = heapq.heappop(self._ticks)
            if trajectory in self._outcomes:
                self._now = tick
                _launch_tick, outcome = self._outcomes.pop(trajectory)
                return outcome
        return None

    def _note_orders(self, actions: Iterable[ControlAction]) -> None:
        """Record which trajectories ``actions`` launch and drop."""
        for action in actions:
            match action:
                case do.LaunchGroup():
                    self._launched |= dict.fromkeys(action.ids, self._now)
                case do.Drop():
                    for trajectory in action.ids:
                        self._launched.pop(trajectory, None)
                        if trajectory in self._outcomes:
                            _launch_tick, outcome = self._outcomes.pop(trajectory)
                            self._late.append(outcome)
                case do.End():
                    self._late.clear()

    def _add_outcome(self, outcome: on.Outcome, launch_tick: int) -> None:
        identity = outcome.id
        self._outcomes[identity] = (launch_tick, outcome)
        tick = (launch_tick + outcome.tokens, identity.group_id, identity.sample, identity.attempt)
        heapq.heappush(self._ticks, (tick, identity))


def check_order(snapshot: Snapshot, *, deterministic: bool) -> None:
    """Raise ``StreamRLError`` where ``snapshot`` is of a deterministic run and this run is not, or the reverse."""
    was_deterministic = snapshot.order is not None
    if was_deterministic != deterministic:
        kind = "deterministic" if was_deterministic else "not deterministic"
        raise StreamRLError(
            f"the run that was kept is {kind}, and these settings say "
            f"deterministic = {str(deterministic).lower()}: resume with its own recipe"
        )
