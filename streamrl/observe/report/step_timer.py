"""Measurements between two moments of a run: the times of a step, and the load of the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from streamrl.base.messages import EngineLoad
from streamrl.base.stage_messages import RolloutStatistics
from streamrl.contracts import PushReport
from streamrl.control.events import EnginesMeasured
from streamrl.observe.report.trajectory_trace import EnginesLine


class BatchTimes(msgspec.Struct, frozen=True):
    """Seconds until the batch was full and from there until it was trained; the idle share of the engines meanwhile,
    and the part of it that trajectories in their environments would fill."""

    rollout_s: float
    training_s: float
    rollout_bubble: float
    environment_bubble: float


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A step from one live version to the next. ``ended_at``: by the clock; ``free_slots``, ``engine_idle``: shares, of
    the capacity and of the time; ``sampled``: tokens; ``verified`` and ``accepted``: tokens of deferred completions
    that new weights looked at, and those that they chose again."""

    ended_at: float
    seconds: float
    push_s: float
    wait_eval_s: float
    free_slots: float
    engine_idle: float
    sampled: int
    verified: int
    accepted: int


class StepTimer:
    """Notes the moments of the open step. ``rollout``: what the episodes have counted; ``capacity``: trajectories
    that the engines can run at once, in the rollout and in the whole step."""

    def __init__(self, clock: Callable[[], float], rollout: Callable[[], RolloutStatistics], capacity: int) -> None:
        self._clock = clock
        self._rollout = rollout
        self._capacity = capacity
        self._began_at = self._closed_at = self._trained_at = self._publishing_at = clock()
        self._began_with = self._closed_with = rollout()

    def began(self) -> None:
        """The first version is live: the first step begins."""
        self._began_at = self._clock()
        self._began_with = self._rollout()

    def batch_closed(self) -> None:
        """The trainer was ordered to step."""
        self._closed_at = self._clock()
        self._closed_with = self._rollout()

    def batch_trained(self) -> BatchTimes:
        """The trainer stepped."""
        self._trained_at = self._clock()
        rollout_s = max(self._closed_at - self._began_at, 0.0)
        bubble = self._free_slots(self._began_with, self._closed_with, rollout_s)
        away = self._closed_with.environment_seconds - self._began_with.environment_seconds
        away /= max(self._capacity * rollout_s, 1e-9)
        return BatchTimes(rollout_s, self._trained_at - self._closed_at, bubble, away)

    def publishing(self) -> None:
        """The push of the trained version begins."""
        self._publishing_at = self._clock()

    def step_finished(self) -> StepTimes:
        """The version is live: its step has ended, and the next one begins."""
        before = self._began_with
        began_at = self._began_at
        self.began()
        now = self._began_at
        after = self._began_with
        seconds = max(now - began_at, 1e-9)
        return StepTimes(
            ended_at=now,
            seconds=seconds,
            push_s=now - self._publishing_at,
            wait_eval_s=self._publishing_at - self._trained_at,
            free_slots=self._free_slots(before, after, seconds),
            engine_idle=_rest(after.working_seconds - before.working_seconds, seconds),
            sampled=after.generated_tokens - before.generated_tokens,
            verified=after.verified_tokens - before.verified_tokens,
            accepted=after.accepted_tokens - before.accepted_tokens,
        )

    def _free_slots(self, before: RolloutStatistics, after: RolloutStatistics, seconds: float) -> float:
        """1 - sum(min(running, capacity) dt) / (capacity sum(dt))."""
        return _rest((after.busy_seconds - before.busy_seconds) / self._capacity, seconds)


def _rest(part: float, whole: float) -> float:
    """Share of ``whole`` that is not ``part``; 0 where there is no whole."""
    return min(max(1 - part / whole, 0.0), 1.0) if whole > 0 else 0.0


def time_metrics(times: StepTimes, push: PushReport, trainer: Mapping[str, float]) -> dict[str, float]:
    """``time/*`` and ``weights/*`` of a step, and how idle engines and trainer were. ``trainer``: its own figures."""
    working = sum(trainer.get(f"time/{part}_s", 0.0) for part in ("forward_backward", "optim", "publish"))
    metrics = {
        "time/step_s": times.seconds,
        "time/wait_eval_s": times.wait_eval_s,
        "time/weight_sync_s": push.total_s,
        "time/weight_stage_s": push.staged_s,
        "time/engine_paused_s": push.paused_s,
        "weights/payload_bytes": float(push.payload_bytes),
        "weights/changed_ratio": push.changed_share,
        "weights/reanchored": float(push.reanchored),
        "util/trainer_idle_ratio": max(1 - working / times.seconds, 0.0),
        "util/free_slot_ratio": times.free_slots,
        "util/engine_idle_ratio": times.engine_idle,
        "perf/gen_tok_s": times.sampled / times.seconds,
    }
    if push.canary:
        metrics["weights/canary_deviation"] = push.canary.deviation
    if times.verified:
        metrics["perf/kept_tok_accepted_ratio"] = times.accepted / times.verified
    return metrics


def load_between(before: EngineLoad, after: EngineLoad, engines: int, environment: int) -> EnginesMeasured:
    """Return what ``engines`` engines, all together, did between two of their loads. ``environment``: as there."""
    steps = after.decode_steps - before.decode_steps
    decoded = after.decode_tokens - before.decode_tokens
    return EnginesMeasured(
        running=decoded / steps * engines if steps > 0 else float(after.running),
        waiting=after.waiting,
        token_s=(after.decode_s - before.decode_s) / steps if steps > 0 else 0.0,
        kv_usage=after.kv_cache_usage,
        preemptions=after.preemptions - before.preemptions,
        environment=environment,
    )


def engines_line(elapsed_s: float, before: EngineLoad, after: EngineLoad, measured: EnginesMeasured) -> EnginesLine:
    """The same as a line of the trace, ``elapsed_s`` after the run began."""
    return EnginesLine(
        time_s=round(elapsed_s, 4),
        running=after.running,
        waiting=after.waiting,
        kv_usage=round(after.kv_cache_usage, 5),
        token_s=round(measured.token_s, 7),
        mean_running=round(measured.running, 3) if after.decode_steps > before.decode_steps else 0.0,
        generated_tokens=after.generated_tokens - before.generated_tokens,
        preemptions=measured.preemptions,
    )
