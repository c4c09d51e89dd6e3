"""Rewards that come with streamrl: ``function = "math"`` and ``[rewards.options]`` in the recipe.

``BUILTIN[name](**options)`` gives a reward function like one of the user's: it names the columns it needs in its
signature, and runs wherever those run. Options are checked when the function is made; libraries (``streamrl[rewards]``)
are imported by the reward that needs them, then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from streamrl.judge.reward import JUDGE
from streamrl.rewards.builtin.declared import BuiltinReward, RewardCallable
from streamrl.rewards.builtin.length import LENGTH, OVERLONG
from streamrl.rewards.builtin.mathematics import MATH
from streamrl.rewards.builtin.reasoning_gym_task import REASONING_GYM
from streamrl.rewards.builtin.sequence_classifier import REWARD_MODEL
from streamrl.rewards.builtin.text import EXACT, FORMAT, REGEX


def code(**options: Any) -> RewardCallable:
    """The program of a completion against test cases, in the sandbox, which is imported when a recipe asks for it."""
    reward: BuiltinReward = import_module("streamrl.sandbox.reward").CODE
    return reward(**options)


BUILTIN: Mapping[str, Callable[..., RewardCallable]] = {
    **{
        reward.name: reward
        for reward in (EXACT, REGEX, MATH, REASONING_GYM, LENGTH, OVERLONG, FORMAT, JUDGE, REWARD_MODEL)
    },
    "code": code,
}
"""Name in the recipe -> what makes the reward function. Raises ``RecipeError`` for options that are wrong."""
