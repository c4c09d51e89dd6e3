"""What a simulation measured, in memory that does not grow with its steps."""

from __future__ import annotations

import math
from collections import deque

import msgspec

STEPS_KEPT = 512
RELATIVE_WIDTH = 0.005


class Spread:
    """Mean, largest and quantiles of positive figures: counts in bins that are half a percent wide."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._bins: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Count one figure."""
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value
        place = round(math.log(max(value, 1e-9)) / RELATIVE_WIDTH)
        self._bins[place] = self._bins.get(place, 0) + 1

    @property
    def mean(self) -> float:
        """0.0 for no figures."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The figure below which ``share`` of all lie, within half a percent. 0.0 for no figures."""
        wanted, seen = share * self.count, 0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen >= wanted:
                return min(math.exp(place * RELATIVE_WIDTH), self.largest)
        return 0.0


class Lengths:
    """Completion lengths: one counter a length, so no more of them than the cap."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.counts: dict[int, int] = {}

    def add(self, lengths: list[int]) -> None:
        """Count the completions of one group."""
        counts = self.counts
        for length in lengths:
            counts[length] = counts.get(length, 0) + 1

    def summary(self) -> LengthSummary:
        """Mean, P95, share at the cap."""
        count = sum(self.counts.values())
        if not count:
            return LengthSummary(count=0, mean=0.0, p95=0, longest=0, cap_share=0.0)
        seen, p95 = 0, 0
        for length in sorted(self.counts):
            seen += self.counts[length]
            if seen >= 0.95 * count:
                p95 = length
                break
        return LengthSummary(
            count=count,
            mean=sum(length * n for length, n in self.counts.items()) / count,
            p95=p95,
            longest=max(self.counts),
            cap_share=self.counts.get(self.cap, 0) / count,
        )


class LengthSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``count`` completions, in tokens. ``cap_share``: those that reached the cap."""

    count: int
    mean: float
    p95: int
    longest: int
    cap_share: float


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step, from the version before it being live until its own is. ``longest``: trained completion."""

    policy_version: int
    round_kind: str
    step_s: float
    rollout_s: float
    training_s: float
    push_s: float
    groups: int
    samples: int
    trained_tokens: int
    generated_tokens: float
    longest: int
    rollout_bubble: float
    step_bubble: float


class KindSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All steps of one kind of round. ``longest_mean``: mean over rounds of the longest trained completion."""

    round_kind: str
    steps: int
    step_s: float
    rollout_s: float
    rollout_s_max: float
    longest_mean: float
    trained: LengthSummary


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over the steps that count (a warm-up is left out). Times in simulated seconds.

    ``goodput``: trained tokens a second; ``groups_s``: trained groups a second. ``unbiased``: lengths as the prompts
    that were launched would give them; ``trained``: those trained on. Bubble ratios: idle share of ``capacity``
    requests, over the rollout and over the whole step. Staleness: of the oldest token of each trained trajectory.
    ``wait_mean``, ``wait_max``: optimizer steps between the first launch of a prompt and its training.
    ``straggler_rate``: mean over trained samples of the share of their step's groups whose longest completion is
    ``straggler_ratio`` times the median one or was truncated (what SAGC's budget is about).
    """

    rounds: str
    steps: int
    seconds: float
    trajectories: int
    capacity: int
    step_s_mean: float
    step_s_p50: float
    step_s_p95: float
    goodput: float
    groups_s: float
    rollout_bubble: float
    step_bubble: float
    staleness_mean: float
    staleness_max: int
    unbiased: LengthSummary
    trained: LengthSummary
    kinds: tuple[KindSummary, ...]
    generated_tokens: float
    trained_tokens: int
    wait_mean: float
    wait_max: int
    straggler_rate: float
    group_sizes: dict[int, int]
    preemptions: int
    trainer_idle: float
    dropped: dict[str, int]
    finished: str
    recent: tuple[StepRow, ...] = ()
    reasons: dict[str, int] = {}

    @property
    def wasted_share(self) -> float:
        """Share of generated tokens that no step trained."""
        return max(1 - self.trained_tokens / self.generated_tokens, 0.0) if self.generated_tokens else 0.0

    @property
    def length_ratio(self) -> float:
        """Mean trained length over mean unbiased length."""
        return self.trained.mean / self.unbiased.mean if self.unbiased.mean else 0.0


class KindTally:
    """Running sums of one kind of round."""

    def __init__(self, cap: int) -> None:
        self.step = Spread()
        self.rollout = Spread()
        self.longest = Spread()
        self.trained = Lengths(cap)

    def summary(self, kind: str) -> KindSummary:
        """What it has seen."""
        return KindSummary(
            round_kind=kind,
            steps=self.step.count,
            step_s=self.step.mean,
            rollout_s=self.rollout.mean,
            rollout_s_max=self.rollout.largest,
            longest_mean=self.longest.mean,
            trained=self.trained.summary(),
        )


class Tally:
    """Everything that the report is made of; ``begin`` again after a warm-up."""

    def __init__(self, cap: int, straggler_ratio: float) -> None:
        self._cap = cap
        self._ratio = straggler_ratio
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Forget all; count from ``now``."""
        self.began_s = now
        self.step = Spread()
        self.kinds: dict[str, KindTally] = {}
        self.unbiased = Lengths(self._cap)
        self.trained_tokens = self.samples = self.groups = 0
        self.straggler_shares = 0.0
        self.generated = self.busy_step = self.busy_rollout = self.rollout_s = self.step_s = self.trainer_s = 0.0
        self.staleness_total = self.staleness_max = 0
        self.waits = self.wait_total = self.wait_max = 0
        self.group_sizes: dict[int, int] = {}
        self.reasons: dict[str, int] = {}
        self.recent: deque[StepRow] = deque(maxlen=STEPS_KEPT)

    def kind(self, name: str) -> KindTally:
        """The sums of one kind of round."""
        if name not in self.kinds:
            self.kinds[name] = KindTally(self._cap)
        return self.kinds[name]

    def group(self, kind: str, lengths: list[int], staleness: int) -> bool:
        """One trained group; ``staleness``: sum over its trajectories. Whether it straggled."""
        self.kind(kind).trained.add(lengths)
        size = len(lengths)
        self.groups += 1
        self.samples += size
        self.trained_tokens += sum(lengths)
        self.staleness_total += staleness
        self.group_sizes[size] = self.group_sizes.get(size, 0) + 1
        longest = max(lengths)
        ordered = sorted(lengths)
        median = (ordered[size // 2] + ordered[(size - 1) // 2]) / 2
        return longest >= self._ratio * median or longest >= self._cap

    def trained(self) -> LengthSummary:
        """Lengths of all that was trained, whatever its kind of round."""
        lengths = Lengths(self._cap)
        for tally in self.kinds.values():
            for length, count in tally.trained.counts.items():
                lengths.counts[length] = lengths.counts.get(length, 0) + count
        return lengths.summary()

    def waited(self, updates: int) -> None:
        """A prompt was trained so many updates after its first launch."""
        self.waits += 1
        self.wait_total += updates
        self.wait_max = max(self.wait_max, updates)

    def close(self, row: StepRow, straggled: int, busy_rollout: float, busy_step: float) -> None:
        """One step ended; ``straggled``: groups of its batch; ``busy_...``: integral of running requests over its
        rollout, and over all of it."""
        self.straggler_shares += row.samples * straggled / max(row.groups, 1)
        self.step.add(row.step_s)
        tally = self.kind(row.round_kind)
        tally.step.add(row.step_s)
        tally.rollout.add(row.rollout_s)
        tally.longest.add(row.longest)
        self.generated += row.generated_tokens
        self.busy_rollout += busy_rollout
        self.busy_step += busy_step
        self.rollout_s += row.rollout_s
        self.step_s += row.step_s
        self.recent.append(row)
