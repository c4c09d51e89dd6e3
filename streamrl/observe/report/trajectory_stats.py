"""Measurements of trajectories from launch to end, and of the calls of reward functions, for the metrics of a step and
the trace. ``RunReport`` owns both classes and calls them in the process of the controller; ``TraceEvents`` reports to
``TrajectoryStats`` which engine has a trajectory, pauses, and new live versions. Nothing is decided here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from streamrl.base.stage_messages import EndedOutcome, Scored, TrajectoryLost, TrajectoryOutcome, TrajectoryPaused
from streamrl.base.types import (
    DropReason,
    FinishReason,
    Metrics,
    RewardCall,
    RewardFailure,
    ScoredTrajectory,
    TrajectoryId,
    TurnTimes,
)
from streamrl.buffers.rollout_buffer import Group
from streamrl.control.actions import LaunchGroup
from streamrl.observe.report.trajectory_trace import TRAINED, UNFINISHED, TrajectoryLine, TrajectoryTrace
from streamrl.run.step_metrics import (
    FirstLengths,
    SampledLength,
    StepWindow,
    discard_metrics,
    length_metrics,
    percentile,
    waste_metrics,
)


class _OpenTrajectory(Struct):
    """A launched trajectory that has not ended: it ends when it is trained, or when it was dropped and has returned.

    Times are seconds since the run began. ``returned_s``: time at which its outcome arrived (0: not yet). ``routed_s``:
    time at which an engine got it first (0: not yet). ``pausing``: whether control has paused it. ``left_engine_s``:
    time at which it left its engine because of a pause; None while it is not paused. ``paused_s``: seconds of the
    pauses that are over."""

    launched_s: float
    round_kind: str
    prompt_tokens: int
    policy_version: int
    drop_reason: DropReason | None = None
    outcome: EndedOutcome | None = None
    returned_s: float = 0.0
    engine: str = ""
    routed_s: float = 0.0
    pausing: bool = False
    left_engine_s: float | None = None
    paused_s: float = 0.0


class TrajectoryStats:
    """Follows trajectories by id and ignores ids that it does not know, which belong to an evaluation.

    ``limit``: token limit of ``FirstLengths``. Parameters ``now`` of the methods: seconds since the run began."""

    def __init__(self, trace: TrajectoryTrace | None = None, limit: int = 0) -> None:
        self._trace = trace
        self._open: dict[TrajectoryId, _OpenTrajectory] = {}
        self._by_request: dict[str, _OpenTrajectory] = {}
        self._live_since: dict[int, float] = {}  # by version
        self._window = StepWindow()
        self.lengths = FirstLengths(limit)
        self.wasted_tokens: Counter[str] = Counter()
        self.ended_tokens = 0

    def launched(self, action: LaunchGroup, prompt_tokens: int, now: float, group: Group | None = None) -> None:
        """Add the trajectories of a group that was ordered.

        Where ``group`` launches more members than it keeps, its last members are stopped, and the lengths of first
        attempts no longer estimate the mean length. A changed setting may bring the first such group at any step."""
        if group is not None and group.size > group.keep:
            self.lengths = FirstLengths(0)
        for trajectory_id in action.ids:
            trajectory = _OpenTrajectory(now, action.round_kind, prompt_tokens, action.policy_version)
            self._open[trajectory_id] = self._by_request[str(trajectory_id)] = trajectory

    def routed(self, completion: str, engine: str, now: float) -> None:
        """Note that ``engine`` got the first part of ``completion``, or its remainder after a pause."""
        if (trajectory := self._by_request.get(completion)) is not None:
            trajectory.engine = engine
            trajectory.routed_s = trajectory.routed_s or now

    def paused(self, ids: Iterable[TrajectoryId], now: float, *, paused: bool) -> None:
        """Note that control pauses trajectories or resumes them. A paused trajectory that is in an engine leaves it a
        moment later, which ``on_outcome`` notes."""
        for trajectory in filter(None, map(self._open.get, ids)):
            trajectory.pausing = paused
            if trajectory.left_engine_s is not None and not paused:
                trajectory.paused_s = trajectory.paused_s + now - trajectory.left_engine_s
                trajectory.left_engine_s = None

    def went_live(self, policy_version: int, now: float) -> None:
        """Note that engines sample ``policy_version`` from now on. Requests may have waited for it in paused
        engines."""
        self._live_since[policy_version] = now
        oldest = min((trajectory.policy_version for trajectory in self._open.values()), default=policy_version)
        self._live_since = {version: since for version, since in self._live_since.items() if version >= oldest}

    def on_outcome(self, item: TrajectoryOutcome, now: float) -> None:
        """Note an outcome."""
        if isinstance(item, TrajectoryPaused):
            trajectory = self._open.get(item.id)
            if trajectory is not None and trajectory.pausing:
                trajectory.left_engine_s = now
            return  # another outcome follows once it is resumed
        trajectory_id = item.id if isinstance(item, TrajectoryLost) else item.outcome.trajectory.id
        trajectory = self._open.get(trajectory_id)
        if trajectory is None:
            return
        trajectory.outcome = item
        trajectory.returned_s = now
        length = _length(item, trajectory.round_kind)
        self._window.sampled.append(length)
        if trajectory_id.attempt == 0 and self.lengths.limit:
            counts = self.lengths.complete if length.complete else self.lengths.stopped
            counts[length.tokens] += 1
        if trajectory.drop_reason is not None:
            self._end(trajectory_id, trajectory.drop_reason, now)

    def dropped(self, ids: Iterable[TrajectoryId], reason: DropReason, now: float) -> None:
        """Note that control will not train these trajectories."""
        for trajectory_id in ids:
            trajectory = self._open.get(trajectory_id)
            if trajectory is None or trajectory.drop_reason is not None:
                continue
            trajectory.drop_reason = reason
            if trajectory.outcome is not None:
                self._end(trajectory_id, reason, now)

    def trained(self, batch: Sequence[ScoredTrajectory], now: float) -> Metrics:
        """Note that the trainer stepped on ``batch``.

        Returns the metric ``round_cost_s``: seconds by which the batch would have been complete earlier if every reward
        had come at once. The same value is returned under the function that the last sample waited for longest."""
        members = []
        for scored in batch:
            trajectory = self._open.pop(scored.trajectory.id, None)
            if trajectory is None or not isinstance(trajectory.outcome, Scored):
                continue
            members.append((trajectory.returned_s, trajectory.outcome))
            length = _length(trajectory.outcome, trajectory.round_kind)
            self._window.trained.append(length)
            self._window.kept_rewards[trajectory.round_kind].append(scored.reward)
            self.lengths.trained_samples += 1
            self.lengths.trained_tokens += length.tokens
            self.ended_tokens += length.tokens
            self._write(scored.trajectory.id, trajectory, TRAINED, now)
        if not members:
            return {}
        last_s, last = max(members, key=lambda member: member[0])
        sampled_s = max(returned_s - (item.reward_s or item.outcome.reward_seconds) for returned_s, item in members)
        metrics = {"reward/round_cost_s": max(last_s - sampled_s, 0.0)}
        if last.outcome.calls:
            slowest = max(last.outcome.calls, key=lambda call: call.seconds + call.waited_s)
            metrics[f"reward/func/{slowest.function}/round_cost_s"] = metrics["reward/round_cost_s"]
        return metrics

    def take_window(self) -> StepWindow:
        """Return the trajectories that ended since the last call."""
        self._end_failed()
        window = self._window
        self._window = StepWindow()
        return window

    def close(self, now: float) -> None:
        """End every open trajectory: the run ends."""
        self._end_failed()
        for trajectory_id, trajectory in self._open.items():
            self._write(trajectory_id, trajectory, str(trajectory.drop_reason or UNFINISHED), now)
        self._open.clear()
        self._by_request.clear()

    def _end_failed(self) -> None:
        """End trajectories without a reward with the reason of their failure, unless control dropped them before."""
        for trajectory_id, trajectory in list(self._open.items()):
            outcome = trajectory.outcome
            if isinstance(outcome, TrajectoryLost):
                reason = DropReason.CANCELLED if outcome.cancelled else DropReason.ENGINE_FAILED
                self._end(trajectory_id, reason, trajectory.returned_s)
            elif outcome is not None and isinstance(outcome.outcome, RewardFailure):
                self._end(trajectory_id, DropReason.REWARD_FAILED, trajectory.returned_s)

    def _end(self, trajectory_id: TrajectoryId, reason: DropReason, now: float) -> None:
        trajectory = self._open.pop(trajectory_id)
        outcome = trajectory.outcome
        assert outcome is not None
        tokens = _length(outcome, trajectory.round_kind).tokens
        self.wasted_tokens[str(reason)] += tokens
        self.ended_tokens += tokens
        if isinstance(outcome, Scored) and isinstance(outcome.outcome, ScoredTrajectory):
            self._window.discarded_rewards[trajectory.round_kind].append(outcome.outcome.reward)
        self._write(trajectory_id, trajectory, str(reason), now)

    def _write(self, trajectory_id: TrajectoryId, trajectory: _OpenTrajectory, outcome: str, now: float) -> None:
        self._by_request.pop(str(trajectory_id), None)
        if self._trace is not None:
            self._trace.append(_line(trajectory_id, trajectory, outcome, now, self._live_since))


def _length(outcome: EndedOutcome, round_kind: str) -> SampledLength:
    if isinstance(outcome, TrajectoryLost):
        return SampledLength(outcome.tokens, False, False, round_kind)
    trajectory = outcome.outcome.trajectory
    reason = trajectory.finish_reason
    is_complete = reason is not FinishReason.ABORT
    is_truncated = reason is FinishReason.LENGTH
    return SampledLength(trajectory.generated_tokens, is_complete, is_truncated, round_kind)


def _line(
    trajectory_id: TrajectoryId, trajectory: _OpenTrajectory, outcome: str, now: float, live_since: Mapping[int, float]
) -> TrajectoryLine:
    """Return the line of the trace. ``live_since``: times at which versions went live."""
    scored = trajectory.outcome.outcome if isinstance(trajectory.outcome, Scored) else None
    left_s = trajectory.returned_s or now
    # Figures of a trajectory without a sampled outcome: it was lost, or the run ends before it returns.
    turns: tuple[TurnTimes, ...] = ()
    finish_reason = ""
    rollout_s = left_s - trajectory.launched_s
    oldest = newest = trajectory.policy_version
    if scored is not None:
        sampled = scored.trajectory
        if sampled.environment is not None:
            turns = sampled.environment.turns
        finish_reason = str(sampled.finish_reason)
        rollout_s = sampled.rollout_seconds + sum(turn[1] for turn in turns)
        oldest = sampled.oldest_version
        newest = sampled.newest_version
    began_s = left_s
    if trajectory.engine:
        began_s = max(trajectory.routed_s, live_since.get(oldest, 0.0))
    paused_s = trajectory.paused_s
    if trajectory.left_engine_s is not None:
        paused_s += max(left_s - trajectory.left_engine_s, 0.0)
    return TrajectoryLine(
        prompt_id=trajectory_id.prompt_id,
        group=trajectory_id.group_id,
        sample=trajectory_id.sample,
        attempt=trajectory_id.attempt,
        prompt_tokens=trajectory.prompt_tokens,
        tokens=0 if trajectory.outcome is None else _length(trajectory.outcome, trajectory.round_kind).tokens,
        finish_reason=finish_reason,
        outcome=outcome,
        round_kind=trajectory.round_kind,
        launched_s=round(trajectory.launched_s, 4),
        ended_s=round(now, 4),
        rollout_s=round(rollout_s, 4),
        reward_s=0.0 if scored is None else round(scored.reward_seconds, 5),
        reward=scored.reward if isinstance(scored, ScoredTrajectory) else None,
        oldest_version=oldest,
        newest_version=newest,
        engine=trajectory.engine,
        queued_s=round(min(max(began_s - trajectory.launched_s, 0.0), left_s - trajectory.launched_s), 4),
        paused_s=round(paused_s, 4),
        returned_s=round(trajectory.returned_s, 4),
        turns=turns,
    )


class RewardCalls:
    """Latencies of the calls of reward functions since the last step, and their failures since the run began."""

    def __init__(self) -> None:
        self._calls: defaultdict[str, list[RewardCall]] = defaultdict(list)
        self._failures: Counter[str] = Counter()

    def on_outcome(self, item: Scored) -> None:
        """Count the calls of a trajectory whose outcome arrived, also of a dropped trajectory."""
        outcome = item.outcome
        for call in outcome.calls:
            self._calls[call.function].append(call)
            if call.failure is not None:
                self._failures[f"reward/func/{call.function}/{call.failure}_total"] += 1
        failed_functions = {call.function for call in outcome.calls if call.failure is not None}
        if isinstance(outcome, RewardFailure) and outcome.function not in failed_functions:
            self._failures[f"reward/func/{outcome.function}/{outcome.kind}_total"] += 1

    def take(self) -> Metrics:
        """Return the figures as metrics. Called once a step."""
        metrics = {}
        for name, calls in self._calls.items():
            seconds = [call.seconds for call in calls]
            metrics[f"reward/func/{name}/latency_p50_s"] = percentile(seconds, 0.5)
            metrics[f"reward/func/{name}/latency_p95_s"] = percentile(seconds, 0.95)
            metrics[f"reward/func/{name}/waited_p95_s"] = percentile([call.waited_s for call in calls], 0.95)
            if limits := [call.limit_s for call in calls if call.adapted]:
                metrics[f"reward/func/{name}/adapted_limit_p50_s"] = percentile(limits, 0.5)
        self._calls.clear()
        return metrics | {name: float(count) for name, count in self._failures.items()}


def work_metrics(trajectories: TrajectoryStats, rounds: Mapping[str, int], trained_tokens: int) -> Metrics:
    """Return metrics of the tokens that were sampled, trained and discarded since the last step. ``rounds``: number of
    trained rounds since the run began, by kind."""
    window = trajectories.take_window()
    by_kind = len(rounds) > 1
    ended_tokens = sum(length.tokens for length in window.sampled)
    return {
        **length_metrics(window, trajectories.lengths, by_kind=by_kind),
        **discard_metrics(window, by_kind=by_kind),
        **waste_metrics(trajectories.wasted_tokens, trajectories.ended_tokens),
        **{f"round/{kind}/total": float(count) for kind, count in rounds.items()},
        "perf/generated_per_trained_tok": ended_tokens / max(trained_tokens, 1),
    }
