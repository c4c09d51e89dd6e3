"""The report of a run: progress inside a step, the metrics of each step, decisions, alarms, the trace.

``launch/observers.py`` makes ``RunReport``, and the controller calls it as an observer, in its own process. It measures
and decides nothing, but two of its measurements go to control as events: the load of the engines
(``EnginesMeasured``) and the times of a step (``RoundTimed``)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import anyio
from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.messages import EngineLoad, WeightAnnouncement
from streamrl.base.run_events import (
    CompletionSampled,
    RunDecided,
    RunEvent,
    RunProgress,
    RunResumed,
    RunWarning,
    StepFinished,
)
from streamrl.base.stage_messages import RolloutStatistics, Scored, TrajectoryOutcome
from streamrl.base.types import Clock, DropReason, Metrics, ScoredTrajectory
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.contracts import Observer, PushReport
from streamrl.control import actions as do
from streamrl.control.events import ControlEvent, EnginesMeasured, RoundTimed, TrajectoryFailed
from streamrl.control.machine import Control
from streamrl.observe.report.alarms import Alarms
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
from streamrl.run.evaluate.evaluation import HeldOutEvaluations
from streamrl.run.evaluate.sample_files import PromptWords, TrainingSamples
from streamrl.run.journal.recover import Resumption, what_was_restored
from streamrl.run.step_metrics import (
    completion_metrics,
    control_metrics,
    reward_metrics,
    set_metrics,
    staleness_metrics,
)
from streamrl.run.wait_reason import RunWaits, ShellView

PROGRESS_INTERVAL_S = 0.25
"""Least seconds between two ``RunProgress`` events."""
MEASURING_INTERVAL_S = 0.25
"""Seconds between two measurements of the engines."""
_MEASURED_WITH_TIME = ("time/", "perf/", "util/")


class FigureSources(Struct, frozen=True, kw_only=True):
    """Functions that ``RunReport`` calls for figures which other parts of the controller hold.

    ``rollout``: counters of the episodes. ``load``: combined load of all engines. ``serving``: number of engines that
    are sent requests. ``rewards_in_flight``: number of trajectories in the reward stage. ``loop_lag``: longest time
    in seconds for which the event loop did not answer since the last call. ``contexts``: tokens of the contexts of open
    trajectories, by group id. ``more_metrics``: further metrics of a step, called once a step."""

    rollout: Callable[[], RolloutStatistics]
    load: Callable[[], EngineLoad] = EngineLoad
    serving: Callable[[], int] = lambda: 1
    rewards_in_flight: Callable[[], int] = lambda: 0
    loop_lag: Callable[[], float] = lambda: 0.0
    contexts: Callable[[], dict[int, int]] = dict
    more_metrics: Callable[[], Metrics] = dict


class _TrainedBatch(Struct):
    """A batch that was trained and whose version is not live yet. ``samples_to_show``: a few of its completions."""

    metrics: Metrics
    round_kind: str
    samples: int
    groups: int
    tokens: int
    times: BatchTimes
    samples_to_show: list[CompletionSampled]


class RunReport(Observer):
    """Makes ``RunEvent`` messages of the events of control and the outcomes of trajectories, and gives them to
    ``emit``.

    ``control`` and ``store``: state and trajectories of the run, which the report only reads. ``capacity``:
    trajectories that the engines can run at once, for the shares of free slots. ``resumption``: recovered state where
    the run resumes. ``trace`` and ``samples``: files to write, None where they are not wanted. ``length_limit``: token
    limit of ``FirstLengths``, which counts until a group launches more members than it keeps."""

    def __init__(
        self,
        emit: Callable[[RunEvent], Awaitable[None]],
        control: Control,
        store: TrajectoryStore,
        sources: FigureSources,
        capacity: int,
        *,
        alarms: Alarms | None = None,
        evaluations: HeldOutEvaluations | None = None,
        resumption: Resumption | None = None,
        trace: TrajectoryTrace | None = None,
        samples: TrainingSamples | None = None,
        words: PromptWords | None = None,
        clock: Clock = time.monotonic,
        length_limit: int = 0,
    ) -> None:
        self._emit = emit
        self._control = control
        self._store = store
        self._sources = sources
        self._capacity = capacity
        self._alarms = alarms or Alarms(())
        self._evaluations = evaluations
        self._resumption = resumption
        self._trace = trace
        self._samples = samples
        self._words = words
        self._clock = clock
        self._earlier_s = resumption.recovered.elapsed_s if resumption else 0.0
        self._started = self._progressed_at = clock()
        self._timer = StepTimer(clock, sources.rollout, capacity)
        self._trained: dict[int, _TrainedBatch] = {}
        self._rewards = RewardCalls()
        self._rounds = Counter[str]()
        self._began = False
        self._round_kind = ""
        self._recovered_version = -1
        self.trajectories = TrajectoryStats(trace, length_limit)
        self._notify: Callable[[ControlEvent], None] = lambda event: None
        self._last_load = EngineLoad()
        self._measuring = anyio.CancelScope()
        self.waits = RunWaits(clock, self._shell)

    def elapsed(self) -> float:
        """Return the seconds since the run began, with those of earlier processes of the run."""
        return self._earlier_s + self._clock() - self._started

    async def prepare(self) -> None:
        """Begin to count the time of a recovery as a wait."""
        if self._resumption is not None:
            self.waits.update(self._resumption.recovered.state)

    async def run(self, notify: Callable[[ControlEvent], None]) -> None:
        """Measure the engines a few times a second, until ``end``, and notify control where its rounds read the
        load."""
        self._notify = notify
        # Trajectories in their environments, as control knows them. A resumed control has an old number.
        reported_environment = -1 if self._resumption else 0
        with self._measuring:
            while True:
                await anyio.sleep(MEASURING_INTERVAL_S)
                measured = self.engines_measured(self._sources.load())
                settings = self._control.settings
                environment_changed = measured.environment != reported_environment
                if settings.reads_load or (settings.reads_environment and environment_changed):
                    reported_environment = measured.environment
                    if settings.reads_load:
                        measured = replace(measured, contexts=self._sources.contexts())
                    notify(measured)

    def end(self) -> None:
        self._measuring.cancel()

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """Begin the first step. A resumed run emits ``RunResumed``, and reports a batch that was trained before it
        ended and not yet reported."""
        self._timer.began()
        self._began = True
        self.waits.take(self._clock())
        resumption = self._resumption
        if resumption is None:
            return
        recovered = resumption.recovered
        version = resumption.policy_version
        published = recovered.published
        same_weights = None
        if published and published.policy_version == version:
            same_weights = published.state_hash == anchor.state_hash
        await self._emit(
            RunResumed(
                policy_version=version,
                restored=what_was_restored(recovered),
                held_version=resumption.held_version,
                trained_again=resumption.batches,
                same_weights=same_weights,
            )
        )
        batch = recovered.batch_of(version) if version > recovered.state.live_version else None
        if batch:
            self._recovered_version = version
            self._round_kind = ""
            metrics = {}
            if resumption.reports:
                metrics = resumption.reports[0].metrics
            self.on_trained(version, batch, metrics)

    async def on_event(self, event: ControlEvent) -> None:
        """Warn of a failed reward."""
        if isinstance(event, TrajectoryFailed) and event.reason is DropReason.REWARD_FAILED:
            step = self._next_step
            if warning := self._alarms.reward_failed(step, event.message):
                await self._emit(RunWarning(step=step, message=warning))

    async def on_action(self, action: do.ControlAction) -> None:
        """Note launched and dropped trajectories, decisions, and the moments of the step."""
        match action:
            case do.LaunchGroup():
                prompt = self._store.prompts[action.ids[0].prompt_id]
                group = self._control.state.buffer.untrained.get(action.group_id)
                self.trajectories.launched(action, len(prompt.token_ids), self.elapsed(), group)
            case do.Drop():
                self.trajectories.dropped(action.ids, action.reason, self.elapsed())
            case do.Decision():
                # A round that is submitted in advance belongs to the step after the one that is trained now.
                await self.decided(action, self._next_step + int(self._control.state.batch_closed))
            case do.StepOptimizer():
                self._timer.batch_closed()
                self._round_kind = action.round_kind
            case do.PublishWeights():
                self._timer.publishing()

    def on_outcome(self, outcome: TrajectoryOutcome) -> None:
        """Count an outcome and its calls of reward functions."""
        if isinstance(outcome, Scored):
            self._rewards.on_outcome(outcome)
            if self._words is not None:
                self._words.take(outcome)
        self.trajectories.on_outcome(outcome, self.elapsed())

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: Metrics) -> None:
        """Keep the figures of the batch until its version is live."""
        times = self._timer.batch_trained()
        reward_cost = self.trajectories.trained(batch, self.elapsed())
        groups = len({scored.trajectory.id.group_id for scored in batch})
        kind = self._round_kind
        all_metrics = {
            **reward_metrics(batch),
            **set_metrics(batch),
            **reward_cost,
            **completion_metrics(batch),
            **staleness_metrics(batch, policy_version - 1),
            **metrics,
            "time/wait_batch_s": times.rollout_s,
            "time/close_batch_s": times.training_s,
            "util/rollout_bubble_ratio": times.rollout_bubble,
        }
        if kind:
            self._rounds[kind] += 1
            all_metrics[f"round/{kind}/group_size"] = len(batch) / groups
        if times.environment_bubble:
            all_metrics["util/environment_bubble_ratio"] = times.environment_bubble
        samples_to_show = []
        if self._samples is not None:
            samples_to_show = self._samples.take(policy_version, batch)
        self._trained[policy_version] = _TrainedBatch(
            metrics=all_metrics,
            round_kind=kind,
            samples=len(batch),
            groups=groups,
            tokens=sum(scored.trajectory.generated_tokens for scored in batch),
            times=times,
            samples_to_show=samples_to_show,
        )

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Report the step that made the version and its alarms, and notify control of its times."""
        times = self._timer.step_finished()
        version = push.policy_version
        trained = self._trained.pop(version, None)
        if trained is None:  # an earlier process of the controller reported it
            return
        metrics = trained.metrics | time_metrics(times, push, trained.metrics) | self._work(trained, times)
        if version == self._recovered_version:  # an earlier process began the step: its times are not known
            metrics = {name: value for name, value in metrics.items() if not name.startswith(_MEASURED_WITH_TIME)}
        elif self._trace is not None:
            self._trace.append(_step_line(self.elapsed(), trained, metrics, push, times))
        await self._emit(StepFinished(step=version, policy_version=version, metrics=metrics))
        for sample in trained.samples_to_show:
            await self._emit(sample)
        for message in self._alarms.check(version, metrics):
            await self._emit(RunWarning(step=version, message=message))
        if version != self._recovered_version:
            batch = trained.times
            self._notify(
                RoundTimed(
                    policy_version=version, rollout_s=batch.rollout_s, training_s=batch.training_s, push_s=times.push_s
                )
            )

    async def on_progress(self) -> None:
        """Emit the progress of the open round, or of an evaluation that the run waits for, at most a few times a
        second."""
        now = self._clock()
        state = self._control.state
        self.waits.update(state)
        if now - self._progressed_at < PROGRESS_INTERVAL_S:
            return
        self._progressed_at = now
        step = min(self._next_step, state.steps)
        phase = "rollout"
        finished = state.batch.filled
        target = state.batch.target
        evaluation = self._evaluations.running if self._evaluations is not None else None
        if evaluation is not None and (state.live_version < state.trainer_version or not state.buffer):
            phase = "evaluation"
            finished = len(evaluation.outcomes)
            target = evaluation.completions
        elif state.pending.push is not None:
            phase = "weights"
            step = min(self._trained, default=step)  # whose line is printed when its weights are live
        elif state.batch_closed:
            phase = "training"
        await self._emit(RunProgress(step=step, phase=phase, finished=finished, wanted=target))

    def engines_measured(self, load: EngineLoad) -> EnginesMeasured:
        """Return the measurements of the engines since the last call, and append them to the trace. ``load``: combined
        load of all engines, at most 0.2 s old."""
        self.waits.update()
        before = self._last_load
        self._last_load = load
        if load.generated_tokens < before.generated_tokens:
            before = load  # an engine was removed with its counters: differences count from this load on
        measured = load_between(before, load, self._sources.serving(), self._sources.rollout().environment)
        if self._trace is not None and load != before:
            self._trace.append(engines_line(self.elapsed(), before, load, measured))
        return measured

    async def decided(self, decision: do.Decision, step: int) -> None:
        """Emit a decision that takes effect at ``step``."""
        subject = decision.subject
        figures = decision.figures
        await self._emit(RunDecided(step=step, subject=subject, reason=decision.reason, figures=figures))

    def close(self) -> None:
        """Write the open trajectories to the trace, and close the files. Idempotent."""
        self.trajectories.close(self.elapsed())
        for file in (self._trace, self._samples, self._words):
            if file is not None:
                file.close()

    # ---- metrics of a step -----------------------------------------------------------------------

    @property
    def _next_step(self) -> int:
        return self._control.state.trainer_version + 1

    def _work(self, trained: _TrainedBatch, times: StepTimes) -> Metrics:
        """Return the metrics of the work in the step, and reset their counters."""
        metrics = {
            "util/capacity": float(self._capacity),
            "util/loop_lag_s": self._sources.loop_lag(),
            "perf/train_tok_s": trained.tokens / times.seconds,
            "perf/samples_s": trained.samples / times.seconds,
            "perf/groups_s": trained.groups / times.seconds,
        }
        metrics |= work_metrics(self.trajectories, self._rounds, trained.tokens)
        metrics |= control_metrics(self._control.state) | self._rewards.take() | self._sources.more_metrics()
        metrics["reward/in_flight"] = float(self._sources.rewards_in_flight())
        metrics["engines/preemptions_total"] = float(self._last_load.preemptions)
        return metrics | self.waits.take(times.ended_at)

    def _shell(self) -> ShellView:
        rollout = self._sources.rollout()
        return ShellView(
            sampling=rollout.running,
            environment=rollout.environment,
            scoring=self._sources.rewards_in_flight(),
            capacity=self._capacity,
            engines=self._sources.serving(),
            recovering=self._resumption is not None and not self._began,
        )


def _step_line(
    elapsed_s: float, trained: _TrainedBatch, metrics: Metrics, push: PushReport, times: StepTimes
) -> StepLine:
    to_ranks = ("time/engines_sleep_s", "time/state_in_s", "time/state_out_s")
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
        forward_backward_s=round(metrics.get("time/forward_backward_s", 0.0), 5),
        to_ranks_s=round(sum(metrics.get(name, 0.0) for name in to_ranks), 5),
        to_engines_s=round(metrics.get("time/engines_wake_s", 0.0), 5),
    )
