"""Which rewards a run is scored with: what the recipe says, until somebody changes it while the run goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import structs

from streamrl.comm.reward_changes import AttachReward, DetachReward, ReplaceReward, RewardChange, RewardsChanged
from streamrl.comm.stream import ReceiveStream
from streamrl.config.load import check_recipe
from streamrl.config.recipe import Recipe
from streamrl.config.rewards import Reward
from streamrl.errors import RecipeError, StreamBroken
from streamrl.stages.reward import RewardStage

Note = Callable[[int, tuple[str, ...], str], None]
"""Told of a change before the first sample is scored by it: the version, the names, what was asked for."""


class AttachedRewards:
    """Carries out changes, one after the other. A change that cannot be made leaves everything as it was."""

    def __init__(
        self, recipe: Recipe, stage: RewardStage, note: Note, reply: Callable[[RewardsChanged], Awaitable[None]]
    ) -> None:
        self._recipe = recipe
        self._stage = stage
        self._note = note
        self._reply = reply
        self._version = 0

    async def run(self, changes: ReceiveStream[RewardChange]) -> None:
        """Until ``changes`` ends or breaks: then whoever asked is gone, and the run goes on."""
        try:
            async for change in changes:
                await self._reply(await self._carry_out(change))
        except StreamBroken:
            return

    async def _carry_out(self, change: RewardChange) -> RewardsChanged:
        try:
            rewards = changed(self._recipe.rewards, change)
            recipe = structs.replace(self._recipe, rewards=rewards)
            check_recipe(recipe, "rewards")
            names = tuple(reward.label for reward in rewards)
            await self._stage.load(
                self._version + 1, rewards, lambda: self._note(self._version + 1, names, described(change))
            )
        except RecipeError as error:
            self._version += 1  # some worker may have heard of it
            return RewardsChanged(
                request_id=change.request_id,
                reward_version=self._stage.reward_version,
                rewards=tuple(reward.label for reward in self._recipe.rewards),
                problems=tuple(error.problems),
            )
        self._version += 1
        self._recipe = recipe
        return RewardsChanged(request_id=change.request_id, reward_version=self._version, rewards=names)


def changed(rewards: tuple[Reward, ...], change: RewardChange) -> tuple[Reward, ...]:
    """``rewards`` after ``change``. Raises ``RecipeError`` where there is no reward of that name."""
    if isinstance(change, AttachReward):
        return (*rewards, change.reward)
    names = [reward.label for reward in rewards]
    if change.name not in names:
        raise RecipeError([f'no reward is called "{change.name}": name one of {", ".join(names)}'])
    if isinstance(change, ReplaceReward):
        return tuple(change.reward if reward.label == change.name else reward for reward in rewards)
    return tuple(reward for reward in rewards if reward.label != change.name)


def described(change: RewardChange) -> str:
    """What was asked for, in a few words."""
    match change:
        case AttachReward():
            return f"attach {change.reward.label} ({change.reward.function})"
        case ReplaceReward():
            return f"replace {change.name} by {change.reward.label} ({change.reward.function})"
        case DetachReward():
            return f"detach {change.name}"
