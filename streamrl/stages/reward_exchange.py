"""What of a trajectory goes to a reward worker, and what its answer makes of the trajectory that stayed here. Pure."""

from __future__ import annotations

import msgspec

from streamrl.stage_messages import SampleReward, ScoreGroup
from streamrl.types import RewardFailure, ScoredTrajectory, Segment, Trajectory


def for_worker(order: ScoreGroup) -> ScoreGroup:
    """``order`` with what a reward may read of its trajectories."""
    return msgspec.structs.replace(order, trajectories=tuple(_without_logprobs(t) for t in order.trajectories))


def _without_logprobs(trajectory: Trajectory) -> Trajectory:
    segments = tuple(
        Segment(token_ids=s.token_ids, trained=s.trained, version_spans=s.version_spans) for s in trajectory.segments
    )
    return msgspec.structs.replace(trajectory, segments=segments)


def outcome_of(trajectory: Trajectory, reward: SampleReward, version: int) -> ScoredTrajectory | RewardFailure:
    """What the worker said of a trajectory, with the trajectory."""
    if reward.kind is None:
        return ScoredTrajectory(
            trajectory=trajectory,
            reward=reward.reward,
            reward_parts=reward.parts,
            reward_seconds=reward.seconds,
            calls=reward.calls,
            reward_version=version,
            separate_rewards=reward.separate,
        )
    return RewardFailure(
        trajectory=trajectory,
        function=reward.function,
        kind=reward.kind,
        message=reward.message,
        reward_seconds=reward.seconds,
        calls=reward.calls,
        reward_version=version,
        policy=reward.policy,
    )
