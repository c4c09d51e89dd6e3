"""``rewards.msgpack`` of a checkpoint: the rewards that scored, changed live or not, and the observations behind
adaptive time limits.

The controller writes the file into each checkpoint and reads it when it starts. The command of a run checks the file
of the checkpoint that it resumes, and writes the rewards that the resumed run begins with into the run directory, under
the same name."""

from __future__ import annotations

from pathlib import Path

from msgspec import convert, msgpack
from msgspec.structs import asdict

from streamrl.base.errors import UNDECODABLE, RecipeError, StreamRLError
from streamrl.base.types import Record, Texts
from streamrl.recipe.rewards import Reward, with_current_keys
from streamrl.recipe.sections import Recipe, ResumedRewards

REWARDS_FILE = "rewards.msgpack"
REWARDS_SCHEMA = 1


class RewardsSnapshot(Record, frozen=True):
    """Rewards of a run at one moment. ``rewards``: rewards that score; ``of_recipe``: rewards of the recipe; ``since``:
    reward version that brought each reward, by name; ``slowest_s``: seconds of the slowest correct call, by reward and
    by key of its adaptive time limits."""

    reward_version: int
    rewards: tuple[Reward, ...]
    of_recipe: tuple[Reward, ...]
    since: dict[str, int] = {}
    slowest_s: dict[str, dict[str, float]] = {}
    schema: int = REWARDS_SCHEMA

    @property
    def changed_live(self) -> Texts:
        """Names of rewards that the recipe does not have."""
        return tuple(reward.label for reward in self.rewards if reward not in self.of_recipe)


def fresh_rewards(recipe: Recipe) -> RewardsSnapshot:
    """Rewards of a run that does not resume another."""
    since = {reward.label: 0 for reward in recipe.rewards}
    return RewardsSnapshot(reward_version=0, rewards=recipe.rewards, of_recipe=recipe.rewards, since=since)


def rewards_file(snapshot: RewardsSnapshot) -> dict[str, bytes]:
    """Name and content of the file."""
    # Fields that have their default are written too: another version of streamrl may have other defaults.
    fields = asdict(snapshot) | {
        name: [asdict(reward) for reward in rewards]
        for name, rewards in (("rewards", snapshot.rewards), ("of_recipe", snapshot.of_recipe))
    }
    return {REWARDS_FILE: msgpack.encode(fields)}


def read_rewards_file(directory: Path) -> RewardsSnapshot | None:
    """Read the rewards in ``directory``; None: it has no such file. Raises ``StreamRLError`` for a file that this
    version of streamrl cannot read."""
    path = directory / REWARDS_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    remedy = "resume from another checkpoint, or with the streamrl that wrote it"
    try:
        table = msgpack.decode(content)
        for key in ("rewards", "of_recipe"):
            table[key] = [with_current_keys(reward) for reward in table[key]]
        snapshot = convert(table, RewardsSnapshot)
    except (*UNDECODABLE, KeyError) as error:
        raise StreamRLError(f"{path} cannot be read: {error}; {remedy}") from error
    if snapshot.schema != REWARDS_SCHEMA:
        raise StreamRLError(f"{path} has schema {snapshot.schema}, this streamrl reads {REWARDS_SCHEMA}: {remedy}")
    return snapshot


def resumed_rewards(recipe: Recipe, snapshot: RewardsSnapshot, checkpoint: Path) -> RewardsSnapshot:
    """Return the rewards of a run of ``recipe`` that resumes from ``snapshot``. ``checkpoint``: directory, for the
    error.

    Where the run had changed its rewards, the changed rewards score again; otherwise the rewards of the recipe score.
    Raises ``RecipeError`` where both have changed. Version numbers continue, so a version names one set of rewards in
    all lives of the run."""
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
    unchanged = {reward.label for reward in rewards if reward in snapshot.rewards}
    since = {reward.label: version for reward in rewards}
    since |= {name: snapshot.since.get(name, version) for name in unchanged}
    return RewardsSnapshot(
        reward_version=version,
        rewards=rewards,
        of_recipe=of_recipe,
        since=since,
        slowest_s={name: by_key for name, by_key in snapshot.slowest_s.items() if name in unchanged},
    )
