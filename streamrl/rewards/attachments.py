"""Changes of the rewards of a run from Python: ``await pipeline.rewards.replace("length", my_module.better_length)``.

``Pipeline`` owns a ``RewardAttachments`` in the supervisor, which sends the changes to the controller. Changes that the
control socket of the run receives are sent by the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from streamrl.base.errors import raise_problems
from streamrl.base.types import AnyFunction
from streamrl.comm.conversation import Conversation
from streamrl.recipe.rewards import Reward
from streamrl.recipe.user_code import spec_of
from streamrl.rewards.reward_messages import (
    AttachReward,
    DetachReward,
    ListRewards,
    ReplaceReward,
    RewardChange,
    RewardReply,
    RewardRequest,
    RewardsChanged,
    RewardsListed,
)


def as_reward(reward: Reward | str | AnyFunction, name_of: Callable[[Any], str] = spec_of, **settings: Any) -> Reward:
    """A ``Reward`` from a function, from its name as in a recipe, or from another ``Reward``; ``settings`` replace
    fields. ``name_of``: function that returns the name of a function. Raises ``RecipeError`` for a function that
    another process could not import, such as a lambda."""
    if isinstance(reward, Reward):
        return structs.replace(reward, **settings)
    return Reward(function=reward if isinstance(reward, str) else name_of(reward), **settings)


class RewardAttachments(Conversation[RewardRequest, RewardReply]):
    """The rewards of a running pipeline. Each change makes a new version of the whole set; the event log has the
    version that scored each sample. A change returns its version; from then on that version scores every group of which
    no trajectory has ended. A change raises ``RecipeError`` when the functions cannot be used; then nothing has
    changed."""

    def __init__(self, name_of: Callable[[Any], str] = spec_of) -> None:
        super().__init__(RewardRequest, "controller.rewards")
        self._name_of = name_of

    async def attach(self, reward: Reward | str | AnyFunction, **settings: Any) -> int:
        """Score with one more function."""
        changed = await self.change(AttachReward(reward=as_reward(reward, self._name_of, **settings)))
        return changed.reward_version

    async def replace(self, name: str, reward: Reward | str | AnyFunction, **settings: Any) -> int:
        """Score with another function in place of ``name``."""
        changed = await self.change(ReplaceReward(name=name, reward=as_reward(reward, self._name_of, **settings)))
        return changed.reward_version

    async def detach(self, name: str) -> int:
        """Score without ``name``."""
        changed = await self.change(DetachReward(name=name))
        return changed.reward_version

    async def change(self, change: RewardChange) -> RewardsChanged:
        """Make the change of a record."""
        reply = await self.ask(change)
        assert isinstance(reply, RewardsChanged), reply
        raise_problems(reply.problems)
        return reply

    async def attached(self) -> RewardsListed:
        """List the rewards that score now."""
        reply = await self.ask(ListRewards())
        assert isinstance(reply, RewardsListed), reply
        return reply
