"""``auto``: synchronous rounds or races of prompts, whichever an adviser beside the run predicts to be faster.

A race pays where a step is bound by its longest completions and loses where it is bound by tokens; which of the two
holds depends on the model, the task and the engines, and moves while the policy learns. ``streamrl.simulate.adviser``
simulates every candidate on the lengths and costs measured so far and sends ``RoundsAdvised``.

Rules of change: synchronous until the first advice; a race must promise ``LEAST_GAIN`` more than what runs; back to
synchronous, which has no bias and no queue, as soon as it promises anything more. Deferred prompts are never left
behind: the rounds change only after the long round that trains them, and what then waits at other group sizes goes
first. A promise that was not fulfilled is made smaller: each form of rounds is predicted at the pace that it had."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from streamrl.base.types import DropReason
from streamrl.control.actions import Decision
from streamrl.control.events import RoundsAdvised, RoundTimed
from streamrl.control.policies.tail_batching import LONG, TailBatchingRounds
from streamrl.control.round_policy import (
    Candidate,
    Launch,
    Observation,
    Remainder,
    RoundPolicy,
    RoundView,
    StatelessRounds,
)
from streamrl.control.settings import ControlSettings
from streamrl.control.synchronous import SynchronousRounds
from streamrl.recipe.scheduling import SAME_SEED, RoundKind

SYNCHRONOUS = "synchronous"
LEAST_GAIN = 0.05
OVERSAMPLING = (1.125, 1.25, 1.5)
_FADING = 0.9
_SURPRISING = 2.0  # a step that takes longer than this many times of what was predicted was held up by something else
_PRIOR_STEPS = 4.0  # that took as long as predicted, before the first was seen


def candidate_settings(settings: ControlSettings) -> dict[str, ControlSettings]:
    """Return what ``auto`` chooses from, by name: synchronous rounds, and races that launch different numbers of
    prompts. Long rounds of several batches are candidates where ``tail_batching.long_round_batches`` allows them."""
    options = settings.tail_batching
    prompts = settings.batch_groups
    races: dict[tuple[int, int], str] = {}
    found = {SYNCHRONOUS: replace(settings, rounds=RoundKind.SYNCHRONOUS)}
    for batches in sorted({1, options.long_round_batches}):
        for factor in OVERSAMPLING:
            name = f"tail_batching {factor:g}" + (f" x{batches}" if batches > 1 else "")
            launched = math.ceil(factor * prompts)
            if launched > prompts and races.setdefault((launched, batches), name) == name:
                race = replace(
                    options, prompt_oversampling=factor, response_oversampling=1.0, long_round_batches=batches
                )
                found[name] = replace(settings, rounds=RoundKind.TAIL_BATCHING, tail_batching=race)
    return found


class Pace(msgspec.Struct):
    """Seconds that steps took and that were predicted of them; the last ten or so decide."""

    taken_s: float = 0.0
    predicted_s: float = 0.0
    steps: float = 0.0

    def add(self, taken_s: float, predicted_s: float) -> None:
        """Count one step."""
        self.taken_s = _FADING * self.taken_s + taken_s
        self.predicted_s = _FADING * self.predicted_s + predicted_s
        self.steps = _FADING * self.steps + 1

    @property
    def factor(self) -> float:
        """Factor by which steps take longer than predicted; a few steps say little."""
        prior = _PRIOR_STEPS * self.predicted_s / self.steps if self.steps else 1.0
        return (self.taken_s + prior) / (self.predicted_s + prior)


class _State(msgspec.Struct):
    """State for ``snapshot``. ``decided``: version of the last round that opened; ``fresh``: the advice was not
    compared yet; ``untimed``: candidate and kind of rounds whose time is not known, by the version that they make."""

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
            name: SynchronousRounds(one) if name == SYNCHRONOUS else TailBatchingRounds(one)
            for name, one in self._settings.items()
        }
        self.replays = settings.tail_batching.deferred_prompts in SAME_SEED
        self._state = _State()

    @property
    def current(self) -> str:
        """Name of the candidate that forms the open round."""
        return self._state.current

    def launch(self, view: RoundView) -> Launch | None:
        """Launch as the chosen candidate does. It is chosen once for each round, before its first launch."""
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
        """Return those of the candidate that needs most."""
        return max(policy.slots() for policy in self._policies.values())

    def observe(self, seen: Observation) -> None:
        """Take advice, which counts when the next round opens, and hold the times of steps against it."""
        state = self._state
        match seen:
            case RoundsAdvised():
                state.advice = seen
                state.fresh = True
            case RoundTimed(policy_version=version):
                name, kind = state.untimed.pop(version, ("", ""))
                predicted = state.advice.seconds.get(name, {}).get(kind, 0.0) if state.advice else 0.0
                if predicted:
                    pace = state.paces.setdefault(_form(name), Pace())
                    taken = seen.rollout_s + seen.training_s + seen.push_s
                    pace.add(min(taken, _SURPRISING * predicted), predicted)
                state.untimed = {made: one for made, one in state.untimed.items() if made > version}

    def snapshot(self) -> dict[str, object]:
        """Return all of it: a restored policy answers as this one would."""
        return msgspec.structs.asdict(self._state)

    def restore(self, state: dict[str, object]) -> None:
        """Restore the state of this policy; that of another one, or of candidates that are gone, is ignored."""
        if state.get("current") in self._policies:
            self._state = msgspec.convert(state, _State, str_keys=True)

    def _drained(self, view: RoundView) -> bool:
        """Return whether no deferred prompt waits; after a long round fewer than one race leaves, which the next takes.
        With several sizes some groups always wait: synchronous rounds begin with them then."""
        if self.current == SYNCHRONOUS or view.queued == 0:
            return True
        if len(self._settings[self.current].group_sizes) > 1:
            return self._state.last_kind == LONG
        batch = view.batch_trajectories // view.group_size
        factor = self._settings[self.current].tail_batching.prompt_oversampling
        return self._state.last_kind == LONG and view.queued < math.ceil(factor * batch) - batch

    def _compare(self, advice: RoundsAdvised) -> None:
        paces = {form: pace.factor for form, pace in self._state.paces.items()}
        predicted = {name: advice.goodput[name] for name in self._policies if name in advice.goodput}
        goodput = {name: value / paces.get(_form(name), 1.0) for name, value in predicted.items()}
        now = goodput.get(self.current)
        if now is None or not goodput:
            return
        best = max(goodput, key=goodput.__getitem__)
        gain = goodput[best] / now - 1
        if gain >= LEAST_GAIN:
            chosen = best
            reason = f"{best} promises {gain:.1%} more trained tokens a second"
        elif goodput.get(SYNCHRONOUS, 0.0) > now:
            chosen = SYNCHRONOUS
            reason = f"{self.current} promises no more than synchronous rounds"
        else:
            chosen = self.current
            reason = f"the best other promises {gain:.1%} more, a change needs {LEAST_GAIN:.0%}"
            if best == self.current:
                reason = "no other promises more"
        verb = "stay with" if chosen == self.current else f"from {self.current} to"
        figures = {f"goodput {name}": value for name, value in goodput.items()} | advice.figures
        figures |= {f"pace {form}": factor for form, factor in paces.items()}
        self._state.because = Decision(subject="rounds", reason=f"{verb} {chosen}: {reason}", figures=figures)
        self._state.current = chosen


def _form(name: str) -> str:
    return name.split(" ")[0]
