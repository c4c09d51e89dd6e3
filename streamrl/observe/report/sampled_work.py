"""Every trajectory from its launch to its end, as a report sees it: what was sampled, trained, and discarded, and why.

Control decides from its own state; this is bookkeeping beside it, for metrics and the trace. An end may be decided
before it is complete: one that is cancelled while it runs ends when its tokens are known, since each that was launched
comes back exactly once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from streamrl.base.stage_messages import RewardOutcome, Scored, TrajectoryHeld, TrajectoryLost
from streamrl.base.types import DropReason, FinishReason, RewardFailure, ScoredTrajectory, Trajectory, TrajectoryId
from streamrl.observe.report.trajectory_trace import TRAINED, UNFINISHED, TrajectoryLine, TrajectoryTrace


class SampledLength(msgspec.Struct, frozen=True):
    """One trajectory's sampled tokens. ``whole``: it ended by itself or at the limit, nobody stopped it."""

    tokens: int
    whole: bool
    truncated: bool
    round_kind: str


class SampledWindow(msgspec.Struct):
    """What ended since the last step: sampled (whole, or stopped with the tokens so far), trained; and the rewards of
    what was kept and of what was rewarded and then discarded, by kind of round."""

    sampled: list[SampledLength] = msgspec.field(default_factory=list)
    trained: list[SampledLength] = msgspec.field(default_factory=list)
    kept_rewards: dict[str, list[float]] = msgspec.field(default_factory=lambda: defaultdict(list))
    discarded_rewards: dict[str, list[float]] = msgspec.field(default_factory=lambda: defaultdict(list))


class FirstLengths(msgspec.Struct):
    """Lengths of first attempts since the run began, by number of tokens: ``whole`` ones and those ``stopped`` there;
    and of all trained samples. ``limit``: tokens that one may have; 0: who is stopped depends on how long it would be
    (siblings race each other), and nothing is counted."""

    limit: int
    whole: Counter[int] = msgspec.field(default_factory=Counter)
    stopped: Counter[int] = msgspec.field(default_factory=Counter)
    trained_tokens: int = 0
    trained_samples: int = 0


class _Open(msgspec.Struct):
    """One launched trajectory whose end is not complete."""

    launched_s: float
    round_kind: str
    prompt_tokens: int
    policy_version: int
    dropped: DropReason | None = None
    result: ScoredTrajectory | None = None


