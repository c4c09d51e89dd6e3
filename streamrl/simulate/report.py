"""Report of a simulation: its steps, and their sums in memory that does not grow with the steps."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

import msgspec
import numpy as np

from streamrl.buffers.rollout_buffer import Accounting
from streamrl.control.actions import StepOptimizer
from streamrl.control.policies.sagc import LengthTable, straggler_rate
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import SMALLEST_SIZE
from streamrl.simulate.engines import EngineClock, Request, RunningTogether

STEPS_REPORTED = 512
MOST_WAITING_PROMPTS = 1 << 16


class LengthSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of ``count`` completions, in tokens. ``cap_share``: share that reached the cap."""

    count: int = 0
    mean: float = 0.0
    p95: int = 0
    longest: int = 0
    cap_share: float = 0.0


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step, from the version before it being live until its own is; ``began_s``: of the whole run.
    ``longest``: trained completion."""

    policy_version: int
    round_kind: str
    began_s: float
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
    longest_mean: float
    trained: LengthSummary


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over the steps that count (a warm-up is left out). Times in simulated seconds.

    ``goodput``: trained tokens a second; ``groups_s``: trained groups a second. ``unbiased``: lengths as the prompts
    that were launched would give them; ``trained``: those trained on. Bubble ratios: idle share of ``capacity``
    requests, over the rollout and over the whole step. Staleness: of the oldest token of each trained trajectory.
    ``step_s_p50``, ``step_s_p95``: of the steps in ``recent``. ``wait_mean``, ``wait_max``: optimizer steps between the
    first launch of a prompt and its training. ``straggler_rate``: mean over trained batches of the share of their
    step's groups that straggle (SAGC's budget).
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


def _quantile(counts: Counter[int], wanted: float) -> int:
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    return 0


def summary_of(counts: Counter[int], cap: int) -> LengthSummary:
    """Summarise lengths that are counted by length."""
    count = counts.total()
    if not count:
        return LengthSummary()
    return LengthSummary(
        count=count,
        mean=sum(length * n for length, n in counts.items()) / count,
        p95=_quantile(counts, 0.95 * count),
        longest=max(counts),
        cap_share=counts[cap] / count,
    )


class KindSums(msgspec.Struct):
    """Sums over the rounds of one kind."""

    steps: int = 0
    step_s: float = 0.0
    rollout_s: float = 0.0
    longest: int = 0
    lengths: Counter[int] = msgspec.field(default_factory=Counter)


class StepSums(msgspec.Struct):
    """Sums over what joined before one step, beside what its order says. ``longest``: completion; ``tables``: lengths
    of each group."""

    kind: str = ""
    longest: int = 0
    tables: list[LengthTable] = []


class Sums(msgspec.Struct):
    """All that the report is made of, since ``began_s``. ``busy_...``: integral of running requests over rollouts, and
    over steps; ``stragglers``: sum over trained batches of the share of their step's groups that straggled."""

    began_s: float = 0.0
    kinds: defaultdict[str, KindSums] = msgspec.field(default_factory=lambda: defaultdict(KindSums))
    unbiased: Counter[int] = msgspec.field(default_factory=Counter)
    batches: int = 0
    stragglers: float = 0.0
    generated: float = 0.0
    busy_step: float = 0.0
    busy_rollout: float = 0.0
    staleness: int = 0
    staleness_max: int = 0
    waits: int = 0
    wait_total: int = 0
    wait_max: int = 0
    preemptions_before: int = 0
    group_sizes: Counter[int] = msgspec.field(default_factory=Counter)
    reasons: Counter[str] = msgspec.field(default_factory=Counter)
    recent: deque[StepRow] = msgspec.field(default_factory=lambda: deque(maxlen=STEPS_REPORTED))


