"""Rewards of a running run, in the controller's process: the recipe's rewards, until a user attaches, replaces or
detaches one. ``reward_workers`` makes ``AttachedRewards`` and serves its requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from msgspec.structs import replace

from streamrl.base.errors import RecipeError, StreamBroken
from streamrl.base.types import Texts
from streamrl.comm.stream import ReceiveStream
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.load_recipe import check_recipe
from streamrl.recipe.sections import Recipe
from streamrl.rewards import reward_messages
from streamrl.rewards.rewards_snapshot import RewardsSnapshot, rewards_file
from streamrl.stages.reward import RewardStage

Note = Callable[[int, Texts, str], None]
"""Callback for a change, before a sample is scored with it: the version, the names of the rewards, the request."""

Check = Callable[[Recipe, Reward], Awaitable[None]]
"""Checks a function as at the start of a run, before a worker loads it. Raises ``RecipeError``."""


class AttachedRewards:
    """Carries out changes of rewards, one after the other. A change that fails changes nothing."""

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
        """The rewards, versions and limits with which this run scores now: a resumed run goes on with them."""
        return replace(self._snapshot, slowest_s=self._stage.limits.slowest_s)

    def file(self) -> Mapping[str, bytes]:
        """The files of ``snapshot`` in a checkpoint, by name."""
        return rewards_file(self.snapshot)

    async def run(self, requests: ReceiveStream[reward_messages.RewardRequest], note: Note) -> None:
        """Serve ``requests`` until the stream ends or breaks: the run goes on without it."""
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
            if isinstance(change, reward_messages.ReplaceReward):
                self._refuse_another_name(change)
            recipe = self._recipe.with_rewards(rewards)
            check_recipe(recipe, "rewards")
            if not isinstance(change, reward_messages.DetachReward):
                await self._check(recipe, change.reward)
            self._version += 1  # also where loading fails: some worker may have loaded it
            snapshot = self._changed_snapshot(change, rewards)
            await self._stage.load(self._version, rewards, lambda: self._on_loaded(snapshot, change, note))
        except RecipeError as error:
            return self._answer(change, tuple(error.problems))
        return self._answer(change)

    def _refuse_another_name(self, change: reward_messages.ReplaceReward) -> None:
        """Raise ``RecipeError`` where training sets choose their rewards by name, and the reward has another one."""
        sets = [name for name, training_set in self._recipe.prompts.sets.items() if training_set.rewards]
        if sets and change.reward.label != change.name:
            raise RecipeError(
                f'"{change.reward.label}" in place of "{change.name}": prompts.train.{sets[0]} chooses rewards by '
                f'name: give it the name "{change.name}"'
            )

    def _changed_snapshot(self, change: reward_messages.RewardChange, rewards: tuple[Reward, ...]) -> RewardsSnapshot:
        """The snapshot after ``change``, with ``rewards``."""
        since = {reward.label: self._snapshot.since.get(reward.label, self._version) for reward in rewards}
        # A reward that replaces another starts without learnt limits, also under the same name.
        if not isinstance(change, reward_messages.DetachReward):
            since[change.reward.label] = self._version
        return replace(self._snapshot, reward_version=self._version, rewards=rewards, since=since)

    def _on_loaded(self, snapshot: RewardsSnapshot, change: reward_messages.RewardChange, note: Note) -> None:
        """Make ``snapshot`` the present one: all workers have loaded its rewards."""
        self._snapshot = snapshot
        self._stage.limits.attached(snapshot.since)
        note(snapshot.reward_version, tuple(reward.label for reward in snapshot.rewards), described(change))

    def _answer(self, change: reward_messages.RewardChange, problems: Texts = ()) -> reward_messages.RewardsChanged:
        return reward_messages.RewardsChanged(
            request_id=change.request_id,
            reward_version=self._snapshot.reward_version,
            rewards=tuple(reward.label for reward in self._snapshot.rewards),
            problems=problems,
        )


def changed(rewards: tuple[Reward, ...], change: reward_messages.RewardChange) -> tuple[Reward, ...]:
    """Return ``rewards`` after ``change``. Raises ``RecipeError`` where no reward has the name in ``change``."""
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
