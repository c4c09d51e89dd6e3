"""``rounds = "auto"``: synchronous rounds or races of prompts, whichever the adviser predicts to be faster.

A race pays where the longest completions bound a step, and loses where its tokens bound it. Which of the two holds
depends on the model, the task and the engines, and changes while the policy learns. The process
``streamrl.simulate.adviser`` simulates every candidate with the lengths and costs measured so far, and the controller
passes its ``RoundsAdvised`` on to this policy.

Rules of change: Rounds are synchronous until the first advice. A race must promise ``LEAST_GAIN`` more than the current
rounds. Synchronous rounds, which have no bias and no queue, return as soon as they promise anything more. Deferred
prompts are always trained: rounds change only after the long round that trains them, and prompts that still wait at
other group sizes go first. Predictions are corrected: each form of rounds (synchronous or race) is predicted at the
*pace* of its past steps, the ratio of measured to predicted seconds."""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from streamrl.base.types import DropReason
from streamrl.control.actions import Decision
from streamrl.control.events import RoundsAdvised, RoundTimed
from streamrl.control.plain_rounds import SynchronousRounds
from streamrl.control.policies.tail_batching import LONG, TailBatchingRounds
from streamrl.control.round_policy import (
    Candidate,
    Launch,
    Observation,
    PolicyState,
    Remainder,
    RoundPolicy,
    RoundView,
    StatelessRounds,
)
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import SAME_SEED, RoundKind

SYNCHRONOUS = "synchronous"
LEAST_GAIN = 0.05
OVERSAMPLING = (1.125, 1.25, 1.5)
_FADING = 0.9
_SURPRISING = 2.0  # a step counts as at most this many times its prediction: something else delayed a longer one
_PRIOR_STEPS = 4.0  # imaginary steps as long as predicted, which a pace begins with


def candidate_settings(settings: ControlSettings) -> dict[str, ControlSettings]:
    """Settings of the candidates of ``auto`` by name: synchronous rounds, and races that launch different numbers of
    prompts. Long rounds of several batches are candidates where ``tail_batching.long_round_batches`` allows them."""
    options = settings.tail_batching
    prompts = settings.batch_groups
    races: set[tuple[int, int]] = set()
    candidates = {SYNCHRONOUS: replace(settings, rounds=RoundKind.SYNCHRONOUS)}
    for batches in sorted({1, options.long_round_batches}):
        for factor in OVERSAMPLING:
            launched = math.ceil(factor * prompts)
            # In a small batch several factors launch the same number of prompts: the first one names the candidate.
            if launched <= prompts or (launched, batches) in races:
                continue
            races.add((launched, batches))
            name = f"tail_batching {factor:g}"
            if batches > 1:
                name += f" x{batches}"
            race = replace(options, prompt_oversampling=factor, response_oversampling=1.0, long_round_batches=batches)
            candidates[name] = replace(settings, rounds=RoundKind.TAIL_BATCHING, tail_batching=race)
    return candidates


class Pace(Struct):
    """Sums over past steps of their measured and predicted seconds. Sums fade, so that about the last ten steps
    decide."""

    taken_s: float = 0.0
    predicted_s: float = 0.0
    steps: float = 0.0

    def add(self, taken_s: float, predicted_s: float) -> None:
        """Add one step."""
        self.taken_s = _FADING * self.taken_s + taken_s
        self.predicted_s = _FADING * self.predicted_s + predicted_s
        self.steps = _FADING * self.steps + 1

    @property
    def factor(self) -> float:
        """Factor by which steps take longer than predicted; a few steps say little."""
        prior = _PRIOR_STEPS * self.predicted_s / self.steps if self.steps else 1.0
        return (self.taken_s + prior) / (self.predicted_s + prior)


class _State(Struct):
    """State for ``snapshot``.

    ``current``: name of the candidate in force;
    ``decided``: trainer version when the last round opened;
    ``last_kind``: kind of the last round;
    ``advice``: last advice;
    ``fresh``: whether the advice has not been compared yet;
    ``untimed``: candidate and kind of the rounds whose times are not known yet, by the version that they make;
    ``paces``: pace by form of rounds;
    ``because``: decision that the next launch reports."""

    current: str = SYNCHRONOUS
    decided: int = -1
    last_kind: str = ""
    advice: RoundsAdvised | None = None
    fresh: bool = False
    untimed: dict[int, tuple[str, str]] = {}
    paces: dict[str, Pace] = {}
    because: Decision | None = None


