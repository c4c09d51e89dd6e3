"""Choice of the prepared set of engines for the next round (RollPacker, arXiv 2509.21009, section 4.2): pure decisions.

A set is a number of engines and a tensor-parallel size, on the same devices; one is in use. Few engines with many
workers have more room for KV, since weights are stored once for each engine, and take a decode step faster, but not as
much faster as they have workers. So a race that is short of KV wants another set than a long tail does.

The paper doubles the tensor-parallel size when preemptions rise above 1.05 times the last round's and halves it after
four rounds without any, and calls a switch negligible. Here that rule only says when an *untried* set is worth a trial.
A switch is decided in seconds: what each set took, or is expected to take, over the rounds that are left, against what
the switches cost. A difference that the scatter of rounds could explain is none, so a steady load settles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec

from streamrl.base.messages import EngineLoad
from streamrl.base.types import TrajectoryId
from streamrl.control.actions import Decision
from streamrl.engines.step_cost import StepCost
from streamrl.recipe.topology import PreparedSet

# the paper's constants; the others are ours
RISE = 1.05
QUIET_ROUNDS = 4
SCALING = 0.8  # share of the ideal speed-up of a decode step that doubling the workers gives, where not measured
HORIZON = 20  # rounds over which a switch must pay
LEAST_GAIN = 0.05  # share of a round's time below which nothing is done
HEADROOM = 0.9  # share of a cache that may be expected to fill
SCATTER = 0.05  # relative standard deviation of a round's seconds that is assumed beside what is measured
CERTAINTY = 2.0  # of a gain, in standard errors


class RoundMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """One finished round on one set: ``seconds`` from its first request to its last that was waited for. ``kv_usage``:
    largest share of an engine's cache in use. ``requests`` launched, ``tokens`` sampled, those of the ``longest``
    completion that was waited for, and of a ``prompt`` in the mean."""

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
"""Rounds of one kind on one set: as lengths grow, the older ones say less."""
PRIOR_ROUNDS = 2
"""How many rounds the assumed scatter counts for, beside those that were measured."""


class KindHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of round. ``ratios``: seconds that rounds took over what was expected of them, by set. ``preempted``,
    ``quiet``: rounds in a row with and without preemption on the set in use; ``rose``: the last preempted more than
    ``RISE`` times the one before. ``rounds`` and ``runs``: how many there were, and how often they began after a round
    of another kind."""

    last: RoundMeasured
    ratios: dict[str, tuple[float, ...]]
    preempted: int = 0
    quiet: int = 0
    rose: bool = False
    rounds: int = 1
    runs: int = 1

    def error(self, name: str) -> float:
        """Standard error of the mean ratio of set ``name``, as a share of it: from how much such rounds scatter on any
        set, and ``SCATTER``. As of one round where it was never used."""
        squares = sum((ratio / fmean(known) - 1) ** 2 for known in self.ratios.values() for ratio in known)
        rounds = sum(len(known) - 1 for known in self.ratios.values())
        variance = (squares + PRIOR_ROUNDS * SCATTER**2) / (rounds + PRIOR_ROUNDS)
        return math.sqrt(variance / max(len(self.ratios.get(name, ())), 1))


class SetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``because`` is None where nothing changes. ``gain_s``: expected over the horizon, switches paid."""

    engine_set: str
    gain_s: float = 0.0
    because: Decision | None = None


class SetPlanner:
    """Remembers what rounds took, and plans which set serves the next one. ``sets``: the one that serves first comes
    first. ``switch_s``: what one switch is taken to cost. ``cost``: of a decode step of an engine with one worker."""

    def __init__(self, sets: Sequence[PreparedSet], *, switch_s: float, cost: StepCost) -> None:
        self.sets = {one.name: one for one in sets}
        self.current = sets[0].name
        self.switch_s = switch_s
        self.cost = cost
        self._kinds: dict[str, KindHistory] = {}
        self._last_kind = ""

    def add(self, measured: RoundMeasured) -> None:
        """Remember one more round."""
        kind = measured.round_kind
        name = measured.engine_set
        expected = expected_seconds(self.sets[name], measured, self.cost)
        before = self._kinds.get(kind) or KindHistory(last=measured, ratios={}, rounds=0, runs=0)
        same = before.last.engine_set == name
        ratios = (*before.ratios.get(name, ()), max(measured.seconds, 1e-9) / max(expected, 1e-9))
        self._kinds[kind] = KindHistory(
            last=measured,
            ratios={**before.ratios, name: ratios[-MOST_REMEMBERED:]},
            preempted=(before.preempted * same + 1) if measured.preemptions else 0,
            quiet=0 if measured.preemptions else before.quiet * same + 1,
            rose=same and measured.preemptions > RISE * before.last.preemptions,
            rounds=before.rounds + 1,
            runs=before.runs + (self._last_kind != kind),
        )
        self._last_kind = kind

    def plan(self, round_kind: str, rounds_left: int) -> SetPlan:
        """Return the set that serves the round of ``round_kind`` which is about to begin."""
        for one in self.sets.values():
            if round_kind in one.rounds:
                reason = f"{round_kind} rounds belong to set {one.name} (engines.advanced.sets)"
                because = Decision(subject="engine_set", reason=reason, figures={})
                return SetPlan(engine_set=one.name, because=because if one.name != self.current else None)
        stay = SetPlan(engine_set=self.current)
        kind = self._kinds.get(round_kind)
        horizon = min(HORIZON, rounds_left)
        if kind is None or horizon <= 0:
            return stay
        others = [one for one in self.sets.values() if one.name != self.current and not one.rounds]
        plans = [self._weighed(one, kind, horizon) for one in others if self._worth_a_trial(one, kind)]
        return max((plan for plan in plans if plan.gain_s > 0), key=lambda plan: plan.gain_s, default=stay)

    def _worth_a_trial(self, one: PreparedSet, kind: KindHistory) -> bool:
        """Return whether to try a set that such rounds were never on: its expectation is a guess, and needs a sign
        beside it."""
        here = self.sets[self.current]
        if one.name in kind.ratios:
            return True
        if one.capacity > here.capacity:
            return kind.rose or kind.preempted >= QUIET_ROUNDS
        fits = math.isinf(one.capacity) or kind.last.kv_usage * here.capacity / one.capacity <= HEADROOM
        return kind.quiet >= QUIET_ROUNDS and fits

    def _weighed(self, one: PreparedSet, kind: KindHistory, horizon: int) -> SetPlan:
        """Return the gain of going to ``one``: for good, or for rounds of this kind and back, whichever is more."""
        here = self.sets[self.current]
        switch_s = self.switch_s

        def gain(of: KindHistory) -> float:
            """Seconds a round, at least, with the certainty that is asked for."""
            was, was_error = self._seconds(here, of)
            would, would_error = self._seconds(one, of)
            saved = was - would
            if saved <= 0:
                return saved
            if one.name in of.ratios:
                return saved - CERTAINTY * math.hypot(was * was_error, would * would_error)
            return saved * (1 - CERTAINTY * was_error)  # both are corrected by one ratio, and err together

        rounds = sum(each.rounds for each in self._kinds.values())
        mine = gain(kind)
        was, _ = self._seconds(here, kind)
        would, _ = self._seconds(one, kind)
        if mine <= 0 or was - would < LEAST_GAIN * was:
            return SetPlan(engine_set=here.name)
        for_good = horizon * sum(each.rounds / rounds * gain(each) for each in self._kinds.values()) - switch_s
        of_this_kind = horizon * kind.rounds / rounds
        there_and_back = of_this_kind * mine - 2 * switch_s * max(of_this_kind * kind.runs / kind.rounds, 1.0)
        stays = len(self._kinds) == 1 or for_good >= there_and_back
        total = for_good if stays else there_and_back
        tried = "took" if one.name in kind.ratios else "is expected to take"
        reason = (
            f"{kind.last.round_kind} rounds: set {one.name} {tried} {would:.3g} s where set {here.name} takes"
            f" {was:.3g} s ({kind.last.preemptions} preemptions, KV {kind.last.kv_usage:.0%} full in the last); with a"
            f" switch of {switch_s:.3g} s it saves {total:.3g} s of the next {horizon} rounds"
            f" {'for good' if stays else 'for these rounds alone'}"
        )
        figures = {
            "seconds": was,
            "seconds_expected": would,
            "preemptions": float(kind.last.preemptions),
            "kv_usage": kind.last.kv_usage,
            "switch_s": switch_s,
            "gain_s": total,
        }
        because = Decision(subject="engine_set", reason=reason, figures=figures)
        return SetPlan(engine_set=one.name, gain_s=total, because=because)

    def _seconds(self, one: PreparedSet, kind: KindHistory) -> tuple[float, float]:
        """Seconds of a round of that kind on ``one``, and the relative error of that. A set that such rounds were never
        on is corrected as the set in use is, or as those that are known are."""
        expected = expected_seconds(one, kind.last, self.cost)
        name = next((name for name in (one.name, self.current) if name in kind.ratios), "")
        means = [fmean(known) for of, known in kind.ratios.items() if name in (of, "")]
        return expected * fmean(means), kind.error(name)


class SetChooser(SetPlanner):
    """Follows rounds, measures them, and chooses the set for each as it begins. ``now``: seconds on the caller's clock;
    ``load``: of the engines in use together, with counters since they exist. ``cost`` None: it is measured, too."""

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
        """Return whether the next group that is launched begins a round."""
        return not self._round_kind

    def launched(
        self,
        round_kind: str,
        ids: Sequence[TrajectoryId],
        prompt_tokens: int,
        policy_version: int,
        now: float,
        load: EngineLoad,
    ) -> SetPlan | None:
        """Note a group that is about to be ordered. Where it is the first of a round, and another set shall serve that,
        return the plan; ``switched`` when it was carried out."""
        plan = None
        if not self._round_kind:
            self.looked(load)
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

    def ended(self, trajectory: TrajectoryId, tokens: int | None) -> None:
        """Note one that came back, with a completion of so many tokens, or without one."""
        if trajectory in self._open:
            self._open.remove(trajectory)
            self._tokens += tokens or 0
            self._longest = max(self._longest, tokens or 0)

    def looked(self, load: EngineLoad) -> None:
        """Take what the engines did since the last look; a few times a second is enough."""
        before = self._load
        self._load = load
        self._kv_usage = max(self._kv_usage, load.kv_cache_usage)
        steps = load.decode_steps - before.decode_steps
        if steps > 0 and self._measured_steps is not None:
            faster = faster_steps(self.sets[self.current].tensor_parallel_size, SCALING)
            running = (load.decode_tokens - before.decode_tokens) / steps
            self._measured_steps.add(running, faster * (load.decode_s - before.decode_s) / steps)
            self.cost = self._measured_steps.fit()

    def round_closed(self, now: float, load: EngineLoad) -> None:
        """The batch of the round is complete: measure it."""
        if not self._round_kind:
            return
        self.looked(load)
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

    def went_live(self, policy_version: int, now: float, load: EngineLoad) -> None:
        """A version is live: a round that was launched in advance of it begins ``now``."""
        if self._round_kind and self._sampled_by == policy_version:
            self._began = now
            self._preemptions_began = load.preemptions

    def switched(self, name: str, now: float, seconds: float, load: EngineLoad, kv_tokens: int = 0) -> None:
        """Set ``name`` serves the round, which begins ``now``, after a switch of so many seconds. ``kv_tokens``: what
        its engines hold, which was an estimate until they were started (0: unknown)."""
        self.current = name
        self.switch_s = seconds
        self._began = now
        if kv_tokens:
            self.sets[name] = msgspec.structs.replace(self.sets[name], kv_tokens=kv_tokens)
        self.looked(load)
        self._preemptions_began = load.preemptions


class _FadingLine:
    """Least squares of the seconds of a decode step by how many requests run; earlier observations fade. A little ridge
    decides what the observations leave open: where the load hardly varies, the slope takes it all."""

    KEPT = 0.998
    RIDGE = 1e-6

    def __init__(self) -> None:
        self._weight = 0.0
        self._x = 0.0
        self._y = 0.0
        self._xx = 0.0
        self._xy = 0.0

    def add(self, running: float, seconds: float) -> None:
        sums = ((self._weight, 1.0), (self._x, running), (self._y, seconds), (self._xx, running * running))
        self._weight, self._x, self._y, self._xx = (self.KEPT * old + new for old, new in sums)
        self._xy = self.KEPT * self._xy + running * seconds

    def fit(self) -> StepCost:
        ridge = self.RIDGE * self._weight
        ww = self._weight + ridge
        xx = self._xx + ridge
        slope = (ww * self._xy - self._x * self._y) / (ww * xx - self._x * self._x)
        if slope <= 0:
            return StepCost(base_s=max(self._y / self._weight, 1e-6), per_running_s=0.0)
        base_s = (xx * self._y - self._x * self._xy) / (ww * xx - self._x * self._x)
        return StepCost(base_s=max(base_s, 1e-6), per_running_s=slope)


def faster_steps(tensor_parallel_size: int, scaling: float) -> float:
    """Factor by which a decode step is faster with so many workers than with one."""
    return float((2 * scaling) ** math.log2(tensor_parallel_size))


def expected_seconds(one: PreparedSet, load: RoundMeasured, cost: StepCost) -> float:
    """Estimate the seconds of a round like ``load`` on ``one``, before measurements correct it. As many decode steps as
    the longest completion has tokens, or as the tokens of an engine need when KV or ``max_num_seqs`` bounds how many
    requests run: ``steps x base + tokens x per_running``, both faster with workers."""
    tokens = load.tokens / one.count
    requests = max(load.requests / one.count, 1.0)
    held = load.prompt + load.tokens / max(load.requests, 1) / 2  # of a request, in the mean of its life
    running = min(requests, float(one.max_num_seqs), one.kv_tokens / max(held, 1.0) if one.kv_tokens else math.inf)
    steps = max(load.longest, tokens / max(running, 1.0))
    return (steps * cost.base_s + tokens * cost.per_running_s) / faster_steps(one.tensor_parallel_size, SCALING)
