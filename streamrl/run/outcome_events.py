"""Outcomes of the stages as events of control. Pure."""

from __future__ import annotations

from streamrl.base.stage_messages import EndedOutcome, TrajectoryLost
from streamrl.base.types import DropReason, RewardFailure
from streamrl.control import events as on


def event_of(item: EndedOutcome) -> on.TrajectoryFailed | on.TrajectoryScored:
    """The event that reports ``item`` to control."""
    if isinstance(item, TrajectoryLost):
        reason = DropReason.CANCELLED if item.cancelled else DropReason.ENGINE_FAILED
        return on.TrajectoryFailed(id=item.id, reason=reason, message=item.reason, tokens=item.tokens)
    outcome = item.outcome
    trajectory = outcome.trajectory
    if isinstance(outcome, RewardFailure):
        return on.TrajectoryFailed(
            id=trajectory.id,
            reason=DropReason.REWARD_FAILED,
            message=f"{outcome.function} {outcome.kind}: {outcome.message}",
            tokens=trajectory.generated_tokens,
            policy=outcome.policy,
            reward_version=outcome.reward_version,
        )
    return on.TrajectoryScored(
        id=trajectory.id,
        reward=outcome.reward,
        tokens=trajectory.generated_tokens,
        finish_reason=trajectory.finish_reason,
        oldest_version=trajectory.oldest_version,
        newest_version=trajectory.newest_version,
        reward_version=outcome.reward_version,
        separate_rewards={name: value for name, (weight, value) in outcome.separate_rewards.items() if weight},
        seconds=round(trajectory.rollout_seconds + item.reward_s, 3),
    )
