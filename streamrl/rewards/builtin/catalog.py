"""Rewards that come with streamrl: ``function = "math"`` and ``[rewards.options]`` in the recipe.

``BUILTIN[name](**options)`` gives a reward function like one of the user's: it names the columns it needs in its
signature, and runs wherever those run. Options are checked when the function is made; libraries (``streamrl[rewards]``)
are imported by the reward that needs them, then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from streamrl.rewards.builtin.declared import BuiltinReward, RewardCallable
from streamrl.rewards.builtin.length import LENGTH
from streamrl.rewards.builtin.mathematics import MATH
from streamrl.rewards.builtin.reasoning_gym_task import REASONING_GYM
from streamrl.rewards.builtin.sequence_classifier import REWARD_MODEL
from streamrl.rewards.builtin.text import EXACT, FORMAT, REGEX


def _of_package(module: str, name: str) -> Callable[..., RewardCallable]:
    """A reward of a package, which is imported when a recipe asks for it."""

    def make(**options: Any) -> RewardCallable:
        reward: BuiltinReward = getattr(import_module(module), name)
        return reward(**options)

    return make


BUILTIN: Mapping[str, Callable[..., RewardCallable]] = {
    **{reward.name: reward for reward in (EXACT, REGEX, MATH, REASONING_GYM, LENGTH, FORMAT, REWARD_MODEL)},
    "code": _of_package("streamrl.sandbox.reward", "CODE"),
    "judge": _of_package("streamrl.judge.reward", "JUDGE"),
}
"""Name in the recipe -> what makes the reward function. Raises ``RecipeError`` for options that are wrong."""
