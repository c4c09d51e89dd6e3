"""``rewards.msgpack`` of a checkpoint: what scored, changed live or not, and the time limits that were learnt. A run
that is resumed writes what it begins with into its own directory, under the same name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import structs

from streamrl.base.errors import UNDECODABLE, RecipeError, StreamRLError
from streamrl.base.types import Record
from streamrl.recipe.rewards import Reward
from streamrl.recipe.sections import Recipe, ResumedRewards

REWARDS_FILE = "rewards.msgpack"
REWARDS_SCHEMA = 1


class RewardsSnapshot(Record, frozen=True):
    """``rewards``: what scores. ``of_recipe``: what the recipe says. ``since``: the version that brought each one, by
    name; ``slowest_s``: of its correct calls by key, for the adaptive time limits."""

    reward_version: int
    rewards: tuple[Reward, ...]
    of_recipe: tuple[Reward, ...]
    since: dict[str, int] = {}
    slowest_s: dict[str, dict[str, float]] = {}
    schema: int = REWARDS_SCHEMA

    @property
    def changed_live(self) -> tuple[str, ...]:
        """Names of rewards that the recipe does not have."""
        return tuple(reward.label for reward in self.rewards if reward not in self.of_recipe)


def fresh_rewards(recipe: Recipe) -> RewardsSnapshot:
    """Rewards of a run that does not resume another."""
    since = {reward.label: 0 for reward in recipe.rewards}
    return RewardsSnapshot(reward_version=0, rewards=recipe.rewards, of_recipe=recipe.rewards, since=since)


def rewards_file(snapshot: RewardsSnapshot) -> dict[str, bytes]:
    """The file by its name."""
    return {REWARDS_FILE: msgspec.msgpack.encode(_written(snapshot))}


def _written(snapshot: RewardsSnapshot) -> Mapping[str, object]:
    # Defaults too: another version of streamrl may have others.
    return structs.asdict(snapshot) | {
        name: [structs.asdict(reward) for reward in rewards]
        for name, rewards in (("rewards", snapshot.rewards), ("of_recipe", snapshot.of_recipe))
    }


def read_rewards_file(directory: Path) -> RewardsSnapshot | None:
    """Read the rewards in ``directory``; None where it was written without. Raises ``StreamRLError`` for a file that
    this version cannot read."""
    path = directory / REWARDS_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    remedy = "resume from another checkpoint, or with the streamrl that wrote it"
    try:
        snapshot = msgspec.msgpack.decode(content, type=RewardsSnapshot)
    except UNDECODABLE as error:
        raise StreamRLError(f"{path} cannot be read: {error}; {remedy}") from error
    if snapshot.schema != REWARDS_SCHEMA:
        raise StreamRLError(f"{path} has schema {snapshot.schema}, this streamrl reads {REWARDS_SCHEMA}: {remedy}")
    return snapshot


def resumed_rewards(recipe: Recipe, snapshot: RewardsSnapshot, checkpoint: Path) -> RewardsSnapshot:
    """Return the rewards of a run of ``recipe`` that resumes from ``checkpoint``: those that scored when it was
    written, where the run had changed them, or those of the recipe. Raises ``RecipeError`` where both have changed.
    Versions go on, so each names one set in all lives of the run."""
    if recipe.checkpoint.rewards is ResumedRewards.RECIPE or snapshot.rewards == snapshot.of_recipe:
        rewards = recipe.rewards
        of_recipe = recipe.rewards
    elif recipe.rewards in (snapshot.of_recipe, snapshot.rewards):
        rewards = snapshot.rewards
        of_recipe = snapshot.of_recipe
    else:
        names = ", ".join(reward.label for reward in snapshot.rewards)
        raise RecipeError(
            f"checkpoint.resume_from: the rewards of {checkpoint} were changed while that run went on (to "
            f"{names}), and [[rewards]] of the recipe has changed since, too: undo that, or start with the "
            'recipe\'s by checkpoint.advanced.rewards = "recipe"'
        )
    version = snapshot.reward_version + (rewards != snapshot.rewards)
    same = {reward.label for reward in rewards if reward in snapshot.rewards}
    return RewardsSnapshot(
        reward_version=version,
        rewards=rewards,
        of_recipe=of_recipe,
        since={r.label: snapshot.since.get(r.label, version) if r.label in same else version for r in rewards},
        slowest_s={name: found for name, found in snapshot.slowest_s.items() if name in same},
    )
