"""Conversion of trajectories into messages for a reward worker, and of its answers into outcomes. Pure.

The reward stage (controller) builds each ``OrderMessage`` and reads the answers with ``outcome_of``. A ``RewardSet``
that scores in the process of a command calls the same functions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import msgpack

from streamrl.base.types import EnvironmentResult, Prompt, RewardFailure, ScoredTrajectory, Trajectory
from streamrl.comm.decoded_size import UNSUSPECTED_BYTES
from streamrl.rewards.reward_messages import CompletionToScore, SampleReward, ScoreGroup, ScoreGroups

_MOST_BYTES = 4 << 20
"""Limit of the bytes of all completions: far below the limit of a stream, far above the fixed cost of a message."""

_MOST_PROMPT_BYTES = UNSUSPECTED_BYTES // 2
"""Limit of the bytes of several prompts together. Below it the receiver does not suspect the message of growing past
all bounds when it is decoded, whatever the columns hold. One prompt alone may be larger: ``read_prompt`` has checked
it."""

_COMPLETION_BYTES = 1024  # memory of a decoded completion, without its tokens
_sizing = msgpack.Encoder(enc_hook=bytes)


class OrderMessage:
    """Builder of one message to a reward worker."""

    def __init__(self) -> None:
        self._groups: list[ScoreGroup] = []
        self._prompts: list[Prompt] = []
        self._places: dict[int, int] = {}  # id of a prompt object -> its index in ``_prompts``
        self._bytes = 0
        self._prompt_bytes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, order_id: int, trajectories: Sequence[Trajectory], *, reward_version: int, rank: int) -> bool:
        """Add a group to score. False: the message has no room for it and is to be sent first. An empty message has
        room for any group."""
        if not self._take_room(trajectories):
            return False
        completions = tuple([self._completion(trajectory) for trajectory in trajectories])
        self._groups.append(
            ScoreGroup(order_id=order_id, completions=completions, reward_version=reward_version, rank=rank)
        )
        return True

    def message(self) -> ScoreGroups:
        """The message with all groups, in the order in which they were added."""
        return ScoreGroups(groups=tuple(self._groups), prompts=tuple(self._prompts))

    def _take_room(self, trajectories: Sequence[Trajectory]) -> bool:
        """Add the bytes of ``trajectories`` to the size of the message; False: the message would be too large."""
        prompts = [trajectory.prompt for trajectory in trajectories]
        new_prompts = {id(prompt): prompt for prompt in prompts if id(prompt) not in self._places}
        prompt_bytes = self._prompt_bytes + sum(len(_sizing.encode(prompt)) for prompt in new_prompts.values())
        completion_bytes = self._bytes + sum(map(_completion_bytes, trajectories))
        if self._groups:
            prompts_too_large = bool(new_prompts) and prompt_bytes > _MOST_PROMPT_BYTES
            if completion_bytes > _MOST_BYTES or prompts_too_large:
                return False
        self._prompt_bytes = prompt_bytes
        self._bytes = completion_bytes
        return True

    def _completion(self, trajectory: Trajectory) -> CompletionToScore:
        prompt = trajectory.prompt
        identity = trajectory.id
        environment = trajectory.environment or EnvironmentResult()
        # Siblings share one prompt object, unless they were read from a journal: then each has an equal object.
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
            turns=_turns(trajectory),
            environment_reward=environment.reward,
            tool_calls=sum(environment.calls.values()),
        )


def score_message(trajectories: Sequence[Trajectory], *, order_id: int = 0, rank: int = 0) -> ScoreGroups:
    """A message with one order, to score ``trajectories``."""
    message = OrderMessage()
    message.add(order_id, trajectories, reward_version=0, rank=rank)
    return message.message()


def _completion_bytes(trajectory: Trajectory) -> int:
    arrays = [segment.token_ids for segment in trajectory.segments if segment.trained]
    return sum([len(token_ids) * token_ids.itemsize for token_ids in arrays]) + _COMPLETION_BYTES


def _turns(trajectory: Trajectory) -> tuple[int, ...]:
    """Tokens of each turn; empty: the trajectory has one turn."""
    lengths = [len(segment.token_ids) for segment in trajectory.segments if segment.trained]
    return tuple(lengths if len(lengths) > 1 else lengths[:0])


def trained_tokens(trajectory: Trajectory) -> bytes:
    """Token ids that the policy sampled (all trained segments, joined), as int32."""
    return b"".join([segment.token_ids.tobytes() for segment in trajectory.segments if segment.trained])


def outcome_of(trajectory: Trajectory, reward: SampleReward, version: int) -> ScoredTrajectory | RewardFailure:
    """Join a trajectory with the worker's result."""
    if reward.kind is None:
        turn_rewards = [reward.environment_weight * turn_reward for turn_reward in trajectory.turn_rewards]
        return ScoredTrajectory(
            trajectory=trajectory,
            reward=reward.reward,
            reward_parts=reward.parts,
            reward_seconds=reward.seconds,
            calls=reward.calls,
            reward_version=version,
            separate_rewards=reward.separate,
            turn_rewards=tuple(turn_rewards),
            token_values=reward.token_values,
        )
    remark = trajectory.environment and trajectory.environment.remark
    return RewardFailure(
        trajectory=trajectory,
        function=reward.function,
        kind=reward.kind,
        message=f"{reward.message}; {remark}" if remark else reward.message,
        reward_seconds=reward.seconds,
        calls=reward.calls,
        reward_version=version,
        policy=reward.policy,
    )
