"""Chooses between synchronous rounds and races by predicted goodput (refs/scheduling-model.md, section 6).

A race pays where a step is bound by its longest completions and loses where it is bound by tokens; which of the two
holds depends on the model, the task and the engines, and moves while the policy learns. So lengths and costs are
estimated online (``length_estimate``, ``engine_cost``), the candidates are compared in trained tokens a second
(``prediction``), and another one is taken when it promises enough.

Rules of change: synchronous until ``FIRST_GROUPS`` groups were seen; a race must promise ``LEAST_GAIN`` more than what
runs; back to synchronous, which has no bias and no queue, as soon as it promises anything more; a choice is held for a
whole cycle, and losers are never left behind: what lost a race has had its long round before the rounds change. A
promise that was not kept is not made again: each kind of round is predicted at the pace at which it went so far. Every
comparison is explained with the figures of all candidates.

Long rounds of more than one batch are candidates where ``tail_batching.long_round_batches`` allows them, since the step
on a larger batch is for the recipe to decide. What pre-submission saves is in the measured times.
"""

from __future__ import annotations

import math

import msgspec

from streamrl.base.types import DropReason
from streamrl.control.actions import Explain
from streamrl.control.events import EnginesMeasured, RoundTimed
from streamrl.control.round_policy import (
    Candidate,
    GroupObserved,
    Launch,
    Observation,
    Remainder,
    RoundPolicy,
    RoundView,
)
from streamrl.control.settings import ControlSettings
from streamrl.control.synchronous import SynchronousRounds
from streamrl.policies.adviser.engine_cost import LONG, EngineCost
from streamrl.policies.adviser.length_estimate import LengthEstimate
from streamrl.policies.adviser.load_profile import PlayedLoad
from streamrl.policies.adviser.prediction import BatchShape, Form, Prediction, Schedule, predict
from streamrl.policies.tail_batching import TailBatching
from streamrl.recipe.scheduling import SAME_NOISE, DeferredPrompts

FIRST_GROUPS = 20
LEAST_GAIN = 0.05
SYNCHRONOUS_HOLD = 4  # rounds between two comparisons while rounds are synchronous
ETAS = (1.125, 1.25, 1.5)
_ROUNDS_UNTIMED = 4

SYNCHRONOUS = Schedule()


class _State(msgspec.Struct):
    """What ``snapshot`` gives. ``loads``: of rounds whose times are not known yet: the version that they make, their
    kind, what they asked for. ``warm``: the first round, in which engines and trainer compile, is over."""

    current: Schedule
    decided: int
    opened: int
    held_until: int
    last_kind: str
    lengths: list[tuple[int, dict[str, object]]]
    cost: dict[str, object]
    warm: bool
    loads: list[tuple[int, str, PlayedLoad]]
    because: Explain | None = None


