"""Rewards that come with streamrl: ``function = "math"`` and ``[rewards.options]`` in the recipe.

``BUILTIN[name](**options)`` gives a reward function like one of the user's: it names the columns it needs in its
signature, and runs wherever those run. Options are checked when the function is made; libraries (``streamrl[rewards]``)
are imported by the reward that needs them, then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streamrl.rewards.builtin.environment import ENVIRONMENT
from streamrl.rewards.builtin.length import LENGTH
from streamrl.rewards.builtin.mathematics import MATH
from streamrl.rewards.builtin.reasoning_gym_task import REASONING_GYM
from streamrl.rewards.builtin.sequence_classifier import REWARD_MODEL
from streamrl.rewards.builtin.text import EXACT, FORMAT, REGEX
from streamrl.rewards.declared import RewardCallable


def _code(**options: Any) -> RewardCallable:
    from streamrl.rewards.sandbox.reward import CODE

    return CODE(**options)


def _judge(**options: Any) -> RewardCallable:
    from streamrl.rewards.judge.reward import JUDGE

    return JUDGE(**options)


BUILTIN: Mapping[str, Callable[..., RewardCallable]] = {
    **{
        reward.name: reward for reward in (EXACT, REGEX, MATH, REASONING_GYM, LENGTH, FORMAT, REWARD_MODEL, ENVIRONMENT)
    },
    "code": _code,
    "judge": _judge,
}
"""Name in the recipe -> what makes the reward function. Raises ``RecipeError`` for options that are wrong."""
