"""Rewards of a running run: those of the recipe, until they are changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from msgspec import structs

from streamrl.base.errors import RecipeError, StreamBroken
from streamrl.comm.stream import ReceiveStream
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.load import check_recipe
from streamrl.recipe.sections import Recipe
from streamrl.rewards import reward_messages
from streamrl.rewards.rewards_snapshot import RewardsSnapshot, rewards_file
from streamrl.stages.reward import RewardStage

Note = Callable[[int, tuple[str, ...], str], None]
"""Called for a change before the first sample is scored by it: the version, the names, what was asked for."""

Check = Callable[[Recipe, Reward], Awaitable[None]]
"""Looks at a function before any worker hears of it, as at start. Raises ``RecipeError``."""


class AttachedRewards:
    """Carries out changes, one after the other. A change that cannot be made leaves everything as it was."""

    def __init__(
        self,
        recipe: Recipe,
        stage: RewardStage,
        snapshot: RewardsSnapshot,
        reply: Callable[[reward_messages.RewardReply], Awaitable[None]],
        check: Check,
    ) -> None:
        self._recipe = recipe
        self._stage = stage
        self._snapshot = snapshot
        self._reply = reply
        self._check = check
        self._version = snapshot.reward_version

    @property
    def snapshot(self) -> RewardsSnapshot:
        """Snapshot from which a resumed run scores as this one does now."""
        return structs.replace(self._snapshot, slowest_s=self._stage.limits.slowest_s)

    def file(self) -> Mapping[str, bytes]:
        """The same, as a checkpoint keeps it."""
        return rewards_file(self.snapshot)

    async def run(self, requests: ReceiveStream[reward_messages.RewardRequest], note: Note) -> None:
        """Serve until ``requests`` ends or breaks: then the caller is gone, and the run continues."""
        try:
            async for request in requests:
                if isinstance(request, reward_messages.ListRewards):
                    await self._reply(self._list(request))
                else:
                    await self._reply(await self._carry_out(request, note))
        except StreamBroken:
            return

    def _list(self, request: reward_messages.ListRewards) -> reward_messages.RewardsListed:
        attached = tuple(
            reward_messages.AttachedReward(
                name=reward.label,
                function=reward.function,
                weight=reward.weight,
                shadow=reward.shadow,
                trusted=reward.trusted,
                since=self._snapshot.since[reward.label],
            )
            for reward in self._snapshot.rewards
        )
        return reward_messages.RewardsListed(
            request_id=request.request_id, reward_version=self._snapshot.reward_version, rewards=attached
        )

    async def _carry_out(self, change: reward_messages.RewardChange, note: Note) -> reward_messages.RewardsChanged:
        try:
            rewards = changed(self._snapshot.rewards, change)
            recipe = structs.replace(self._recipe, rewards=rewards)
            check_recipe(recipe, "rewards")
            if not isinstance(change, reward_messages.DetachReward):
                await self._check(recipe, change.reward)
            self._version += 1  # also where it fails: some worker may have heard of it
            after = self._after(change, rewards)
            await self._stage.load(self._version, rewards, lambda: self._now(after, change, note))
        except RecipeError as error:
            return self._answer(change, tuple(error.problems))
        return self._answer(change)

    def _after(self, change: reward_messages.RewardChange, rewards: tuple[Reward, ...]) -> RewardsSnapshot:
        since = {reward.label: self._snapshot.since.get(reward.label, self._version) for reward in rewards}
        if not isinstance(
            change, reward_messages.DetachReward
        ):  # one that replaces another starts without limits, also under the same name
            since[change.reward.label] = self._version
        return structs.replace(self._snapshot, reward_version=self._version, rewards=rewards, since=since)

    def _now(self, after: RewardsSnapshot, change: reward_messages.RewardChange, note: Note) -> None:
        self._snapshot = after
        self._stage.limits.attached(after.since)
        note(after.reward_version, tuple(reward.label for reward in after.rewards), described(change))

    def _answer(
        self, change: reward_messages.RewardChange, problems: tuple[str, ...] = ()
    ) -> reward_messages.RewardsChanged:
        return reward_messages.RewardsChanged(
            request_id=change.request_id,
            reward_version=self._snapshot.reward_version,
            rewards=tuple(reward.label for reward in self._snapshot.rewards),
            problems=problems,
        )


def changed(rewards: tuple[Reward, ...], change: reward_messages.RewardChange) -> tuple[Reward, ...]:
    """``rewards`` after ``change``. Raises ``RecipeError`` where there is no reward of that name."""
    if isinstance(change, reward_messages.AttachReward):
        return (*rewards, change.reward)
    names = [reward.label for reward in rewards]
    if change.name not in names:
        raise RecipeError(f'no reward is called "{change.name}": name one of {", ".join(names)}')
    if isinstance(change, reward_messages.ReplaceReward):
        return tuple(change.reward if reward.label == change.name else reward for reward in rewards)
    return tuple(reward for reward in rewards if reward.label != change.name)


def described(change: reward_messages.RewardChange) -> str:
    """Describe a change in a few words."""
    match change:
        case reward_messages.AttachReward():
            return f"attach {change.reward.label} ({change.reward.function})"
        case reward_messages.ReplaceReward():
            return f"replace {change.name} by {change.reward.label} ({change.reward.function})"
        case reward_messages.DetachReward():
            return f"detach {change.name}"
