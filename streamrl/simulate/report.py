"""Report of a simulation, and the ledger that ``simulation`` keeps of its steps. Commands print the report, and
``what_if`` compares reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf

import numpy as np
from msgspec import Struct, field

from streamrl.buffers.rollout_buffer import Accounting
from streamrl.control.actions import StepOptimizer
from streamrl.control.policies.sagc import LengthTable, straggler_rate
from streamrl.control.settings import ControlSettings
from streamrl.observe.report.step_timer import idle_share
from streamrl.recipe.scheduling import SMALLEST_SIZE
from streamrl.simulate.engines import EngineClock, Request, RunningTogether

STEPS_REPORTED = 512
MOST_WAITING_PROMPTS = 1 << 16


class LengthSummary(Struct, frozen=True, kw_only=True):
    """Summary of ``count`` completions, in tokens. ``cap_share``: share that reached the cap."""

    count: int = 0
    mean: float = 0.0
    p95: int = 0
    longest: int = 0
    cap_share: float = 0.0


class StepRow(Struct, frozen=True, kw_only=True):
    """One optimizer step, from the time at which the version before it went live until its own version is live.

    ``began_s``: begin of the step since the simulation began;
    ``step_s``, ``rollout_s``, ``training_s``, ``push_s``: seconds of the step and its parts;
    ``longest``: longest trained completion;
    ``rollout_bubble``, ``free_slots``: free share of the capacity, in the rollout and in the full step."""

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
    free_slots: float


class KindSummary(Struct, frozen=True, kw_only=True):
    """Means over all steps of one kind of round. ``longest_mean``: mean of the longest trained completion of a round;
    ``trained``: lengths of the trained completions."""

    round_kind: str
    steps: int
    step_s: float
    rollout_s: float
    longest_mean: float
    trained: LengthSummary


class SimulationReport(Struct, frozen=True, kw_only=True):
    """Figures over the steps that count, without the warm-up. Times are simulated seconds.

    ``rounds``: kind of rounds;
    ``capacity``: slots of full engines, in requests;
    ``step_s_p50``, ``step_s_p95``: quantiles over the steps in ``recent``;
    ``goodput``: trained tokens a second;
    ``groups_s``: trained groups a second;
    ``rollout_bubble``, ``free_slots``: free share of ``capacity``, in the rollout and in the full step;
    ``sampling_s``, ``environment_s``: mean seconds of a trained trajectory outside of its environment and in it;
    ``staleness_mean``, ``staleness_max``: staleness of the oldest token;
    ``unbiased``: lengths of all launched prompts, as if no trajectory were stopped;
    ``trained``: lengths of the trained completions;
    ``kinds``: figures by kind of round;
    ``wait_mean``, ``wait_max``: optimizer steps between the first launch of a prompt and its training;
    ``straggler_rate``: mean over trained batches of the share of their step's groups that straggle (SAGC's budget);
    ``group_sizes``: number of trained groups by size;
    ``dropped``: trajectories by reason;
    ``finished``: reason of the end;
    ``recent``: last steps;
    ``reasons``: number of decisions by subject;
    ``push_s``: mean seconds of a step from publishing to live;
    ``transfer_s``: part of ``push_s`` for the transfer to all hosts, where hosts are modelled;
    ``hosts``: hosts at the end."""

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
    free_slots: float
    sampling_s: float
    environment_s: float
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
    push_s: float = 0.0
    transfer_s: float = 0.0
    hosts: int = 0
    hosts_lost: int = 0
    hosts_joined: int = 0
    requests_moved: int = 0

    @property
    def wasted_share(self) -> float:
        """Share of generated tokens that no step trained."""
        return max(1 - self.trained_tokens / self.generated_tokens, 0.0) if self.generated_tokens else 0.0

    @property
    def push_share(self) -> float:
        """Share of a step that the push takes."""
        return self.push_s / self.step_s_mean if self.step_s_mean else 0.0

    @property
    def length_ratio(self) -> float:
        """Mean trained length over mean unbiased length."""
        return self.trained.mean / self.unbiased.mean if self.unbiased.mean else 0.0


def _quantile(counts: Counter[int], rank: float) -> int:
    """The value at ``rank`` among the counted values, ascending."""
    total = 0
    for value in sorted(counts):
        total += counts[value]
        if total >= rank:
            return value
    return 0


def summary_of(counts: Counter[int], cap: int) -> LengthSummary:
    """Summarise lengths. ``counts``: number of completions by length."""
    count = counts.total()
    if not count:
        return LengthSummary()
    return LengthSummary(
        count=count,
        mean=_total(counts) / count,
        p95=_quantile(counts, 0.95 * count),
        longest=max(counts),
        cap_share=counts[cap] / count,
    )


class JoinedBatch(Struct):
    """Groups of one batch. ``kind``: kind of their round; ``longest``: longest completion; ``tables``: lengths of each
    group."""

    kind: str = ""
    longest: int = 0
    tables: list[LengthTable] = []


class Sums(Struct):
    """Sums since ``began_s``, of which the report is made.

    ``preemptions_before``: preemptions until ``began_s``;
    ``rows``: steps;
    ``trained``: number of trained completions by kind of round and length;
    ``unbiased``: number of launched completions by length;
    ``staleness``: number of trained trajectories by staleness;
    ``waits``: number of prompts by optimizer steps that they waited;
    ``group_sizes``: number of trained groups by size;
    ``reasons``: number of decisions by subject;
    ``sampling_s``, ``environment_s``: seconds of trained trajectories;
    ``batches``: trained batches;
    ``stragglers``: sum over trained batches of the share of their step's groups that straggled."""

    began_s: float = 0.0
    preemptions_before: int = 0
    rows: list[StepRow] = []
    trained: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    unbiased: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)
    group_sizes: Counter[int] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    sampling_s: float = 0.0
    environment_s: float = 0.0
    batches: int = 0
    stragglers: float = 0.0


