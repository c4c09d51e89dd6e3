"""How the rewards of a run are changed: orders to the controller, and its answers on ``steps``. They are asked for by
the owner of the ``Pipeline``, and over the control socket of the run (``control_protocol``)."""

from __future__ import annotations

from streamrl.base.messages import Message
from streamrl.base.types import Record
from streamrl.recipe.rewards import Reward


class AttachReward(Message, frozen=True):
    """Score with this function too."""

    reward: Reward
    request_id: int = 0


class ReplaceReward(Message, frozen=True):
    """Score with this function in place of the one called ``name``."""

    name: str
    reward: Reward
    request_id: int = 0


class DetachReward(Message, frozen=True):
    """Score without the function called ``name``."""

    name: str
    request_id: int = 0


class ListRewards(Message, frozen=True):
    """Say what is attached. In turn with the changes."""

    request_id: int = 0


RewardChange = AttachReward | ReplaceReward | DetachReward
RewardRequest = RewardChange | ListRewards


class RewardsChanged(Message, frozen=True):
    """The answer to a change. ``reward_version``: what is attached from now on, by name. ``problems``: nothing has
    changed."""

    request_id: int
    reward_version: int
    rewards: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class AttachedReward(Record, frozen=True):
    """A function that scores. ``since``: the version of the rewards that brought it. Its options stay unsaid."""

    name: str
    function: str
    weight: float
    shadow: bool
    trusted: bool
    since: int


class RewardsListed(Message, frozen=True):
    """The answer to ``ListRewards``."""

    request_id: int
    reward_version: int
    rewards: tuple[AttachedReward, ...] = ()


RewardReply = RewardsChanged | RewardsListed
