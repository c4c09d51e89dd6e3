"""Choice of the prepared set of engines for the next round (RollPacker, arXiv 2509.21009, section 4.2).

``elastic_engines`` (controller) and ``streamrl simulate`` (the command's own process) report the rounds to a
``SetChooser``, which uses no clock, and carry out its plans.

A set is a number of engines and a tensor-parallel size, on the same devices; one set is in use. Few engines with many
workers have more memory for KV, since the weights are stored once for each engine, and a faster decode step, but the
speed-up is smaller than the number of workers. So a round that lacks KV memory needs another set than a long tail.

The paper doubles the tensor-parallel size when preemptions rise above 1.05 times those of the last round, halves it
after four rounds without preemptions, and neglects the cost of a switch. Here this rule only tells when an *untried*
set is worth a trial. The decision compares seconds: the measured or expected time of the remaining rounds on each set,
and the cost of the switches. A difference within the scatter of rounds does not count, so a steady load keeps one
set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.messages import EngineLoad
from streamrl.base.types import TrajectoryId
from streamrl.control.actions import Decision
from streamrl.engines.step_cost import StepCost
from streamrl.recipe.topology import PreparedSet

# constants of the paper
RISE = 1.05
QUIET_ROUNDS = 4
# our own constants
SCALING = 0.8  # share of the ideal speed-up of a decode step that twice the workers give, before it is measured
HORIZON = 20  # rounds within which a switch must pay
LEAST_GAIN = 0.05  # share of a round's time below which the set is not changed
HEADROOM = 0.9  # largest expected share of a KV cache in use
SCATTER = 0.05  # assumed relative standard deviation of a round's seconds, beside the measured one
CERTAINTY = 2.0  # required gain, in standard errors


class RoundMeasured(Struct, frozen=True, kw_only=True):
    """Measurements of one finished round on one set.

    ``seconds``: time from its first request to the last completion of its batch
    ``kv_usage``: largest share of an engine's KV cache in use
    ``requests``: number of launched requests
    ``tokens``: number of sampled tokens
    ``longest``: tokens of the longest completion
    ``prompt``: tokens of a prompt on average"""

    round_kind: str
    engine_set: str
    seconds: float
    preemptions: int
    kv_usage: float
    requests: int
    tokens: float
    longest: float
    prompt: float = 0.0


MOST_REMEMBERED = 16
"""Number of stored rounds of one kind on one set: as completions grow, older rounds are worth less."""
PRIOR_ROUNDS = 2
"""Weight of the assumed scatter, as a number of measured rounds."""


class KindHistory(Struct, frozen=True, kw_only=True):
    """History of one kind of round.

    ``last``: newest round of this kind
    ``ratios``: measured over expected seconds of its rounds, by set
    ``preempted``, ``quiet``: number of rounds in a row with, and without, preemptions on the set in use
    ``rose``: whether the newest round had more than ``RISE`` times the preemptions of the round before
    ``rounds``: number of its rounds
    ``runs``: number of its rounds that began after a round of another kind"""

    last: RoundMeasured
    ratios: dict[str, tuple[float, ...]]
    preempted: int = 0
    quiet: int = 0
    rose: bool = False
    rounds: int = 1
    runs: int = 1

    def error(self, name: str) -> float:
        """Return the relative standard error of the mean ratio of set ``name``, from the scatter of its kind of round
        on all sets and from ``SCATTER``. An unused set has the error of a single round."""
        squares = sum((ratio / fmean(ratios) - 1) ** 2 for ratios in self.ratios.values() for ratio in ratios)
        rounds = sum(len(ratios) - 1 for ratios in self.ratios.values())
        variance = (squares + PRIOR_ROUNDS * SCATTER**2) / (rounds + PRIOR_ROUNDS)
        return math.sqrt(variance / max(len(self.ratios.get(name, ())), 1))


class SetPlan(Struct, frozen=True, kw_only=True):
    """The set for the next round. ``gain_s``: expected gain over the horizon, without the cost of switches;
    ``because``: the decision with its reason (None: the set does not change)."""

    engine_set: str
    gain_s: float = 0.0
    because: Decision | None = None


class SetPlanner:
    """Stores the measured rounds, and plans the set for the next one.

    ``sets``: all sets, first the one that serves first
    ``switch_s``: expected seconds of one switch
    ``cost``: decode step of an engine with one worker"""

    def __init__(self, sets: Sequence[PreparedSet], *, switch_s: float, cost: StepCost) -> None:
        self.sets = {engine_set.name: engine_set for engine_set in sets}
        self.current = sets[0].name
        self.switch_s = switch_s
        self.cost = cost
        self._kinds: dict[str, KindHistory] = {}
        self._last_kind = ""

    def add(self, measured: RoundMeasured) -> None:
        """Store the measurements of one more round."""
        kind = measured.round_kind
        name = measured.engine_set
        expected = expected_seconds(self.sets[name], measured, self.cost)
        before = self._kinds.get(kind) or KindHistory(last=measured, ratios={}, rounds=0, runs=0)
        ratios = (*before.ratios.get(name, ()), max(measured.seconds, 1e-9) / max(expected, 1e-9))
        preempted = 0
        quiet = 0
        rose = False
        if before.last.engine_set == name:  # otherwise these counts start again
            preempted = before.preempted
            quiet = before.quiet
            rose = measured.preemptions > RISE * before.last.preemptions
        runs = before.runs
        if self._last_kind != kind:
            runs += 1
        self._kinds[kind] = KindHistory(
            last=measured,
            ratios={**before.ratios, name: ratios[-MOST_REMEMBERED:]},
            preempted=preempted + 1 if measured.preemptions else 0,
            quiet=0 if measured.preemptions else quiet + 1,
            rose=rose,
            rounds=before.rounds + 1,
            runs=runs,
        )
        self._last_kind = kind

    def plan(self, round_kind: str, rounds_left: int) -> SetPlan:
        """Return the plan for the round of ``round_kind`` that is about to begin."""
        for candidate in self.sets.values():
            if round_kind in candidate.rounds:
                return self._plan_of_recipe(candidate, round_kind)
        best = SetPlan(engine_set=self.current)
        history = self._kinds.get(round_kind)
        horizon = min(HORIZON, rounds_left)
        if history is None or horizon <= 0:
            return best
        for candidate in self.sets.values():
            if candidate.name == self.current or candidate.rounds or not self._worth_a_trial(candidate, history):
                continue
            plan = self._plan_of_switch(candidate, history, horizon)
            if plan.gain_s > best.gain_s:
                best = plan
        return best

    def _plan_of_recipe(self, engine_set: PreparedSet, round_kind: str) -> SetPlan:
        """Return the plan for a kind of round whose set the recipe determines."""
        if engine_set.name == self.current:
            return SetPlan(engine_set=engine_set.name)
        reason = f"{round_kind} rounds belong to set {engine_set.name} (engines.advanced.sets)"
        because = Decision(subject="engine_set", reason=reason)
        return SetPlan(engine_set=engine_set.name, because=because)

    def _worth_a_trial(self, candidate: PreparedSet, history: KindHistory) -> bool:
        """Return whether to consider a set. The expected time of a set without a round of this kind is a guess: its
        trial needs a sign in the preemptions, too."""
        if candidate.name in history.ratios:
            return True
        current = self.sets[self.current]
        if candidate.capacity > current.capacity:
            return history.rose or history.preempted >= QUIET_ROUNDS
        if history.quiet < QUIET_ROUNDS:
            return False
        if math.isinf(candidate.capacity):
            return True
        return history.last.kv_usage * current.capacity / candidate.capacity <= HEADROOM

    def _plan_of_switch(self, candidate: PreparedSet, history: KindHistory, horizon: int) -> SetPlan:
        """Return the plan to switch to ``candidate``, with the larger of two gains: of a switch for good, or of
        switches for all rounds of this kind and back. The plan keeps the current set when the gain is too small."""
        current = self.sets[self.current]
        current_s, _ = self._seconds(current, history)
        candidate_s, _ = self._seconds(candidate, history)
        round_gain_s = self._gain_s(candidate, history)
        if round_gain_s <= 0 or current_s - candidate_s < LEAST_GAIN * current_s:
            return SetPlan(engine_set=current.name)
        rounds = sum(each.rounds for each in self._kinds.values())
        switch_s = self.switch_s
        # One switch for good: the gain counts for rounds of every kind, by their shares.
        mean_gain_s = sum(each.rounds / rounds * self._gain_s(candidate, each) for each in self._kinds.values())
        for_good_s = horizon * mean_gain_s - switch_s
        # Two switches for each run of rounds of this kind: the gain counts for these rounds alone.
        rounds_of_kind = horizon * history.rounds / rounds
        runs_of_kind = max(rounds_of_kind * history.runs / history.rounds, 1.0)
        there_and_back_s = rounds_of_kind * round_gain_s - 2 * switch_s * runs_of_kind
        stays = len(self._kinds) == 1 or for_good_s >= there_and_back_s
        gain_s = for_good_s if stays else there_and_back_s
        last = history.last
        takes = "took" if candidate.name in history.ratios else "is expected to take"
        reason = (
            f"{last.round_kind} rounds: set {candidate.name} {takes} {candidate_s:.3g} s where set {current.name} takes"
            f" {current_s:.3g} s ({last.preemptions} preemptions, KV {last.kv_usage:.0%} full in the last); with a"
            f" switch of {switch_s:.3g} s it saves {gain_s:.3g} s of the next {horizon} rounds"
            f" {'for good' if stays else 'for these rounds alone'}"
        )
        figures = {
            "seconds": current_s,
            "seconds_expected": candidate_s,
            "preemptions": float(last.preemptions),
            "kv_usage": last.kv_usage,
            "switch_s": switch_s,
            "gain_s": gain_s,
        }
        because = Decision(subject="engine_set", reason=reason, figures=figures)
        return SetPlan(engine_set=candidate.name, gain_s=gain_s, because=because)

    def _gain_s(self, candidate: PreparedSet, history: KindHistory) -> float:
        """Return the seconds that a round on ``candidate`` saves at least, with the required certainty."""
        current_s, current_error = self._seconds(self.sets[self.current], history)
        candidate_s, candidate_error = self._seconds(candidate, history)
        saved_s = current_s - candidate_s
        if saved_s <= 0:
            return saved_s
        if candidate.name in history.ratios:
            return saved_s - CERTAINTY * math.hypot(current_s * current_error, candidate_s * candidate_error)
        # Both estimates are corrected by the same ratio, so their errors are the same.
        return saved_s * (1 - CERTAINTY * current_error)

    def _seconds(self, engine_set: PreparedSet, history: KindHistory) -> tuple[float, float]:
        """Return the seconds of a round on ``engine_set``, and their relative error. The expected seconds are corrected
        by the measured ratio of the set; without a round on it, by the ratio of the current set, or of all sets."""
        expected = expected_seconds(engine_set, history.last, self.cost)
        for name in (engine_set.name, self.current):
            if name in history.ratios:
                return expected * fmean(history.ratios[name]), history.error(name)
        means = [fmean(ratios) for ratios in history.ratios.values()]
        return expected * fmean(means), history.error("")


class SetChooser(SetPlanner):
    """Follows the rounds, measures them, and chooses the set for each round when it begins.

    ``now``: seconds on the caller's clock
    ``load``: combined load of the engines in use, with counters since their start
    ``cost``: decode step of an engine with one worker (None: measured, too)"""

    def __init__(
        self, sets: Sequence[PreparedSet], *, steps: int, switch_s: float, cost: StepCost | None = None
    ) -> None:
        super().__init__(sets, switch_s=switch_s, cost=cost or StepCost(base_s=1e-3, per_running_s=0.0))
        self._steps = steps
        self._measured_steps = _FadingLine() if cost is None else None
        self._load = EngineLoad()
        self._open: set[TrajectoryId] = set()
        self._round_kind = ""
        self._sampled_by = -1
        self._began = 0.0
        self._preemptions_began = 0
        self._requests = 0
        self._prompt_tokens = 0
        self._tokens = 0
        self._longest = 0
        self._kv_usage = 0.0

    @property
    def is_between_rounds(self) -> bool:
        """Return whether the next launched group begins a round."""
        return not self._round_kind

    def note_launch(
        self,
        round_kind: str,
        ids: Sequence[TrajectoryId],
        prompt_tokens: int,
        policy_version: int,
        now: float,
        load: EngineLoad,
    ) -> SetPlan | None:
        """Note a group that is about to be launched. Returns the plan when the group is the first of a round that
        another set is to serve. Call ``note_switch`` after the switch."""
        plan = None
        if not self._round_kind:
            self.note_load(load)
            self._round_kind = round_kind
            self._sampled_by = policy_version
            self._began = now
            self._preemptions_began = load.preemptions
            self._requests = 0
            self._prompt_tokens = 0
            self._tokens = 0
            self._longest = 0
            self._kv_usage = 0.0
            plan = self.plan(round_kind, self._steps - policy_version)
        self._requests += len(ids)
        self._prompt_tokens += prompt_tokens * len(ids)
        self._open.update(ids)
        return plan if plan is not None and plan.engine_set != self.current else None

    def note_end(self, trajectory: TrajectoryId, tokens: int | None) -> None:
        """Note a trajectory that has ended. ``tokens``: length of its completion (None: it has none)."""
        if trajectory in self._open:
            self._open.remove(trajectory)
            self._tokens += tokens or 0
            self._longest = max(self._longest, tokens or 0)

    def note_load(self, load: EngineLoad) -> None:
        """Measure the engines since the last call. A few calls a second are enough."""
        before = self._load
        self._load = load
        self._kv_usage = max(self._kv_usage, load.kv_cache_usage)
        steps = load.decode_steps - before.decode_steps
        if steps > 0 and self._measured_steps is not None:
            faster = faster_steps(self.sets[self.current].tensor_parallel_size, SCALING)
            running = (load.decode_tokens - before.decode_tokens) / steps
            self._measured_steps.add(running, faster * (load.decode_s - before.decode_s) / steps)
            self.cost = self._measured_steps.fit()

    def note_round_closed(self, now: float, load: EngineLoad) -> None:
        """Store the measurements of the open round, whose batch is complete."""
        if not self._round_kind:
            return
        self.note_load(load)
        measured = RoundMeasured(
            round_kind=self._round_kind,
            engine_set=self.current,
            seconds=max(now - self._began, 0.0),
            preemptions=load.preemptions - self._preemptions_began,
            kv_usage=self._kv_usage,
            requests=self._requests,
            tokens=float(self._tokens),
            longest=float(self._longest),
            prompt=self._prompt_tokens / max(self._requests, 1),
        )
        self.add(measured)
        self._round_kind = ""
        self._open.clear()

    def note_live_version(self, policy_version: int, now: float, load: EngineLoad) -> None:
        """Note that a version is live. A round that was launched in advance of it begins ``now``."""
        if self._round_kind and self._sampled_by == policy_version:
            self._began = now
            self._preemptions_began = load.preemptions

    def note_switch(self, name: str, now: float, seconds: float, load: EngineLoad, kv_tokens: int = 0) -> None:
        """Note that set ``name`` serves the round, which begins ``now``.

        ``seconds``: duration of the switch
        ``kv_tokens``: reported capacity of its engines, in place of the estimate (0: unknown)"""
        self.current = name
        self.switch_s = seconds
        self._began = now
        if kv_tokens:
            self.sets[name] = replace(self.sets[name], kv_tokens=kv_tokens)
        self.note_load(load)
        self._preemptions_began = load.preemptions


class _FadingLine:
    """Ridge regression of the seconds of a decode step on the number of running requests, with weights that decay with
    each observation. The small ridge decides when the observations do not: with a constant load the slope gets all."""

    DECAY = 0.998
    RIDGE = 1e-6

    def __init__(self) -> None:
        # weighted sums over the observations: of 1, running, seconds, running * running, and running * seconds
        self._sums = [0.0, 0.0, 0.0, 0.0, 0.0]

    def add(self, running: float, seconds: float) -> None:
        """Add one observation."""
        observed = (1.0, running, seconds, running * running, running * seconds)
        self._sums = [self.DECAY * total + value for total, value in zip(self._sums, observed, strict=True)]

    def fit(self) -> StepCost:
        """Return the cost of a step by the observations so far."""
        weight, x, y, xx, xy = self._sums
        ridge = self.RIDGE * weight
        determinant = (weight + ridge) * (xx + ridge) - x * x
        slope = ((weight + ridge) * xy - x * y) / determinant
        if slope <= 0:
            return StepCost(base_s=max(y / weight, 1e-6), per_running_s=0.0)
        base_s = ((xx + ridge) * y - x * xy) / determinant
        return StepCost(base_s=max(base_s, 1e-6), per_running_s=slope)


def faster_steps(tensor_parallel_size: int, scaling: float) -> float:
    """Return the speed-up of a decode step with this number of workers, compared to one. ``scaling``: share of the
    ideal speed-up that doubling the workers gives."""
    return float((2 * scaling) ** math.log2(tensor_parallel_size))


def expected_seconds(engine_set: PreparedSet, measured: RoundMeasured, cost: StepCost) -> float:
    """Estimate the seconds of a round like ``measured`` on ``engine_set``, without a correction by measurements.

    The round takes ``steps x base + tokens x per_running``, divided by the speed-up of the workers. The number of steps
    is the length of the longest completion, or the number that an engine needs for all its tokens when KV memory or
    ``max_num_seqs`` limits the running requests."""
    tokens = measured.tokens / engine_set.count
    requests = max(measured.requests / engine_set.count, 1.0)
    running = min(requests, float(engine_set.max_num_seqs))
    if engine_set.kv_tokens:
        request_tokens = (
            measured.prompt + measured.tokens / max(measured.requests, 1) / 2
        )  # average over its decode steps
        running = min(running, engine_set.kv_tokens / max(request_tokens, 1.0))
    steps = max(measured.longest, tokens / max(running, 1.0))
    seconds = steps * cost.base_s + tokens * cost.per_running_s
    return seconds / faster_steps(engine_set.tensor_parallel_size, SCALING)
