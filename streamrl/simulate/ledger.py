"""What happened in each step of a simulation, and the report that it adds up to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamrl.buffers.accounting import Accounting
from streamrl.control.settings import ControlSettings
from streamrl.simulate.engines import EngineClock, Request, RunningTogether
from streamrl.simulate.report import SimulationReport, StepRow, Tally

MOST_WAITING_PROMPTS = 1 << 16


class BatchSums(msgspec.Struct):
    """What joined one batch. ``straggled``: groups of it; ``longest``: its longest completion."""

    kind: str = ""
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    longest: int = 0
    straggled: int = 0


class StepLedger:
    """Follows one step after the other. ``capacity``: what bubble ratios count as all of it, in requests."""

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
        self._tally = Tally(cap, settings.group_sizing.straggler_ratio)
        self._first_launch: dict[int, int] = {}
        self._began = self._full = self._trained = self._publishing = 0.0
        self._busy_began = self._busy_full = self._generated_began = 0.0
        self._preemptions_began = 0
        self._trainer_began = self._trainer_now = 0.0
        self._open = BatchSums()
        self._closed = BatchSums()

    # ---- what happens ------------------------------------------------------------------------------

    def launched(self, prompt: int, attempt: int, lengths: list[int], live_version: int) -> None:
        """A group was launched; ``lengths``: what its trajectories will have when nobody stops them."""
        if attempt == 0:
            self._tally.unbiased.add(lengths)
            self._first_launch.setdefault(prompt, live_version)
            if len(self._first_launch) > MOST_WAITING_PROMPTS:  # prompts that were dropped for good
                del self._first_launch[next(iter(self._first_launch))]

    def explained(self, subject: str) -> None:
        """Control decided something about ``subject``, and said why."""
        self._tally.reasons[subject] = self._tally.reasons.get(subject, 0) + 1

    def joined(self, requests: list[Request], trainer_version: int, kind: str) -> int:
        """A group joined the batch that ``trainer_version`` trains. Returns its trained tokens."""
        lengths = [request.length for request in requests]
        oldest = [request.first_version for request in requests]
        straggled = self._tally.group(kind, lengths, sum(trainer_version - version for version in oldest))
        stalest = trainer_version - min(oldest)
        if stalest > self._tally.staleness_max:
            self._tally.staleness_max = stalest
        first = self._first_launch.pop(requests[0].prompt, None)
        if first is not None:
            self._tally.waited(trainer_version - first)
        tokens = sum(lengths)
        batch = self._open
        batch.kind = kind
        batch.groups += 1
        batch.samples += len(lengths)
        batch.tokens += tokens
        batch.longest = max(batch.longest, *lengths)
        batch.straggled += straggled
        return tokens

    def batch_full(self, now: float) -> None:
        """The trainer was told to step. What joins from here on is of the next batch, also while this one is
        pushed."""
        self._full = now
        self._closed, self._open = self._open, BatchSums()
        self._advance(now)
        self._busy_full = self._together.busy_s

    def trained(self, now: float) -> None:
        """It did."""
        self._trained = now

    def publishing(self, now: float) -> None:
        """The push begins."""
        self._publishing = now

    def live(self, now: float, version: int, trainer_worked_s: float) -> StepRow:
        """Every engine holds the version that the step made: the step is over."""
        self._advance(now)
        busy = self._together.busy_s
        generated = sum(engine.generated for engine in self._engines)
        rollout_s, step_s = self._full - self._began, now - self._began
        batch = self._closed
        row = StepRow(
            policy_version=version,
            round_kind=batch.kind,
            step_s=step_s,
            rollout_s=rollout_s,
            training_s=self._trained - self._full,
            push_s=now - self._publishing,
            groups=batch.groups,
            samples=batch.samples,
            trained_tokens=batch.tokens,
            generated_tokens=generated - self._generated_began,
            longest=batch.longest,
            rollout_bubble=_idle(self._busy_full - self._busy_began, self.capacity * rollout_s),
            step_bubble=_idle(busy - self._busy_began, self.capacity * step_s),
        )
        self._tally.close(row, batch.straggled, self._busy_full - self._busy_began, busy - self._busy_began)
        self._began, self._busy_began, self._generated_began = now, busy, generated
        self._trainer_now = trainer_worked_s
        return row

    def begin(self, now: float) -> None:
        """The warm-up is over: figures count from here."""
        self._tally.begin(now)
        self._trainer_began = self._trainer_now
        self._preemptions_began = sum(engine.preemptions for engine in self._engines)

    def _advance(self, now: float) -> None:
        for engine in self._engines:
            engine.advance(now)
        self._together.advance(now)

    # ---- the report --------------------------------------------------------------------------------

    def report(self, finished: str, accounting: Accounting) -> SimulationReport:
        """Everything, over the steps that count."""
        tally, engines = self._tally, self._engines
        seconds = max(self._began - tally.began_s, 1e-12)
        return SimulationReport(
            rounds=str(self._settings.rounds),
            steps=tally.step.count,
            seconds=seconds,
            trajectories=tally.samples,
            capacity=self.capacity,
            step_s_mean=tally.step.mean,
            step_s_p50=tally.step.quantile(0.5),
            step_s_p95=tally.step.quantile(0.95),
            goodput=tally.trained_tokens / seconds,
            groups_s=tally.groups / seconds,
            rollout_bubble=_idle(tally.busy_rollout, self.capacity * tally.rollout_s),
            step_bubble=_idle(tally.busy_step, self.capacity * tally.step_s),
            staleness_mean=tally.staleness_total / max(tally.samples, 1),
            staleness_max=tally.staleness_max,
            unbiased=tally.unbiased.summary(),
            trained=tally.trained(),
            kinds=tuple(tally.kinds[name].summary(name) for name in sorted(tally.kinds)),
            generated_tokens=tally.generated,
            trained_tokens=tally.trained_tokens,
            wait_mean=tally.wait_total / max(tally.waits, 1),
            wait_max=tally.wait_max,
            straggler_rate=tally.straggler_shares / max(tally.samples, 1),
            group_sizes=dict(sorted(tally.group_sizes.items())),
            preemptions=sum(engine.preemptions for engine in engines) - self._preemptions_began,
            trainer_idle=max(1 - (self._trainer_now - self._trainer_began) / seconds, 0.0),
            dropped=accounting.dropped,
            finished=finished,
            recent=tuple(tally.recent),
            reasons=tally.reasons,
        )


def _idle(busy: float, whole: float) -> float:
    return max(1 - busy / whole, 0.0) if whole > 0 else 0.0