class SampledWork:
    """Follows trajectories by id; what it does not know (evaluation, an end that was told before) it ignores."""

    def __init__(self, trace: TrajectoryTrace | None = None, limit: int = 0) -> None:
        self._trace = trace
        self._open: dict[TrajectoryId, _Open] = {}
        self._failures: dict[TrajectoryId, TrajectoryLine] = {}
        self._window = SampledWindow()
        self.lengths = FirstLengths(limit)
        self.wasted_tokens: Counter[str] = Counter()
        self.ended_tokens = 0

    def launched(
        self, ids: Iterable[TrajectoryId], now: float, *, round_kind: str, prompt_tokens: int, policy_version: int
    ) -> None:
        """They were ordered at ``now`` (seconds since the run began)."""
        for trajectory in ids:
            self._open[trajectory] = _Open(now, round_kind, prompt_tokens, policy_version)

    def is_wanted(self, trajectory: TrajectoryId) -> bool:
        """Whether it was launched, and neither trained nor dropped yet."""
        held = self._open.get(trajectory)
        return held is not None and held.dropped is None

    def came_back(self, item: RewardOutcome, now: float) -> None:
        """An outcome arrived, whatever control makes of it."""
        match item:
            case TrajectoryHeld():
                return  # it comes back once more
            case TrajectoryLost():
                self._lost(item, now)
            case Scored(outcome=ScoredTrajectory() as scored):
                self._sampled(scored, now)
            case Scored(outcome=RewardFailure() as failure):
                self._failed(failure, now)

    def dropped(self, ids: Iterable[TrajectoryId], reason: DropReason, now: float) -> None:
        """Control will not train them."""
        for trajectory in ids:
            if trajectory in self._failures:
                self._end_failed(trajectory, reason)
            held = self._open.get(trajectory)
            if held is None or held.dropped is not None:
                continue
            held.dropped = reason
            if held.result is not None:
                self._discard(trajectory, held, reason, now)

    def trained(self, batch: Sequence[ScoredTrajectory], now: float) -> None:
        """The trainer stepped on them."""
        for scored in batch:
            held = self._open.pop(scored.trajectory.id, None)
            if held is None:
                continue
            self._window.trained.append(_length(scored.trajectory, held))
            self._window.kept_rewards[held.round_kind].append(scored.reward)
            self.lengths.trained_samples += 1
            self.lengths.trained_tokens += scored.trajectory.generated_tokens
            self.ended_tokens += scored.trajectory.generated_tokens
            self._write(_scored_line(scored, held, TRAINED, now))

    def take_window(self) -> SampledWindow:
        """What ended since this was asked before."""
        self._end_all_failed()
        window, self._window = self._window, SampledWindow()
        return window

    def close(self, now: float) -> None:
        """The run ends: what is under way ends with it."""
        self._end_all_failed()
        for trajectory, held in self._open.items():
            outcome = str(held.dropped or UNFINISHED)
            if held.result is not None:
                self._write(_scored_line(held.result, held, outcome, now))
            else:
                self._write(_line(trajectory, held, outcome, now))
        self._open.clear()

    def _sampled(self, scored: ScoredTrajectory, now: float) -> None:
        trajectory = scored.trajectory.id
        held = self._open.get(trajectory)
        if held is None:
            return
        held.result = scored
        self._count(trajectory, _length(scored.trajectory, held))
        if held.dropped is not None:
            self._discard(trajectory, held, held.dropped, now)

    def _failed(self, failure: RewardFailure, now: float) -> None:
        trajectory = failure.trajectory
        held = self._open.pop(trajectory.id, None)
        if held is None:
            return
        self._count(trajectory.id, _length(trajectory, held))
        reason = held.dropped or DropReason.REWARD_FAILED
        self._failures[trajectory.id] = _line(
            trajectory.id, held, str(reason), now, sampled=trajectory, reward_s=failure.reward_seconds
        )
        if held.dropped is not None:
            self._end_failed(trajectory.id, held.dropped)

    def _lost(self, item: TrajectoryLost, now: float) -> None:
        held = self._open.pop(item.id, None)
        if held is None:
            return
        self._count(item.id, SampledLength(item.tokens, False, False, held.round_kind))
        reason = held.dropped or (DropReason.CANCELLED if item.cancelled else DropReason.ENGINE_FAILED)
        self._failures[item.id] = _line(item.id, held, str(reason), now, tokens=item.tokens)
        if held.dropped is not None:
            self._end_failed(item.id, held.dropped)

    def _end_failed(self, trajectory: TrajectoryId, reason: DropReason) -> None:
        """Control may have dropped it before it heard of the failure: its reason is waited for, until the step ends."""
        line = msgspec.structs.replace(self._failures.pop(trajectory), outcome=str(reason))
        self._waste(reason, line.tokens)
        self._write(line)

    def _end_all_failed(self) -> None:
        for trajectory, line in list(self._failures.items()):
            self._end_failed(trajectory, DropReason(line.outcome))

    def _discard(self, trajectory: TrajectoryId, held: _Open, reason: DropReason, now: float) -> None:
        if held.result is None:
            raise ValueError(f"trajectory {trajectory} has no result yet")
        del self._open[trajectory]
        self._window.discarded_rewards[held.round_kind].append(held.result.reward)
        self._waste(reason, held.result.trajectory.generated_tokens)
        self._write(_scored_line(held.result, held, str(reason), now))

    def _count(self, trajectory: TrajectoryId, length: SampledLength) -> None:
        self._window.sampled.append(length)
        if trajectory.attempt == 0 and self.lengths.limit:
            (self.lengths.whole if length.whole else self.lengths.stopped)[length.tokens] += 1

    def _waste(self, reason: DropReason, tokens: int) -> None:
        self.wasted_tokens[str(reason)] += tokens
        self.ended_tokens += tokens

    def _write(self, line: TrajectoryLine) -> None:
        if self._trace is not None:
            self._trace.append(line)


def _length(trajectory: Trajectory, held: _Open) -> SampledLength:
    reason = trajectory.finish_reason
    return SampledLength(
        trajectory.generated_tokens, reason is not FinishReason.ABORT, reason is FinishReason.LENGTH, held.round_kind
    )


def _line(
    trajectory: TrajectoryId,
    held: _Open,
    outcome: str,
    now: float,
    *,
    tokens: int = 0,
    sampled: Trajectory | None = None,
    reward_s: float = 0.0,
    reward: float | None = None,
) -> TrajectoryLine:
    return TrajectoryLine(
        prompt_id=trajectory.prompt_id,
        group=trajectory.group_id,
        sample=trajectory.sample,
        attempt=trajectory.attempt,
        prompt_tokens=held.prompt_tokens,
        tokens=tokens if sampled is None else sampled.generated_tokens,
        finish_reason="" if sampled is None else str(sampled.finish_reason),
        outcome=outcome,
        round_kind=held.round_kind,
        launched_s=round(held.launched_s, 4),
        ended_s=round(now, 4),
        rollout_s=round(now - held.launched_s if sampled is None else sampled.rollout_seconds, 4),
        reward_s=round(reward_s, 5),
        reward=reward,
        oldest_version=held.policy_version if sampled is None else sampled.oldest_version,
        newest_version=held.policy_version if sampled is None else sampled.newest_version,
    )


def _scored_line(scored: ScoredTrajectory, held: _Open, outcome: str, now: float) -> TrajectoryLine:
    trajectory = scored.trajectory
    return _line(
        trajectory.id,
        held,
        outcome,
        now,
        sampled=trajectory,
        reward_s=scored.reward_seconds,
        reward=scored.reward,
    )