class AutoRounds:
    """Strictly on-policy. ``current``: the schedule that forms the open round."""

    on_policy = True
    cut_tokens = 0
    predicts_lengths = False

    def __init__(self, settings: ControlSettings) -> None:
        options = settings.tail_batching
        if options.deferred_prompts is DeferredPrompts.RESUME:
            raise ValueError(
                'tail_batching.deferred_prompts = "resume" is off-policy and rounds = "auto" is not: use "replay" or '
                '"regenerate"'
            )
        self._replays = options.deferred_prompts in SAME_NOISE
        self._policies: dict[Schedule, RoundPolicy] = {SYNCHRONOUS: SynchronousRounds(settings)}
        elastic = sorted({1, options.long_round_batches})
        races = [Schedule(Form.TAIL_BATCHING, eta, long_batches=batches) for batches in elastic for eta in ETAS]
        for schedule in races:
            racing = msgspec.structs.replace(
                options,
                prompt_oversampling=schedule.prompt_oversampling,
                response_oversampling=1.0,
                long_round_batches=schedule.long_batches,
            )
            self._policies[schedule] = TailBatching(msgspec.structs.replace(settings, tail_batching=racing))
        self.current = SYNCHRONOUS
        self._cost = EngineCost()
        self._lengths: dict[int, LengthEstimate] = {}
        self._loads: dict[int, PlayedLoad] = {}
        self._kinds: dict[int, str] = {}
        self._warm = False
        self._decided = -1
        self._opened = -1
        self._held_until = 0
        self._last_kind = ""
        self._because: Explain | None = None

    # ---- RoundPolicy -----------------------------------------------------------------------------

    def launch(self, view: RoundView) -> Launch | None:
        """See ``RoundPolicy``. The schedule is chosen once for each round, before its first launch."""
        if view.at_barrier and not view.round_kind and self._decided != view.trainer_version:
            self._decided = view.trainer_version
            self._round_opens(view)
        plan = self._policies[self.current].launch(view)
        if plan is None:
            return None
        if plan.round_kind:
            self._notice(view, plan)
        because, self._because = self._because, None
        return msgspec.structs.replace(plan, because=because) if because else plan

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        """See ``RoundPolicy``."""
        return self._policies[self.current].may_join(view, candidate)

    def remainder(self, view: RoundView) -> Remainder:
        """See ``RoundPolicy``."""
        return self._policies[self.current].remainder(view)

    @property
    def losing(self) -> DropReason:
        """See ``RoundPolicy``."""
        return DropReason.LOST_RACE

    def slots(self) -> int:
        """Those of the candidate that needs most."""
        return max(policy.slots() for policy in self._policies.values())

    @property
    def replays(self) -> bool:
        """See ``RoundPolicy``."""
        return self._replays

    def observe(self, seen: Observation) -> None:
        """Learn lengths from groups, costs from engines and rounds."""
        match seen:
            case GroupObserved():
                self._observe_group(seen)
            case EnginesMeasured():
                if self._warm:
                    self._cost.observe_engines(seen)
            case RoundTimed():
                self._observe_round(seen)

    def snapshot(self) -> dict[str, object]:
        """All of it: a restored policy answers as this one would."""
        state = _State(
            current=self.current,
            decided=self._decided,
            opened=self._opened,
            held_until=self._held_until,
            last_kind=self._last_kind,
            lengths=[(size, estimate.snapshot()) for size, estimate in self._lengths.items()],
            cost=self._cost.snapshot(),
            warm=self._warm,
            loads=[(version, self._kinds[version], load) for version, load in self._loads.items()],
            because=self._because,
        )
        built: dict[str, object] = msgspec.to_builtins(state)
        return built

    def restore(self, state: dict[str, object]) -> None:
        """See ``RoundPolicy``. The state of other rounds, from which the run is resumed: start anew."""
        if "loads" not in state:
            return
        known = msgspec.convert(state, _State, str_keys=True)
        self.current, self._held_until = known.current, known.held_until
        self._decided, self._opened = known.decided, known.opened
        if self.current not in self._policies:
            # The recipe has no such rounds any more: compare those that it has.
            self.current, self._held_until = SYNCHRONOUS, 0
        self._last_kind = known.last_kind
        self._warm, self._because = known.warm, known.because
        self._loads = {version: load for version, _, load in known.loads}
        self._kinds = {version: kind for version, kind, _ in known.loads}
        self._cost.restore(known.cost)
        self._lengths = {}
        for size, lengths in known.lengths:
            self._lengths[size] = LengthEstimate()
            self._lengths[size].restore(lengths)

    # ---- what it learns --------------------------------------------------------------------------

    def _notice(self, view: RoundView, plan: Launch) -> None:
        """What this launch says about the groups that will come of it."""
        opens = not view.round_kind and self._opened != view.trainer_version
        if opens and plan.round_kind == LONG and self.current.form is Form.TAIL_BATCHING:
            self._lengths.setdefault(plan.size, LengthEstimate()).begin_again(plan.groups)
        self._opened = view.trainer_version
        self._last_kind = plan.round_kind
        if self._decided + 1 in self._loads:
            self._kinds[self._decided + 1] = plan.round_kind

    def _observe_group(self, group: GroupObserved) -> None:
        estimate = self._lengths.setdefault(group.size, LengthEstimate())
        if not group.cut:
            estimate.observe(group.lengths, again=group.round_kind == LONG)
        else:
            estimate.observe_cut(group.lengths, size=group.size, cut_at=group.cut_at)
        load = self._loads.get(self._decided + 1)
        if load is not None:
            load.add(group.lengths, size=group.size, cut=group.cut, cut_at=group.cut_at)

    def _observe_round(self, timed: RoundTimed) -> None:
        played, kind = self._loads.pop(timed.policy_version, None), self._kinds.pop(timed.policy_version, "")
        if played is None or not played.requests:
            return
        if self._warm:
            self._cost.observe_round(played.load(), timed, kind)
        self._warm = True

    # ---- what it chooses -------------------------------------------------------------------------

    def _round_opens(self, view: RoundView) -> None:
        self._loads[view.trainer_version + 1] = PlayedLoad()
        self._kinds[view.trainer_version + 1] = ""
        for version in [v for v in self._loads if v <= view.trainer_version + 1 - _ROUNDS_UNTIMED]:
            del self._loads[version], self._kinds[version]
        lengths = self._lengths.get(view.group_size)
        if lengths is None or lengths.seen < FIRST_GROUPS or not self._cost.ready:
            return
        if view.trainer_version >= self._held_until and self._drained(view):
            self._compare(view, lengths)

    def _drained(self, view: RoundView) -> bool:
        """No loser waits, or after a long round fewer than one race leaves: those a later round takes first."""
        left = self._shape(view).launched(self.current) - view.batch_trajectories // view.group_size
        rest_of_cycle = self.current.form is Form.TAIL_BATCHING and self._last_kind == LONG and view.queued < left
        return view.queued == 0 or self.current.form is Form.SYNCHRONOUS or rest_of_cycle

    def _shape(self, view: RoundView) -> BatchShape:
        return BatchShape(
            prompts=view.batch_trajectories // view.group_size,
            group_size=view.group_size,
            replays=self._replays,
        )

    def _candidates(self, view: RoundView, shape: BatchShape) -> list[Schedule]:
        """Those that differ for this batch; a race of a few prompts may launch as many at two factors."""
        races: dict[tuple[int, int], Schedule] = {}
        for schedule in self._policies:
            launched = shape.launched(schedule)
            if schedule.form is Form.TAIL_BATCHING and launched > shape.prompts:
                races.setdefault((launched, schedule.long_batches), schedule)
        chosen = [SYNCHRONOUS, *races.values()]
        if self.current.form is Form.TAIL_BATCHING and self.current not in chosen:
            chosen.append(self.current)
        return chosen

    def _compare(self, view: RoundView, lengths: LengthEstimate) -> None:
        shape = self._shape(view)
        candidates = self._candidates(view, shape)
        predictions = {schedule: predict(schedule, lengths, self._cost, shape) for schedule in candidates}
        now, best = predictions[self.current], max(predictions.values(), key=lambda p: p.goodput)
        gain = best.goodput / now.goodput - 1
        unbiased = predictions[SYNCHRONOUS]
        if gain >= LEAST_GAIN:
            chosen, reason = best, f"{best.schedule.name} promises {gain:.1%} more trained tokens a second"
        elif unbiased.goodput > now.goodput:
            chosen, reason = unbiased, f"{now.schedule.name} promises no more than synchronous rounds"
        else:
            chosen, reason = now, f"the best other promises {max(gain, 0):.1%} more, a change needs {LEAST_GAIN:.0%}"
            if best is now:
                reason = "no other promises more"
        verb = "stay with" if chosen is now else f"from {now.schedule.name} to"
        self.current = chosen.schedule
        self._held_until = view.trainer_version + (_cycle(chosen) if chosen.wait else SYNCHRONOUS_HOLD)
        figures = {"groups_seen": float(lengths.seen), **self._cost.figures()}
        for schedule, prediction in predictions.items():
            figures |= _figures(schedule.name, prediction)
        self._because = Explain(subject="rounds", reason=f"{verb} {chosen.schedule.name}: {reason}", figures=figures)


def _cycle(prediction: Prediction) -> int:
    """Rounds until nothing of what was raced waits: the short ones and their long one."""
    return math.ceil(prediction.wait) + 1


def _figures(name: str, prediction: Prediction) -> dict[str, float]:
    return {
        f"goodput {name}": prediction.goodput,
        f"seconds {name}": prediction.seconds,
        f"length_share {name}": prediction.length_share,
        f"generated {name}": prediction.generated,
        f"wait {name}": float(prediction.wait),
    }
