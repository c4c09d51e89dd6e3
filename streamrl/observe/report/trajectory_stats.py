"""Trajectories from launch to end, and calls of rewards, as the report and the trace see them. Decides nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from streamrl.base.stage_messages import EndedOutcome, Scored, TrajectoryLost, TrajectoryOutcome, TrajectoryPaused
from streamrl.base.types import DropReason, FinishReason, RewardCall, RewardFailure, ScoredTrajectory, TrajectoryId
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


class _Open(msgspec.Struct):
    """A launched trajectory that has not ended: it ends when it is trained, or was dropped and has come back."""

    launched_s: float
    round_kind: str
    prompt_tokens: int
    policy_version: int
    dropped: DropReason | None = None
    outcome: EndedOutcome | None = None
    returned_s: float = 0.0
    engine: str = ""
    routed_s: float = 0.0
    pausing: bool = False
    left_s: float | None = None
    paused_s: float = 0.0


class TrajectoryStats:
    """Follows trajectories by id and ignores those that it does not know (of an evaluation). ``now``: seconds since the
    run began."""

    def __init__(self, trace: TrajectoryTrace | None = None, limit: int = 0) -> None:
        self._trace = trace
        self._open: dict[TrajectoryId, _Open] = {}
        self._by_request: dict[str, _Open] = {}
        self._live: dict[int, float] = {}
        self._window = StepWindow()
        self.lengths = FirstLengths(limit)
        self.wasted_tokens: Counter[str] = Counter()
        self.ended_tokens = 0

    def launched(self, action: LaunchGroup, prompt_tokens: int, now: float, group: Group | None = None) -> None:
        """``group`` was ordered. Where its last siblings are to be stopped, lengths of first attempts say nothing of
        the mean any more; a changed setting may bring the first such group."""
        if group is not None and group.size > group.keep:
            self.lengths = FirstLengths(0)
        for trajectory in action.ids:
            one = _Open(now, action.round_kind, prompt_tokens, action.policy_version)
            self._open[trajectory] = self._by_request[str(trajectory)] = one

    def routed(self, whole: str, engine: str, now: float) -> None:
        """A part of the completion ``whole`` went to ``engine``: the first, or what was left of it."""
        if (one := self._by_request.get(whole)) is not None:
            one.engine = engine
            one.routed_s = one.routed_s or now

    def paused(self, ids: Iterable[TrajectoryId], now: float, *, paused: bool) -> None:
        """Control pauses trajectories, or lets them go on. They leave the engine a moment later, where they do."""
        for one in filter(None, map(self._open.get, ids)):
            one.pausing = paused
            if one.left_s is not None and not paused:
                one.paused_s = one.paused_s + now - one.left_s
                one.left_s = None

    def went_live(self, policy_version: int, now: float) -> None:
        """Engines sample ``policy_version`` from now on: requests may have waited for it in paused engines."""
        self._live[policy_version] = now
        oldest = min((one.policy_version for one in self._open.values()), default=policy_version)
        self._live = {version: at for version, at in self._live.items() if version >= oldest}

    def on_outcome(self, item: TrajectoryOutcome, now: float) -> None:
        """Note an outcome."""
        if isinstance(item, TrajectoryPaused):
            if (one := self._open.get(item.id)) is not None and one.pausing:
                one.left_s = now
            return  # it comes back once more
        trajectory = item.id if isinstance(item, TrajectoryLost) else item.outcome.trajectory.id
        if (one := self._open.get(trajectory)) is None:
            return
        one.outcome = item
        one.returned_s = now
        length = _length(item, one.round_kind)
        self._window.sampled.append(length)
        if trajectory.attempt == 0 and self.lengths.limit:
            (self.lengths.whole if length.whole else self.lengths.stopped)[length.tokens] += 1
        if one.dropped is not None:
            self._end(trajectory, one.dropped, now)

    def dropped(self, ids: Iterable[TrajectoryId], reason: DropReason, now: float) -> None:
        """Control will not train them."""
        for trajectory in ids:
            one = self._open.get(trajectory)
            if one is None or one.dropped is not None:
                continue
            one.dropped = reason
            if one.outcome is not None:
                self._end(trajectory, reason, now)

    def trained(self, batch: Sequence[ScoredTrajectory], now: float) -> dict[str, float]:
        """The trainer stepped on them. Returns ``round_cost_s``: how much sooner the batch would have been complete if
        every reward had come at once, also under the function that the last sample waited for longest."""
        members: list[tuple[float, Scored]] = []
        for scored in batch:
            one = self._open.pop(scored.trajectory.id, None)
            if one is None or not isinstance(one.outcome, Scored):
                continue
            members.append((one.returned_s, one.outcome))
            length = _length(one.outcome, one.round_kind)
            self._window.trained.append(length)
            self._window.kept_rewards[one.round_kind].append(scored.reward)
            self.lengths.trained_samples += 1
            self.lengths.trained_tokens += length.tokens
            self.ended_tokens += length.tokens
            self._write(scored.trajectory.id, one, TRAINED, now)
        if not members:
            return {}
        last_s, last = max(members, key=lambda member: member[0])
        sampled_s = max(at - (item.reward_s or item.outcome.reward_seconds) for at, item in members)
        metrics = {"reward/round_cost_s": max(last_s - sampled_s, 0.0)}
        if last.outcome.calls:
            slowest = max(last.outcome.calls, key=lambda call: call.seconds + call.waited_s)
            metrics[f"reward/func/{slowest.function}/round_cost_s"] = metrics["reward/round_cost_s"]
        return metrics

    def take_window(self) -> StepWindow:
        """Return what ended since the last call."""
        self._end_failed()
        window = self._window
        self._window = StepWindow()
        return window

    def close(self, now: float) -> None:
        """The run ends: what is under way ends with it."""
        self._end_failed()
        for trajectory, one in self._open.items():
            self._write(trajectory, one, str(one.dropped or UNFINISHED), now)
        self._open.clear()
        self._by_request.clear()

    def _end_failed(self) -> None:
        """End trajectories without a reward with their own reason, unless control dropped them before it knew."""
        for trajectory, one in list(self._open.items()):
            if isinstance(one.outcome, TrajectoryLost):
                reason = DropReason.CANCELLED if one.outcome.cancelled else DropReason.ENGINE_FAILED
                self._end(trajectory, reason, one.returned_s)
            elif one.outcome is not None and isinstance(one.outcome.outcome, RewardFailure):
                self._end(trajectory, DropReason.REWARD_FAILED, one.returned_s)

    def _end(self, trajectory: TrajectoryId, reason: DropReason, now: float) -> None:
        one = self._open.pop(trajectory)
        assert one.outcome is not None
        tokens = _length(one.outcome, one.round_kind).tokens
        self.wasted_tokens[str(reason)] += tokens
        self.ended_tokens += tokens
        if isinstance(one.outcome, Scored) and isinstance(one.outcome.outcome, ScoredTrajectory):
            self._window.discarded_rewards[one.round_kind].append(one.outcome.outcome.reward)
        self._write(trajectory, one, str(reason), now)

    def _write(self, trajectory: TrajectoryId, one: _Open, outcome: str, now: float) -> None:
        self._by_request.pop(str(trajectory), None)
        if self._trace is not None:
            self._trace.append(_line(trajectory, one, outcome, now, self._live))


def _length(outcome: EndedOutcome, round_kind: str) -> SampledLength:
    if isinstance(outcome, TrajectoryLost):
        return SampledLength(outcome.tokens, False, False, round_kind)
    trajectory = outcome.outcome.trajectory
    reason = trajectory.finish_reason
    whole = reason is not FinishReason.ABORT
    truncated = reason is FinishReason.LENGTH
    return SampledLength(trajectory.generated_tokens, whole, truncated, round_kind)


def _line(trajectory: TrajectoryId, one: _Open, outcome: str, now: float, live: Mapping[int, float]) -> TrajectoryLine:
    """``live``: when versions went live."""
    scored = one.outcome.outcome if isinstance(one.outcome, Scored) else None
    sampled = scored.trajectory if scored is not None else None
    turns = sampled.environment.turns if sampled is not None and sampled.environment is not None else ()
    sampled_s = 0.0 if sampled is None else sampled.rollout_seconds + sum(turn[1] for turn in turns)
    oldest = one.policy_version if sampled is None else sampled.oldest_version
    began_s = max(one.routed_s, live.get(oldest, 0.0)) if one.engine else one.returned_s or now
    paused_s = one.paused_s + (max((one.returned_s or now) - one.left_s, 0.0) if one.left_s is not None else 0.0)
    return TrajectoryLine(
        prompt_id=trajectory.prompt_id,
        group=trajectory.group_id,
        sample=trajectory.sample,
        attempt=trajectory.attempt,
        prompt_tokens=one.prompt_tokens,
        tokens=0 if one.outcome is None else _length(one.outcome, one.round_kind).tokens,
        finish_reason="" if sampled is None else str(sampled.finish_reason),
        outcome=outcome,
        round_kind=one.round_kind,
        launched_s=round(one.launched_s, 4),
        ended_s=round(now, 4),
        rollout_s=round((one.returned_s or now) - one.launched_s if sampled is None else sampled_s, 4),
        reward_s=0.0 if scored is None else round(scored.reward_seconds, 5),
        reward=scored.reward if isinstance(scored, ScoredTrajectory) else None,
        oldest_version=oldest,
        newest_version=one.policy_version if sampled is None else sampled.newest_version,
        engine=one.engine,
        queued_s=round(min(max(began_s - one.launched_s, 0.0), (one.returned_s or now) - one.launched_s), 4),
        paused_s=round(paused_s, 4),
        returned_s=round(one.returned_s, 4),
        turns=turns,
    )


class RewardCalls:
    """Latencies of calls since the last step, and failures since the run began."""

    def __init__(self) -> None:
        self._calls: defaultdict[str, list[RewardCall]] = defaultdict(list)
        self._failures: Counter[str] = Counter()

    def on_outcome(self, item: Scored) -> None:
        """The outcome of one trajectory arrived, also of one that was dropped."""
        outcome = item.outcome
        for call in outcome.calls:
            self._calls[call.function].append(call)
            if call.failure is not None:
                self._failures[f"reward/func/{call.function}/{call.failure}_total"] += 1
        failed = {call.function for call in outcome.calls if call.failure is not None}
        if isinstance(outcome, RewardFailure) and outcome.function not in failed:
            self._failures[f"reward/func/{outcome.function}/{outcome.kind}_total"] += 1

    def take(self) -> dict[str, float]:
        """Figures as metrics; once a step."""
        metrics: dict[str, float] = {}
        for name, calls in self._calls.items():
            seconds = [call.seconds for call in calls]
            metrics[f"reward/func/{name}/latency_p50_s"] = percentile(seconds, 0.5)
            metrics[f"reward/func/{name}/latency_p95_s"] = percentile(seconds, 0.95)
            metrics[f"reward/func/{name}/waited_p95_s"] = percentile([call.waited_s for call in calls], 0.95)
            if limits := [call.limit_s for call in calls if call.adapted]:
                metrics[f"reward/func/{name}/adapted_limit_p50_s"] = percentile(limits, 0.5)
        self._calls.clear()
        return metrics | {name: float(count) for name, count in self._failures.items()}


def work_metrics(trajectories: TrajectoryStats, rounds: Mapping[str, int], trained_tokens: int) -> dict[str, float]:
    """Metrics of what was sampled, kept and discarded since the last step. ``rounds``: trained until now, by kind."""
    window = trajectories.take_window()
    several = len(rounds) > 1
    ended = sum(length.tokens for length in window.sampled)
    return {
        **length_metrics(window, trajectories.lengths, by_kind=several),
        **discard_metrics(window, by_kind=several),
        **waste_metrics(trajectories.wasted_tokens, trajectories.ended_tokens),
        **{f"round/{kind}/total": float(count) for kind, count in rounds.items()},
        "perf/generated_per_trained_tok": ended / max(trained_tokens, 1),
    }
