"""Changing the rewards of a run from Python: ``await pipeline.rewards.replace("length", my_module.better_length)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from streamrl.base.errors import RecipeError
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


def as_reward(
    given: Reward | str | Callable[..., Any], named: Callable[[Any], str] = spec_of, **settings: Any
) -> Reward:
    """A reward from a function, its name as in a recipe, or a ``Reward``; ``settings`` override what it says. ``named``
    gives the name of a function. Raises ``RecipeError`` for one that another process could not import, such as a
    lambda."""
    if isinstance(given, Reward):
        return structs.replace(given, **settings)
    return Reward(function=given if isinstance(given, str) else named(given), **settings)


class RewardAttachments(Conversation[RewardRequest, RewardReply]):
    """The rewards of a running pipeline. Each change makes a new version of the whole set; the event log says which
    version scored what. A change returns the version once every group of which nothing has ended is scored by it;
    it raises ``RecipeError`` when the functions cannot be used, and nothing has changed then."""

    def __init__(self, named: Callable[[Any], str] = spec_of) -> None:
        super().__init__(RewardRequest, "controller.rewards")
        self._named = named

    async def attach(self, given: Reward | str | Callable[..., Any], **settings: Any) -> int:
        """Score with one more function."""
        return (await self.change(AttachReward(reward=as_reward(given, self._named, **settings)))).reward_version

    async def replace(self, name: str, given: Reward | str | Callable[..., Any], **settings: Any) -> int:
        """Score with another function in place of ``name``."""
        return (
            await self.change(ReplaceReward(name=name, reward=as_reward(given, self._named, **settings)))
        ).reward_version

    async def detach(self, name: str) -> int:
        """Score without ``name``."""
        return (await self.change(DetachReward(name=name))).reward_version

    async def change(self, change: RewardChange) -> RewardsChanged:
        """One of the three, as a record."""
        reply = await self.ask(change)
        assert isinstance(reply, RewardsChanged), reply
        if reply.problems:
            raise RecipeError(*reply.problems)
        return reply

    async def attached(self) -> RewardsListed:
        """Ask for the rewards that score now."""
        reply = await self.ask(ListRewards())
        assert isinstance(reply, RewardsListed), reply
        return reply
