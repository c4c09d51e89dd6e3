"""Conversion of trajectories into messages for a reward worker, and of its answers into their outcomes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamrl.base.types import EnvironmentResult, Prompt, RewardFailure, ScoredTrajectory, Trajectory
from streamrl.comm.decoded_size import UNSUSPECTED_BYTES
from streamrl.rewards.reward_messages import CompletionToScore, SampleReward, ScoreGroup, ScoreGroups

_MOST_BYTES = 4 << 20  # of completions: far below what a stream takes, far above the price of a message
_MOST_PROMPT_BYTES = UNSUSPECTED_BYTES // 2
"""Of several prompts together, so that whatever their columns are made of, the message is not suspected of growing past
all bounds when it is decoded. One prompt alone may be larger: ``read_prompt`` has looked at it."""

_COMPLETION_BYTES = 1024  # beside its tokens, once it is decoded
_sizing = msgspec.msgpack.Encoder(enc_hook=bytes)


class OrderMessage:
    """One message to a reward worker while it is put together."""

    def __init__(self) -> None:
        self._groups: list[ScoreGroup] = []
        self._prompts: list[Prompt] = []
        self._places: dict[int, int] = {}
        self._bytes = 0
        self._prompt_bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, order_id: int, trajectories: Sequence[Trajectory], *, reward_version: int, rank: int) -> bool:
        """One more group to score. False: it has no room beside what is there, which is to be sent first. An empty
        message has room for any."""
        if not self._takes(trajectories):
            return False
        completions = tuple([self._completion(trajectory) for trajectory in trajectories])
        self._groups.append(
            ScoreGroup(order_id=order_id, completions=completions, reward_version=reward_version, rank=rank)
        )
        return True

    def message(self) -> ScoreGroups:
        """All that was added, in that order."""
        return ScoreGroups(groups=tuple(self._groups), prompts=tuple(self._prompts))

    def _takes(self, trajectories: Sequence[Trajectory]) -> bool:
        """Count what they would add, and whether that is too much."""
        new = {id(t.prompt): t.prompt for t in trajectories if id(t.prompt) not in self._places}
        prompt_bytes = self._prompt_bytes + sum(len(_sizing.encode(prompt)) for prompt in new.values())
        own_bytes = self._bytes + sum(map(_completion_bytes, trajectories))
        if self._groups and (own_bytes > _MOST_BYTES or (new and prompt_bytes > _MOST_PROMPT_BYTES)):
            return False
        self._prompt_bytes = prompt_bytes
        self._bytes = own_bytes
        return True

    def _completion(self, trajectory: Trajectory) -> CompletionToScore:
        prompt = trajectory.prompt
        identity = trajectory.id
        environment = trajectory.environment or EnvironmentResult()
        # Siblings share one object, unless they were read from a journal: then each has its own.
        place = self._places.get(id(prompt))
        if place is None:
            if not self._prompts or self._prompts[-1] != prompt:
                self._prompts.append(prompt)
            place = self._places[id(prompt)] = len(self._prompts) - 1
        return CompletionToScore(
            prompt=place,
            group_id=identity.group_id,
            sample=identity.sample,
            token_ids=trained_tokens(trajectory),
            finish_reason=trajectory.finish_reason,
            attempt=identity.attempt,
            last_turn=_last_turn(trajectory),
            environment_reward=environment.reward,
            tool_calls=sum(environment.calls.values()),
        )


def score_message(trajectories: Sequence[Trajectory], *, order_id: int = 0, rank: int = 0) -> ScoreGroups:
    """A message with one order: to score ``trajectories``."""
    message = OrderMessage()
    message.add(order_id, trajectories, reward_version=0, rank=rank)
    return message.message()


def _completion_bytes(trajectory: Trajectory) -> int:
    tokens = sum([len(s.token_ids) * s.token_ids.itemsize for s in trajectory.segments if s.trained])
    return tokens + _COMPLETION_BYTES


def _last_turn(trajectory: Trajectory) -> int:
    turns = [len(segment.token_ids) for segment in trajectory.segments if segment.trained]
    return turns[-1] if len(turns) > 1 else 0


def trained_tokens(trajectory: Trajectory) -> bytes:
    """Token ids of all trained segments, joined: what the policy sampled, as int32."""
    return b"".join([segment.token_ids.tobytes() for segment in trajectory.segments if segment.trained])


def outcome_of(trajectory: Trajectory, reward: SampleReward, version: int) -> ScoredTrajectory | RewardFailure:
    """Join a trajectory with the worker's result."""
    if reward.kind is None:
        return ScoredTrajectory(
            trajectory=trajectory,
            reward=reward.reward,
            reward_parts=reward.parts,
            reward_seconds=reward.seconds,
            calls=reward.calls,
            reward_version=version,
            separate_rewards=reward.separate,
            turn_rewards=tuple([reward.environment_weight * one for one in trajectory.turn_rewards]),
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