class AutoRounds(StatelessRounds):
    """Rounds of the policy that is predicted to be fastest. On-policy; a long round of several batches takes several
    optimizer steps along one gradient."""

    on_policy = True
    drop_reason = DropReason.LOST_RACE

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = candidate_settings(settings)
        self._policies: dict[str, RoundPolicy] = {
            name: SynchronousRounds(candidate) if name == SYNCHRONOUS else TailBatchingRounds(candidate)
            for name, candidate in self._settings.items()
        }
        self.replays = settings.tail_batching.deferred_prompts in SAME_SEED
        self._state = _State()

    @property
    def current(self) -> str:
        """Name of the candidate that forms the open round."""
        return self._state.current

    def launch(self, view: RoundView) -> Launch | None:
        """Launch as the current candidate does. A new candidate may be chosen before the first launch of a round."""
        state = self._state
        if view.at_barrier and not view.round_kind and state.decided != view.trainer_version:
            state.decided = view.trainer_version
            if state.advice is not None and state.fresh and self._drained(view):
                state.fresh = False
                self._compare(state.advice)
        plan = self._policies[self.current].launch(view)
        if plan is None:
            return None
        if plan.round_kind:
            state.last_kind = plan.round_kind
            state.untimed[view.trainer_version + 1] = (self.current, plan.round_kind)
        because = state.because
        state.because = None
        return replace(plan, because=because) if because else plan

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        return self._policies[self.current].may_join(view, candidate)

    def remainder(self, view: RoundView) -> Remainder:
        return self._policies[self.current].remainder(view)

    def slots(self) -> int:
        """Slots of the candidate that needs most."""
        return max(policy.slots() for policy in self._policies.values())

    def observe(self, observation: Observation) -> None:
        """Take advice, which counts when the next round opens, and compare the times of steps with their
        predictions."""
        state = self._state
        match observation:
            case RoundsAdvised():
                state.advice = observation
                state.fresh = True
            case RoundTimed():
                self._time_round(observation)

    def _time_round(self, timed: RoundTimed) -> None:
        """Correct the pace of the form of rounds that made this step."""
        state = self._state
        version = timed.policy_version
        name, kind = state.untimed.pop(version, ("", ""))
        predicted_s = state.advice.seconds.get(name, {}).get(kind, 0.0) if state.advice else 0.0
        if predicted_s:
            pace = state.paces.setdefault(_form(name), Pace())
            step_s = timed.rollout_s + timed.training_s + timed.push_s
            pace.add(min(step_s, _SURPRISING * predicted_s), predicted_s)
        state.untimed = {later: rounds for later, rounds in state.untimed.items() if later > version}

    def snapshot(self) -> PolicyState:
        """Complete state: a restored policy decides as this one would."""
        return asdict(self._state)

    def restore(self, state: PolicyState) -> None:
        """Restore the state of this policy. The state of another policy, or of a candidate that no longer exists, is
        ignored."""
        if state.get("current") in self._policies:
            self._state = msgspec.convert(state, _State, str_keys=True)

    def _drained(self, view: RoundView) -> bool:
        """Return whether rounds may change without leaving deferred prompts behind: none wait, or after a long round
        fewer than one race defers. With several group sizes some prompts always wait; synchronous rounds begin with
        them."""
        if self.current == SYNCHRONOUS or view.queued == 0:
            return True
        if len(self._settings[self.current].group_sizes) > 1:
            return self._state.last_kind == LONG
        batch = view.batch_trajectories // view.group_size
        factor = self._settings[self.current].tail_batching.prompt_oversampling
        return self._state.last_kind == LONG and view.queued < math.ceil(factor * batch) - batch

    def _compare(self, advice: RoundsAdvised) -> None:
        """Choose the candidate for the next rounds by ``advice``."""
        paces = {form: pace.factor for form, pace in self._state.paces.items()}
        predicted = {name: advice.goodput[name] for name in self._policies if name in advice.goodput}
        goodput = {name: value / paces.get(_form(name), 1.0) for name, value in predicted.items()}
        current_goodput = goodput.get(self.current)
        if current_goodput is None or not goodput:
            return
        best = max(goodput, key=goodput.__getitem__)
        gain = goodput[best] / current_goodput - 1
        if gain >= LEAST_GAIN:
            choice = best
            reason = f"{best} promises {gain:.1%} more trained tokens a second"
        elif goodput.get(SYNCHRONOUS, 0.0) > current_goodput:
            choice = SYNCHRONOUS
            reason = f"{self.current} promises no more than synchronous rounds"
        else:
            choice = self.current
            reason = f"the best other promises {gain:.1%} more, a change needs {LEAST_GAIN:.0%}"
            if best == self.current:
                reason = "no other promises more"
        verb = "stay with" if choice == self.current else f"from {self.current} to"
        figures = {f"goodput {name}": value for name, value in goodput.items()} | advice.figures
        figures |= {f"pace {form}": factor for form, factor in paces.items()}
        self._state.because = Decision(subject="rounds", reason=f"{verb} {choice}: {reason}", figures=figures)
        self._state.current = choice


def _form(name: str) -> str:
    """Form of the rounds of a candidate: ``synchronous`` or ``tail_batching``."""
    return name.split(" ")[0]
