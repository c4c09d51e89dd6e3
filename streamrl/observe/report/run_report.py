"""Report of a run to its observers: progress inside a step, one record a step, evaluations, the trace. Measures;
decides nothing. The two events that tell control what the engines and a step took come from here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from streamrl.base.messages import EngineLoad, StepReport
from streamrl.base.run_events import (
    CompletionSampled,
    EvaluationFinished,
    RunDecided,
    RunEvent,
    RunProgress,
    RunResumed,
    RunWarning,
    StepFinished,
)
from streamrl.base.stage_messages import RewardOutcome, RolloutStatistics, Scored
from streamrl.base.types import DropReason, ScoredTrajectory, TrajectoryId
from streamrl.control.actions import Decision, LaunchGroup
from streamrl.control.events import EnginesMeasured, RoundTimed
from streamrl.control.model import RunState
from streamrl.engines.push.weight_sync import PushReport
from streamrl.observe.report.step_timer import (
    BatchTimes,
    StepTimer,
    StepTimes,
    engines_line,
    load_between,
    time_metrics,
)
from streamrl.observe.report.trajectory_stats import RewardCalls, TrajectoryStats, work_metrics
from streamrl.observe.report.trajectory_trace import StepLine, TrajectoryTrace
from streamrl.run.evaluate.evaluation import Evaluation
from streamrl.run.evaluate.sample_files import TrainingSamples
from streamrl.run.journal.recover import RecoveredRun, Retrained, what_was_restored
from streamrl.run.step_metrics import completion_metrics, control_metrics, reward_metrics, staleness_metrics
from streamrl.run.wait_reason import RunWaits, ShellView

PROGRESS_INTERVAL_S = 0.25
_MEASURED_WITH_TIME = ("time/", "perf/", "util/")


class _Trained(msgspec.Struct):
    """A batch that was trained and whose version is not live yet."""

    metrics: dict[str, float]
    round_kind: str
    samples: int
    groups: int
    tokens: int
    times: BatchTimes
    shown: list[CompletionSampled]


class RunReport:
    """Turns what happened into ``RunEvent`` messages. ``capacity``: trajectories that the engines can run at once, the
    same for both bubble ratios; ``serving``: how many engines are sent requests;
    ``rewards_in_flight``: what the reward stage holds; ``recovering``: an earlier life is gone on with, until it began;
    ``loop_lag``: longest time without an answer of this loop since it was asked last.
    ``trace``, ``samples`` None: not recorded. ``lived_s``: of earlier lives. ``length_limit``: of ``FirstLengths``."""

    def __init__(
        self,
        emit: Callable[[RunEvent], Awaitable[None]],
        rollout: Callable[[], RolloutStatistics],
        capacity: int,
        *,
        serving: Callable[[], int] = lambda: 1,
        rewards_in_flight: Callable[[], int] = lambda: 0,
        loop_lag: Callable[[], float] = lambda: 0.0,
        trace: TrajectoryTrace | None = None,
        samples: TrainingSamples | None = None,
        clock: Callable[[], float] = time.monotonic,
        lived_s: float = 0.0,
        recovering: bool = False,
        length_limit: int = 0,
    ) -> None:
        self._emit = emit
        self._rollout = rollout
        self._capacity = capacity
        self._serving = serving
        self._recovering = recovering
        self._rewards_in_flight, self._loop_lag = rewards_in_flight, loop_lag
        self._trace, self._samples = trace, samples
        self._clock = clock
        self._lived_s = lived_s
        self._started = self._progressed_at = clock()
        self._timer = StepTimer(clock, rollout, capacity)
        self._trained: dict[int, _Trained] = {}
        self._timed: dict[int, RoundTimed] = {}
        self._rewards = RewardCalls()
        self._rounds: Counter[str] = Counter()
        self._round_kind, self._recovered = "", -1
        self._trajectories = TrajectoryStats(trace, length_limit)
        self._last_load = EngineLoad()
        self.waits = RunWaits(clock, self._shell)

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._lived_s + self._clock() - self._started

    def began(self) -> None:
        """The first version is live: the first step begins."""
        self._timer.began()
        self._recovering = False
        self.waits.take(self._clock())

    async def resumed(self, recovered: RecoveredRun, retrained: Retrained, held_version: int, state_hash: int) -> None:
        """The run goes on from its journal, with weights of ``state_hash``."""
        version, before = retrained.policy_version, recovered.published
        known = before is not None and before.policy_version == version
        await self._emit(
            RunResumed(
                policy_version=version,
                restored=what_was_restored(recovered),
                held_version=held_version,
                trained_again=retrained.batches,
                same_weights=before.state_hash == state_hash if known and before is not None else None,
            )
        )

    def trained_before(
        self, policy_version: int, batch: Sequence[ScoredTrajectory], reports: Sequence[StepReport]
    ) -> None:
        """A life before this one made ``policy_version`` of ``batch`` and did not say so."""
        if batch:
            self._recovered, self._round_kind = policy_version, ""
            self.batch_trained(policy_version, batch, reports[0].metrics if reports else {})

    # ---- trajectories ----------------------------------------------------------------------------

    def launched(self, action: LaunchGroup, prompt_tokens: int) -> None:
        """A group was ordered."""
        self._trajectories.launched(action, prompt_tokens, self.elapsed())

    def came_back(self, item: RewardOutcome) -> None:
        """An outcome of one trajectory arrived: before it is looked at, also for one that was dropped meanwhile."""
        if isinstance(item, Scored):
            self._rewards.came_back(item)
        self._trajectories.came_back(item, self.elapsed())

    def dropped(self, ids: Sequence[TrajectoryId], reason: DropReason) -> None:
        """Control will not train them, whether they ended or still run."""
        self._trajectories.dropped(ids, reason, self.elapsed())

    # ---- engines ---------------------------------------------------------------------------------

    def engines_measured(self, load: EngineLoad) -> EnginesMeasured:
        """Measure the engines since the last call, for control and the trace. ``load``: of all together. Call a few
        times a second. ``EngineLoad`` is at most 0.2 s old."""
        self.waits.look()
        before, self._last_load = self._last_load, load
        if load.generated_tokens < before.generated_tokens:
            before = load  # an engine left, and its counters with it: from here on again
        measured = load_between(before, load, self._serving())
        if self._trace is not None and load != before:
            self._trace.append(engines_line(self.elapsed(), before, load, measured))
        return measured

    # ---- steps -----------------------------------------------------------------------------------

    def batch_closed(self, round_kind: str) -> None:
        """The trainer was ordered to step on the batch of a round of ``round_kind``."""
        self._timer.batch_closed()
        self._round_kind = round_kind

    def batch_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], trainer: dict[str, float]) -> None:
        """The trainer stepped on ``batch``; ``trainer`` are its own figures."""
        times = self._timer.batch_trained()
        reward_cost = self._trajectories.trained(batch, self.elapsed())
        groups = len({s.trajectory.id.group_id for s in batch})
        kind = self._round_kind
        if kind:
            self._rounds[kind] += 1
        self._trained[policy_version] = _Trained(
            metrics={
                **reward_metrics(batch),
                **reward_cost,
                **completion_metrics(batch),
                **staleness_metrics(batch, policy_version - 1),
                **trainer,
                "time/wait_batch_s": times.rollout_s,
                "time/close_batch_s": times.training_s,
                "util/rollout_bubble_ratio": times.rollout_bubble,
            }
            | ({f"round/{kind}/group_size": len(batch) / groups} if kind else {}),
            round_kind=kind,
            samples=len(batch),
            groups=groups,
            tokens=sum(s.trajectory.generated_tokens for s in batch),
            times=times,
            shown=self._samples.take(policy_version, batch) if self._samples is not None else [],
        )

    def publishing(self) -> None:
        """The version that was trained last is pushed now."""
        self._timer.publishing()

    async def step_finished(self, push: PushReport, state: RunState, engines: Mapping[str, float]) -> dict[str, float]:
        """Every engine holds the version that the step made. ``engines``: figures of the sets of engines, if there are
        several. Returns what was reported."""
        times = self._timer.step_finished()
        version = push.policy_version
        trained = self._trained.pop(version, None)
        if trained is None:  # made and reported before the controller restarted
            return {}
        metrics = trained.metrics | time_metrics(times, push, trained.metrics)
        metrics |= {
            "util/capacity": float(self._capacity),
            "util/loop_lag_s": self._loop_lag(),
            "perf/train_tok_s": trained.tokens / times.seconds,
            "perf/samples_s": trained.samples / times.seconds,
            "perf/groups_s": trained.groups / times.seconds,
        }
        metrics |= work_metrics(self._trajectories, self._rounds, trained.tokens)
        metrics |= control_metrics(state) | self._rewards.take() | dict(engines)
        metrics["reward/in_flight"] = float(self._rewards_in_flight())
        metrics |= self.waits.take(times.ended_at)
        if version == self._recovered:  # it began in another life: what it took is not known
            metrics = {name: value for name, value in metrics.items() if not name.startswith(_MEASURED_WITH_TIME)}
        else:
            batch = trained.times
            self._timed[version] = RoundTimed(
                policy_version=version, rollout_s=batch.rollout_s, training_s=batch.training_s, push_s=times.push_s
            )
            if self._trace is not None:
                self._trace.append(_step_line(self.elapsed(), trained, push, times))
        await self._emit(StepFinished(step=version, policy_version=version, metrics=metrics))
        for sample in trained.shown:
            await self._emit(sample)
        return metrics

    def round_timed(self, policy_version: int) -> RoundTimed | None:
        """Take the times of the step that made ``policy_version``, once, after ``step_finished``. None: they are not
        known."""
        return self._timed.pop(policy_version, None)

    async def evaluation_finished(self, policy_version: int, figures: dict[str, float]) -> None:
        """One evaluation. It ran beside the next step, whose time and tokens it is part of."""
        await self._emit(EvaluationFinished(step=policy_version, policy_version=policy_version, metrics=figures))

    async def warned(self, step: int, message: str) -> None:
        """An alarm was raised by the metrics of ``step``."""
        await self._emit(RunWarning(step=step, message=message))

    async def decided(self, decision: Decision, step: int) -> None:
        """Control changed how it works, from ``step`` on."""
        subject, figures = decision.subject, decision.figures
        await self._emit(RunDecided(step=step, subject=subject, reason=decision.reason, figures=figures))

    async def progress(self, state: RunState, evaluation: Evaluation | None) -> None:
        """Emit the progress of the open round, or of the evaluation when all else waits for it; at most a few times a
        second."""
        now = self._clock()
        self.waits.look(state)
        if now - self._progressed_at < PROGRESS_INTERVAL_S:
            return
        self._progressed_at = now
        phase, finished, wanted = "rollout", state.batch.filled, state.batch.target
        if evaluation is not None and (state.live_version < state.trainer_version or not state.buffer):
            phase, finished, wanted = "evaluation", len(evaluation.outcomes), evaluation.wanted
        elif state.pending.push is not None:
            phase = "weights"
        elif state.batch_closed:
            phase = "training"
        step = min(state.trainer_version + 1, state.steps)
        await self._emit(RunProgress(step=step, phase=phase, finished=finished, wanted=wanted))

    def close(self) -> None:
        """The run ends: write what is left of the trace. Idempotent."""
        self._trajectories.close(self.elapsed())
        for file in (self._trace, self._samples):
            if file is not None:
                file.close()

    # ---- parts of a step's record ----------------------------------------------------------------

    def _shell(self) -> ShellView:
        return ShellView(
            sampling=self._rollout().running,
            scoring=self._rewards_in_flight(),
            capacity=self._capacity,
            engines=self._serving(),
            recovering=self._recovering,
        )


def _step_line(elapsed_s: float, trained: _Trained, push: PushReport, times: StepTimes) -> StepLine:
    return StepLine(
        time_s=round(elapsed_s, 4),
        policy_version=push.policy_version,
        round_kind=trained.round_kind,
        group_size=round(trained.samples / trained.groups, 3),
        samples=trained.samples,
        trained_tokens=trained.tokens,
        generated_tokens=times.sampled,
        step_s=round(times.seconds, 5),
        rollout_s=round(trained.times.rollout_s, 5),
        training_s=round(trained.times.training_s, 5),
        push_s=round(times.push_s, 5),
        paused_s=round(push.paused_s, 5),
        forward_backward_s=round(trained.metrics.get("time/forward_backward_s", 0.0), 5),
    )