class StepLedger:
    """Follows one step after the other. ``capacity``: what bubble ratios count as all of it, in requests.
    ``trained_s``, ``publishing_s``: when the trainer had stepped and the push began."""

    def __init__(
        self,
        settings: ControlSettings,
        engines: Sequence[EngineClock],
        together: RunningTogether,
        capacity: int,
        cap: int,
    ) -> None:
        self.capacity = together.capacity = capacity
        self._together = together
        self._settings = settings
        self._engines = engines
        self._cap = cap
        self._sums = Sums()
        self._first_launch: dict[int, int] = {}
        self._began = self._full = self.trained_s = self.publishing_s = 0.0
        self._busy_began = self._busy_full = self._generated_began = 0.0
        self._open = StepSums()
        self._closed = StepSums()
        self._step: StepOptimizer | None = None

    # ---- what happens ------------------------------------------------------------------------------

    def launched(self, prompt: int, attempt: int, lengths: list[int], live_version: int) -> None:
        """Count a group that was launched; ``lengths``: of its trajectories where none is stopped."""
        if attempt == 0:
            self._sums.unbiased.update(lengths)
            self._first_launch.setdefault(prompt, live_version)
            if len(self._first_launch) > MOST_WAITING_PROMPTS:  # prompts that were dropped for good
                del self._first_launch[next(iter(self._first_launch))]

    def explained(self, subject: str) -> None:
        """Count a decision about ``subject``."""
        self._sums.reasons[subject] += 1

    def joined(self, requests: list[Request], trainer_version: int, kind: str) -> int:
        """Count a group that joined the batch which ``trainer_version`` trains. Returns its trained tokens."""
        sums, batch = self._sums, self._open
        lengths = [request.length for request in requests]
        oldest = [request.first_version for request in requests]
        size, tokens, longest = len(lengths), sum(lengths), max(lengths)
        sums.kinds[kind].lengths.update(lengths)
        sums.group_sizes[size] += 1
        sums.staleness += sum(trainer_version - version for version in oldest)
        sums.staleness_max = max(sums.staleness_max, trainer_version - min(oldest))
        first = self._first_launch.pop(requests[0].prompt, None)
        if first is not None:
            sums.waits += 1
            sums.wait_total += trainer_version - first
            sums.wait_max = max(sums.wait_max, trainer_version - first)
        batch.kind = kind
        batch.longest = max(batch.longest, longest)
        if size >= SMALLEST_SIZE:
            batch.tables.append(np.array([[math.inf if length >= self._cap else length for length in lengths]]))
        return tokens

    def batch_full(self, now: float, step: StepOptimizer) -> None:
        """The trainer steps. What joins from here on is of the next, also while this is pushed."""
        self._full = now
        self._closed, self._open = self._open, StepSums()
        self._step = step
        self._advance(now)
        self._busy_full = self._together.busy_s

    def live(self, now: float) -> StepRow:
        """Every engine holds the version that the step made: the step is over."""
        step = self._step
        assert step is not None
        self._advance(now)
        busy = self._together.busy_s
        generated = sum(engine.generated for engine in self._engines)
        rollout_s, step_s = self._full - self._began, now - self._began
        busy_rollout, busy_step = self._busy_full - self._busy_began, busy - self._busy_began
        batch, sums = self._closed, self._sums
        row = StepRow(
            policy_version=step.policy_version,
            round_kind=batch.kind,
            began_s=self._began,
            step_s=step_s,
            rollout_s=rollout_s,
            training_s=self.trained_s - self._full,
            push_s=now - self.publishing_s,
            groups=step.groups,
            samples=step.samples,
            trained_tokens=step.trained_tokens,
            generated_tokens=generated - self._generated_began,
            longest=batch.longest,
            rollout_bubble=_idle(busy_rollout, self.capacity * rollout_s),
            step_bubble=_idle(busy_step, self.capacity * step_s),
        )
        straggled = straggler_rate(batch.tables, self._settings.group_sizing.straggler_ratio)
        sums.batches += step.batches
        sums.stragglers += step.batches * (straggled or 0.0)
        kind = sums.kinds[batch.kind]
        kind.steps += 1
        kind.step_s += step_s
        kind.rollout_s += rollout_s
        kind.longest += batch.longest
        sums.generated += row.generated_tokens
        sums.busy_rollout += busy_rollout
        sums.busy_step += busy_step
        sums.recent.append(row)
        self._began, self._busy_began, self._generated_began = now, busy, generated
        return row

    def begin(self, now: float) -> None:
        """The warm-up is over: figures count from here."""
        preemptions = sum(engine.preemptions for engine in self._engines)
        self._sums = Sums(began_s=now, preemptions_before=preemptions)

    def _advance(self, now: float) -> None:
        for engine in self._engines:
            engine.advance(now)
        self._together.advance(now)

    # ---- the report --------------------------------------------------------------------------------

    def report(self, finished: str, accounting: Accounting) -> SimulationReport:
        """Report over the steps that count."""
        sums, cap = self._sums, self._cap
        seconds = max(self._began - sums.began_s, 1e-12)
        kinds = sums.kinds.values()
        steps = sum(kind.steps for kind in kinds)
        step_s = sorted(row.step_s for row in sums.recent) or [0.0]
        trained = sum((kind.lengths for kind in kinds), Counter[int]())
        tokens = sum(length * count for length, count in trained.items())
        return SimulationReport(
            rounds=str(self._settings.rounds),
            steps=steps,
            seconds=seconds,
            trajectories=trained.total(),
            capacity=self.capacity,
            step_s_mean=seconds / max(steps, 1),
            step_s_p50=step_s[len(step_s) // 2],
            step_s_p95=step_s[len(step_s) * 95 // 100],
            goodput=tokens / seconds,
            groups_s=sums.group_sizes.total() / seconds,
            rollout_bubble=_idle(sums.busy_rollout, self.capacity * sum(kind.rollout_s for kind in kinds)),
            step_bubble=_idle(sums.busy_step, self.capacity * seconds),
            staleness_mean=sums.staleness / max(trained.total(), 1),
            staleness_max=sums.staleness_max,
            unbiased=summary_of(sums.unbiased, cap),
            trained=summary_of(trained, cap),
            kinds=tuple(_kind_summary(name, kind, cap) for name, kind in sorted(sums.kinds.items())),
            generated_tokens=sums.generated,
            trained_tokens=tokens,
            wait_mean=sums.wait_total / max(sums.waits, 1),
            wait_max=sums.wait_max,
            straggler_rate=sums.stragglers / max(sums.batches, 1),
            group_sizes=dict(sorted(sums.group_sizes.items())),
            preemptions=sum(engine.preemptions for engine in self._engines) - sums.preemptions_before,
            dropped=accounting.dropped,
            finished=finished,
            recent=tuple(sums.recent),
            reasons=dict(sums.reasons),
        )


def _kind_summary(name: str, kind: KindSums, cap: int) -> KindSummary:
    return KindSummary(
        round_kind=name,
        steps=kind.steps,
        step_s=kind.step_s / max(kind.steps, 1),
        rollout_s=kind.rollout_s / max(kind.steps, 1),
        longest_mean=kind.longest / max(kind.steps, 1),
        trained=summary_of(kind.lengths, cap),
    )


def _idle(busy: float, whole: float) -> float:
    return max(1 - busy / whole, 0.0) if whole > 0 else 0.0
