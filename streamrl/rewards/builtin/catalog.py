"""Built-in rewards, which a recipe names with ``function = "math"`` and ``[rewards.options]``.

``calls.loading`` calls ``BUILTIN[name](**options)``, in the reward worker, in its fork server, or in the process that
inspects functions. The result is a reward function like a user's function: its signature names the columns that it
needs. Making the function checks the options and imports the libraries that it needs (``streamrl[rewards]``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streamrl.rewards.builtin.environment import ENVIRONMENT
from streamrl.rewards.builtin.length import LENGTH
from streamrl.rewards.builtin.mathematics import MATH
from streamrl.rewards.builtin.no_reward import NONE
from streamrl.rewards.builtin.reasoning_gym_task import REASONING_GYM
from streamrl.rewards.builtin.reward_model import REWARD_MODEL
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
        reward.name: reward
        for reward in (EXACT, REGEX, MATH, REASONING_GYM, LENGTH, FORMAT, REWARD_MODEL, ENVIRONMENT, NONE)
    },
    "code": _code,
    "judge": _judge,
}
"""Name in the recipe -> factory of the reward function, which raises ``RecipeError`` for wrong options."""
