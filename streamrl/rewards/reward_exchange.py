"""What of trajectories goes to a reward worker, and what its answers make of the trajectories that stayed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streamrl.stage_messages import CompletionToScore, SampleReward, ScoreGroup, ScoreGroups
from streamrl.types import Prompt, RewardFailure, ScoredTrajectory, Trajectory


class OrderMessage:
    """One message to a reward worker while it is put together."""

    def __init__(self) -> None:
        self._groups: list[ScoreGroup] = []
        self._prompts: list[Prompt] = []
        self._places: dict[int, int] = {}

    def add(self, order_id: int, trajectories: Iterable[Trajectory], *, reward_version: int, rank: int) -> None:
        """One more group to score."""
        completions = tuple([self._completion(trajectory) for trajectory in trajectories])
        self._groups.append(
            ScoreGroup(order_id=order_id, completions=completions, reward_version=reward_version, rank=rank)
        )

    def message(self) -> ScoreGroups:
        """All that was added, in that order."""
        return ScoreGroups(groups=tuple(self._groups), prompts=tuple(self._prompts))

    def _completion(self, trajectory: Trajectory) -> CompletionToScore:
        prompt, identity = trajectory.prompt, trajectory.id
        # Siblings share one object; two equal prompts that are two objects travel twice, which is only a pity.
        place = self._places.get(id(prompt))
        if place is None:
            place = self._places[id(prompt)] = len(self._prompts)
            self._prompts.append(prompt)
        return CompletionToScore(
            prompt=place,
            group_id=identity.group_id,
            sample=identity.sample,
            token_ids=trained_tokens(trajectory),
            finish_reason=trajectory.finish_reason,
            attempt=identity.attempt,
        )


def score_message(trajectories: Sequence[Trajectory], *, order_id: int = 0, rank: int = 0) -> ScoreGroups:
    """A message with one order: to score ``trajectories``."""
    message = OrderMessage()
    message.add(order_id, trajectories, reward_version=0, rank=rank)
    return message.message()


def trained_tokens(trajectory: Trajectory) -> bytes:
    """Token ids of all trained segments, joined: what the policy sampled, as int32."""
    return b"".join([segment.token_ids.tobytes() for segment in trajectory.segments if segment.trained])


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
