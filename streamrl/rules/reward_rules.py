"""Rules inside ``[[rewards]]`` and ``[reward_limits]``."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.recipe.algorithms import WITHIN_GROUPS, objective_settings
from streamrl.recipe.rewards import COMBINE_SEPARATE, COMBINE_WEIGHTS, FailurePolicy
from streamrl.recipe.sections import Recipe

Broken = Iterator[tuple[str, str]]


def rewards_are_named(recipe: Recipe) -> Broken:
    """Every reward names a function or a built-in one, and metrics can tell them apart."""
    if not recipe.rewards:
        yield "rewards", 'is empty: add [[rewards]] with function = "module:function" or "path/to/file.py:function"'
    for index, reward in enumerate(recipe.rewards):
        module, colon, function = reward.function.rpartition(":")
        if (colon and not module) or not function.isidentifier():
            yield (
                f"rewards.{index}.function",
                (
                    f'"{reward.function}" does not name a function: write "module:function", '
                    '"path/to/file.py:function" or the name of a built-in reward'
                ),
            )
    names = [reward.label for reward in recipe.rewards]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield (
                f"rewards.{index}.function",
                (
                    f'"{name}" is the name of an earlier reward too, so their metrics would mix: give one of them '
                    'another name = "..."'
                ),
            )
        if "/" in name:
            yield f"rewards.{index}.name", f'"{name}" would break the names of metrics: write it without "/"'


def some_reward_counts(recipe: Recipe) -> Broken:
    """Something must be trained on."""
    trained = [reward for reward in recipe.rewards if not reward.shadow]
    if recipe.rewards and not trained:
        yield "rewards", "every reward is a shadow, so there is nothing to train on: set shadow = false for one"
    elif recipe.rewards and all(reward.weight == 0 for reward in trained):
        yield "rewards", "every weight is 0, so every reward would be 0: give at least one a weight that is not 0"


def limits_fit(recipe: Recipe) -> Broken:
    """An adaptive limit moves between its floor and the ceiling."""
    for index, reward in enumerate(recipe.rewards):
        adaptive = reward.adaptive_timeout
        if adaptive is not None and adaptive.min_s > reward.timeout_s:
            yield (
                f"rewards.{index}.adaptive_timeout",
                (
                    f"min_s = {adaptive.min_s:g} is above the ceiling timeout_s = {reward.timeout_s:g}, so "
                    "nothing adapts: lower the floor, or raise the ceiling"
                ),
            )


def failures_have_one_meaning(recipe: Recipe) -> Broken:
    """A late call is wrong, with its value, or it failed; a failure of a shadow reward concerns nobody."""
    for index, reward in enumerate(recipe.rewards):
        if reward.late_is_wrong and reward.on_timeout is not None:
            yield (
                f"rewards.{index}.on_timeout",
                (
                    f'"{reward.on_timeout}" never happens with late_is_wrong = true, where a late call has the value '
                    f"{reward.wrong_value:g}: leave one of them out"
                ),
            )
        if reward.wrong_value and not reward.late_is_wrong:
            yield (
                f"rewards.{index}.wrong_value",
                f"{reward.wrong_value:g} has no effect without late_is_wrong = true: set that, or leave it out",
            )
        policies = {reward.on_failure, reward.on_timeout} - {None, FailurePolicy.DROP_SAMPLE}
        if reward.shadow and policies:
            yield (
                f"rewards.{index}.on_failure",
                f'"{policies.pop()}" on a shadow reward, whose failures are only counted: leave it out',
            )


def combination(recipe: Recipe) -> Broken:
    """``combine`` names one of the ways, or a function."""
    combine = recipe.reward_limits.combine
    if combine == COMBINE_WEIGHTS:
        return
    if combine == COMBINE_SEPARATE:
        kind = objective_settings(recipe.objective).advantages
        if kind not in WITHIN_GROUPS:
            yield (
                "reward_limits.combine",
                (
                    f'"{combine}" compares siblings, and objective.advantages = "{kind}" does not: '
                    f'write combine = "{COMBINE_WEIGHTS}", or advantages = "group_std"'
                ),
            )
        return
    module, colon, function = combine.rpartition(":")
    if not colon or not module or not function.isidentifier():
        yield (
            "reward_limits.combine",
            (
                f'"{combine}" is no way to combine rewards: write "{COMBINE_WEIGHTS}", "{COMBINE_SEPARATE}", '
                'or a function as "module:function"'
            ),
        )
