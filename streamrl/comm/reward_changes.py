"""How whoever holds a ``Pipeline`` changes the rewards of its run: orders to the controller, answers on ``steps``."""

from __future__ import annotations

from streamrl.config.rewards import Reward
from streamrl.messages import Message


class AttachReward(Message, frozen=True):
    """Score with this function too."""

    request_id: int
    reward: Reward


class ReplaceReward(Message, frozen=True):
    """Score with this function in place of the one called ``name``."""

    request_id: int
    name: str
    reward: Reward


class DetachReward(Message, frozen=True):
    """Score without the function called ``name``."""

    request_id: int
    name: str


RewardChange = AttachReward | ReplaceReward | DetachReward


class RewardsChanged(Message, frozen=True):
    """The answer. ``reward_version``: what is attached from now on, by name. ``problems``: nothing has changed."""

    request_id: int
    reward_version: int
    rewards: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
