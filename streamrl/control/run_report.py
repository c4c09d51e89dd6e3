"""What a run tells its observers: progress inside a step, one record a step, evaluations. Measures; decides nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from streamrl.control.evaluation import Evaluation
from streamrl.control.publisher import PushReport
from streamrl.control.state import ControlState
from streamrl.control.step_metrics import completion_metrics, reward_metrics, staleness_metrics
from streamrl.messages import EvaluationFinished, RunEvent, RunProgress, RunWarning, StepFinished
from streamrl.stage_messages import RolloutStatistics
from streamrl.types import RewardFailure, ScoredTrajectory

PROGRESS_INTERVAL_S = 0.25


class RunReport:
    """Turns what happened into ``RunEvent`` messages. ``capacity``: trajectories that the engines can run at once."""

    def __init__(
        self,
        emit: Callable[[RunEvent], Awaitable[None]],
        rollout: Callable[[], RolloutStatistics],
        capacity: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._rollout = rollout
        self._capacity = capacity
        self._clock = clock
        self._started = self._step_started = self._closed_at = self._progressed_at = clock()
        self._trained_at = self._publishing_at = self._started
        self._last_rollout = rollout()
        self._trained: dict[int, dict[str, float]] = {}
        self._failures: Counter[str] = Counter()

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._started

    def began(self) -> None:
        """The first version is live: the first step begins."""
        self._step_started = self._clock()
        self._last_rollout = self._rollout()

    def reward_failed(self, failure: RewardFailure) -> None:
        """Count a failure by function and kind."""
        self._failures[f"reward/func/{failure.function}/{failure.kind}_total"] += 1

    def batch_closed(self) -> None:
        """The trainer was told to step."""
        self._closed_at = self._clock()

    def batch_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], trainer: dict[str, float]) -> None:
        """The trainer stepped on ``batch``; ``trainer`` are its own figures."""
        now = self._trained_at = self._clock()
        self._trained[policy_version] = {
            **reward_metrics(batch),
            **completion_metrics(batch),
            **staleness_metrics(batch, policy_version - 1),
            **trainer,
            "time/wait_batch_s": max(self._closed_at - self._step_started, 0.0),
            "time/close_batch_s": now - self._closed_at,
            "perf/trained_tokens": float(sum(s.trajectory.generated_tokens for s in batch)),
            "perf/trained_samples": float(len(batch)),
        }

    def publishing(self) -> None:
        """The version that was trained last is pushed now."""
        self._publishing_at = self._clock()

    async def step_finished(self, push: PushReport, state: ControlState) -> dict[str, float]:
        """Every engine holds the version that the step made. Returns what was reported."""
        now = self._clock()
        seconds = max(now - self._step_started, 1e-9)
        self._step_started = now
        metrics = self._trained.pop(push.policy_version)
        rollout, before = self._rollout(), self._last_rollout
        self._last_rollout = rollout
        sampled = rollout.generated_tokens - before.generated_tokens
        busy = (rollout.busy_seconds - before.busy_seconds) / (self._capacity * seconds)
        working = sum(metrics.get(f"time/{part}_s", 0.0) for part in ("forward_backward", "optim", "publish"))
        accounting = state.accounting()
        metrics |= {
            "time/step_s": seconds,
            "time/wait_eval_s": self._publishing_at - self._trained_at,
            "time/weight_sync_s": push.total_s,
            "time/weight_stage_s": push.staged_s,
            "time/engine_paused_s": push.paused_s,
            "weights/payload_bytes": float(push.payload_bytes),
            "weights/changed_ratio": push.changed_share,
            "weights/reanchored": float(push.reanchored),
            "util/bubble_ratio": max(1 - busy, 0.0),
            "util/trainer_idle_ratio": max(1 - working / seconds, 0.0),
            "perf/gen_tok_s": sampled / seconds,
            "perf/train_tok_s": metrics.pop("perf/trained_tokens") / seconds,
            "perf/samples_s": metrics.pop("perf/trained_samples") / seconds,
            "perf/wasted_tok_ratio": state.buffer.wasted_tokens / max(rollout.generated_tokens, 1),
            "async/inflight": float(accounting.in_flight),
            "async/queue_depth": float(len(state.buffer.ready())),
            "async/dropped_ratio": sum(accounting.dropped.values()) / max(accounting.issued, 1),
        }
        metrics |= {f"async/dropped_{reason}_total": float(count) for reason, count in accounting.dropped.items()}
        metrics |= {name: float(count) for name, count in self._failures.items()}
        version = push.policy_version
        await self._emit(StepFinished(step=version, policy_version=version, metrics=metrics))
        return metrics

    async def evaluation_finished(self, policy_version: int, figures: dict[str, float]) -> None:
        """One evaluation. It ran beside the next step, whose time and tokens it is part of."""
        event = EvaluationFinished(step=policy_version, policy_version=policy_version, metrics=figures)
        await self._emit(event)

    async def warned(self, step: int, message: str) -> None:
        """An alarm was raised by the metrics of ``step``."""
        await self._emit(RunWarning(step=step, message=message))

    async def progress(self, state: ControlState, evaluation: Evaluation | None) -> None:
        """How far the open round is, or the evaluation when all else waits for it; at most a few times a second."""
        now = self._clock()
        if now - self._progressed_at < PROGRESS_INTERVAL_S:
            return
        self._progressed_at = now
        phase, finished, wanted = "rollout", state.batch.groups, state.settings.batch_groups
        if evaluation is not None and (state.live_version < state.trainer_version or not state.buffer.groups):
            phase, finished, wanted = "evaluation", len(evaluation.outcomes), evaluation.wanted
        elif state.publishing is not None:
            phase = "weights"
        elif state.batch.closed:
            phase = "training"
        step = min(state.trainer_version + 1, state.settings.steps)
        await self._emit(RunProgress(step=step, phase=phase, finished=finished, wanted=wanted))