class StepLedger:
    """Ledger of the steps of a simulation. ``capacity``: slots of full engines, in requests; ``trained_s``,
    ``publishing_s``: times at which the trainer had stepped and the push began, set by the simulation."""

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
        # Of the open step: time, busy time of engines and generated tokens at its begin, and when its batch was full.
        self._began_s = 0.0
        self._busy_at_begin_s = 0.0
        self._generated_at_begin = 0.0
        self._full_s = 0.0
        self._busy_at_full_s = 0.0
        self.trained_s = 0.0
        self.publishing_s = 0.0
        self._open = JoinedBatch()
        self._closed = JoinedBatch()
        self._step: StepOptimizer | None = None

    # ---- events of the simulation ------------------------------------------------------------------

    def note_launch(self, prompt: int, attempt: int, lengths: list[int], live_version: int) -> None:
        """Count a launched group. ``lengths``: lengths that its trajectories have unless they are stopped."""
        if attempt == 0:
            self._sums.unbiased.update(lengths)
            self._first_launch.setdefault(prompt, live_version)
            if len(self._first_launch) > MOST_WAITING_PROMPTS:  # the oldest ones were dropped for good
                del self._first_launch[next(iter(self._first_launch))]

    def note_decision(self, subject: str) -> None:
        """Count a decision about ``subject``."""
        self._sums.reasons[subject] += 1

    def note_join(self, requests: list[Request], trainer_version: int, kind: str) -> int:
        """Count a group that joined the batch which ``trainer_version`` trains. Returns its trained tokens."""
        sums = self._sums
        batch = self._open
        lengths = [request.length for request in requests]
        sums.trained[kind].update(lengths)
        sums.group_sizes[len(lengths)] += 1
        sums.sampling_s += sum(request.sampling_s for request in requests)
        sums.environment_s += sum(request.environment_s for request in requests)
        sums.staleness.update(trainer_version - request.first_version for request in requests)
        first = self._first_launch.pop(requests[0].prompt, None)
        if first is not None:
            sums.waits[trainer_version - first] += 1
        batch.kind = kind
        batch.longest = max(batch.longest, *lengths)
        if len(lengths) >= SMALLEST_SIZE:
            batch.tables.append(np.array([[inf if length >= self._cap else length for length in lengths]]))
        return sum(lengths)

    def close_batch(self, now: float, step: StepOptimizer) -> None:
        """Close the batch, on which the trainer steps now. Groups that join from here on are in the next batch."""
        self._full_s = now
        self._closed = self._open
        self._open = JoinedBatch()
        self._step = step
        self._advance(now)
        self._busy_at_full_s = self._together.busy_s

    def end_step(self, now: float) -> StepRow:
        """End the step, since every engine holds its version."""
        step = self._step
        assert step is not None
        self._advance(now)
        busy_s = self._together.busy_s
        generated = sum(engine.generated for engine in self._engines)
        rollout_s = self._full_s - self._began_s
        step_s = now - self._began_s
        batch = self._closed
        sums = self._sums
        row = StepRow(
            policy_version=step.policy_version,
            round_kind=batch.kind,
            began_s=self._began_s,
            step_s=step_s,
            rollout_s=rollout_s,
            training_s=self.trained_s - self._full_s,
            push_s=now - self.publishing_s,
            groups=step.groups,
            samples=step.samples,
            trained_tokens=step.trained_tokens,
            generated_tokens=generated - self._generated_at_begin,
            longest=batch.longest,
            rollout_bubble=idle_share(self._busy_at_full_s - self._busy_at_begin_s, self.capacity * rollout_s),
            free_slots=idle_share(busy_s - self._busy_at_begin_s, self.capacity * step_s),
        )
        rate = straggler_rate(batch.tables, self._settings.group_sizing.straggler_ratio)
        sums.batches += step.batches
        sums.stragglers += step.batches * (rate or 0.0)
        sums.rows.append(row)
        self._began_s = now
        self._busy_at_begin_s = busy_s
        self._generated_at_begin = generated
        return row

    def end_warm_up(self, now: float) -> None:
        """Start the figures from zero, since the warm-up is over."""
        preemptions = sum(engine.preemptions for engine in self._engines)
        self._sums = Sums(began_s=now, preemptions_before=preemptions)

    def _advance(self, now: float) -> None:
        for engine in self._engines:
            engine.advance(now)
        self._together.advance(now)

    # ---- the report --------------------------------------------------------------------------------

    def report(self, finished: str, accounting: Accounting) -> SimulationReport:
        """Make the report over the steps that count. ``finished``: reason of the end."""
        sums = self._sums
        cap = self._cap
        rows = self._sums.rows
        seconds = max(self._began_s - sums.began_s, 1e-12)
        recent = rows[-STEPS_REPORTED:]
        step_s = sorted(row.step_s for row in recent) or [0.0]
        trained = sum(sums.trained.values(), Counter[int]())
        tokens = _total(trained)
        rollout_s = sum(row.rollout_s for row in rows)
        return SimulationReport(
            rounds=str(self._settings.rounds),
            steps=len(rows),
            seconds=seconds,
            trajectories=trained.total(),
            capacity=self.capacity,
            step_s_mean=seconds / max(len(rows), 1),
            step_s_p50=step_s[len(step_s) // 2],
            step_s_p95=step_s[len(step_s) * 95 // 100],
            goodput=tokens / seconds,
            groups_s=sums.group_sizes.total() / seconds,
            rollout_bubble=sum(row.rollout_bubble * row.rollout_s for row in rows) / max(rollout_s, 1e-12),
            free_slots=sum(row.free_slots * row.step_s for row in rows) / seconds,
            sampling_s=sums.sampling_s / max(trained.total(), 1),
            environment_s=sums.environment_s / max(trained.total(), 1),
            staleness_mean=_total(sums.staleness) / max(trained.total(), 1),
            staleness_max=max(sums.staleness, default=0),
            unbiased=summary_of(sums.unbiased, cap),
            trained=summary_of(trained, cap),
            kinds=tuple(_kind_summary(kind, rows, lengths, cap) for kind, lengths in sorted(sums.trained.items())),
            generated_tokens=sum(row.generated_tokens for row in rows),
            trained_tokens=tokens,
            wait_mean=_total(sums.waits) / max(sums.waits.total(), 1),
            wait_max=max(sums.waits, default=0),
            straggler_rate=sums.stragglers / max(sums.batches, 1),
            group_sizes=dict(sorted(sums.group_sizes.items())),
            preemptions=sum(engine.preemptions for engine in self._engines) - sums.preemptions_before,
            dropped=accounting.dropped,
            finished=finished,
            recent=tuple(recent),
            reasons=dict(sums.reasons),
            push_s=sum(row.push_s for row in rows) / max(len(rows), 1),
        )


def _kind_summary(kind: str, rows: Sequence[StepRow], lengths: Counter[int], cap: int) -> KindSummary:
    rows = [row for row in rows if row.round_kind == kind]
    count = max(len(rows), 1)
    return KindSummary(
        round_kind=kind,
        steps=len(rows),
        step_s=sum(row.step_s for row in rows) / count,
        rollout_s=sum(row.rollout_s for row in rows) / count,
        longest_mean=sum(row.longest for row in rows) / count,
        trained=summary_of(lengths, cap),
    )


def _total(counts: Counter[int]) -> int:
    """Sum of the counted values."""
    return sum(value * count for value, count in counts.items())
