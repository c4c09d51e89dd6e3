"""Times of a step, and the load of the engines between two moments. ``RunReport`` calls this file, in the process of
the controller."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from streamrl.base.messages import EngineLoad
from streamrl.base.stage_messages import RolloutStatistics
from streamrl.base.types import Clock, Metrics, MetricsMapping
from streamrl.contracts import PushReport
from streamrl.control.events import EnginesMeasured
from streamrl.observe.report.trajectory_trace import EnginesLine


class BatchTimes(Struct, frozen=True):
    """Times of the batch of a step.

    ``rollout_s``: seconds until the batch was full. ``training_s``: seconds from then until it was trained.
    ``rollout_bubble``: idle share of the engines' slots while the batch was filled. ``environment_bubble``: part of it
    that trajectories in their environments would fill."""

    rollout_s: float
    training_s: float
    rollout_bubble: float
    environment_bubble: float


class StepTimes(Struct, frozen=True, kw_only=True):
    """Times and counts of a step, from one live version to the next.

    ``ended_at``: time of its end, on the clock of the report. ``push_s``: seconds of the weight push. ``wait_eval_s``:
    seconds between the training and the push. ``free_slots``: share of the capacity that was free. ``engine_idle``:
    share of the time in which no trajectory ran. ``sampled``: number of sampled tokens. ``verified``: tokens of
    deferred completions that the new weights verified. ``accepted``: verified tokens that the new weights accepted."""

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
    """Notes the moments of the open step. ``rollout``: reads the counters of the episodes. ``capacity``: trajectories
    that the engines can run at once."""

    def __init__(self, clock: Clock, rollout: Callable[[], RolloutStatistics], capacity: int) -> None:
        self._clock = clock
        self._rollout = rollout
        self._capacity = capacity
        self._began_at = self._closed_at = self._trained_at = self._publishing_at = clock()
        self._began_with = self._closed_with = rollout()

    def began(self) -> None:
        """Begin a step. Call it when the first version is live."""
        self._began_at = self._clock()
        self._began_with = self._rollout()

    def batch_closed(self) -> None:
        """End the rollout of the step. Call it when the trainer is ordered to step."""
        self._closed_at = self._clock()
        self._closed_with = self._rollout()

    def batch_trained(self) -> BatchTimes:
        """Return the times of the batch. Call it when the trainer has stepped."""
        self._trained_at = self._clock()
        rollout_s = max(self._closed_at - self._began_at, 0.0)
        bubble = self._free_slots(self._began_with, self._closed_with, rollout_s)
        environment_seconds = self._closed_with.environment_seconds - self._began_with.environment_seconds
        environment_bubble = environment_seconds / max(self._capacity * rollout_s, 1e-9)
        return BatchTimes(rollout_s, self._trained_at - self._closed_at, bubble, environment_bubble)

    def publishing(self) -> None:
        """Note the start of the push of the trained version."""
        self._publishing_at = self._clock()

    def step_finished(self) -> StepTimes:
        """Return the times of the step and begin the next one. Call it when the version of the step is live."""
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
            engine_idle=idle_share(after.working_seconds - before.working_seconds, seconds),
            sampled=after.generated_tokens - before.generated_tokens,
            verified=after.verified_tokens - before.verified_tokens,
            accepted=after.accepted_tokens - before.accepted_tokens,
        )

    def _free_slots(self, before: RolloutStatistics, after: RolloutStatistics, seconds: float) -> float:
        """1 - sum(min(running, capacity) dt) / (capacity sum(dt))."""
        return idle_share((after.busy_seconds - before.busy_seconds) / self._capacity, seconds)


def idle_share(busy_s: float, total_s: float) -> float:
    """Share of ``total_s`` outside of ``busy_s``; 0 where ``total_s`` is not positive."""
    if total_s <= 0:
        return 0.0
    return min(max(1 - busy_s / total_s, 0.0), 1.0)


def time_metrics(times: StepTimes, push: PushReport, trainer: MetricsMapping) -> Metrics:
    """Return ``time/*`` and ``weights/*`` of a step, and the idle shares of engines and trainer. ``trainer``: metrics
    that the trainer reported."""
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
        "weights/from_memory": float(push.from_memory),
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
    """Return the measurements of ``engines`` engines, all together, between two of their loads. ``environment``: number
    of trajectories in their environments."""
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
    """Return ``measured`` as a line of the trace, ``elapsed_s`` after the run began."""
    return EnginesLine(
        time_s=round(elapsed_s, 4),
        running=after.running,
        waiting=after.waiting,
        kv_usage=round(after.kv_cache_usage, 5),
        token_s=round(measured.token_s, 7),
        mean_running=round(measured.running, 3) if after.decode_steps > before.decode_steps else 0.0,
        generated_tokens=after.generated_tokens - before.generated_tokens,
        preemptions=measured.preemptions,
        prefilled_tokens=after.prefilled_tokens - before.prefilled_tokens,
        prefill_s=round(after.prefill_s - before.prefill_s, 5),
    )
