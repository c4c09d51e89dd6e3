"""Built-in rewards as a recipe makes them: by name and options, called with what their signature asks for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from streamrl.recipe.rewards import Reward
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.signature import RewardFunction


def made(function: str, **options: Any) -> RewardFunction:
    """The reward that ``[[rewards]] function = ...`` with these options is."""
    return load_reward(Reward(function=function, options=options))


@pytest.fixture(scope="session")
def make() -> Callable[..., RewardFunction]:
    return made


@pytest.fixture(scope="session")
def score() -> Callable[..., Any]:
    """``score(reward, completion, **columns)``: passes what the signature names, refuses what it lacks."""

    def call(reward: RewardFunction, completion: str, **given: Any) -> Any:
        signature = reward.signature
        wanted = (*signature.columns, *signature.provided)
        assert set(wanted) <= set(given), f"needs {wanted}"
        optional = [name for name in signature.optional_columns if name in given]
        result = reward.call(completion, **{name: given[name] for name in (*wanted, *optional)})
        return asyncio.run(result) if inspect.isawaitable(result) else result

    return call
