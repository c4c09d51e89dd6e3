"""Rewards of functions that are given in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from streamrl.recipe.rewards import Reward
from streamrl.recipe.user_code import spec_of


def as_reward(
    given: Reward | str | Callable[..., Any], named: Callable[[Any], str] = spec_of, **settings: Any
) -> Reward:
    """A reward from a function, its name as in a recipe, or a ``Reward``; ``settings`` override what it says. ``named``
    gives the name of a function. Raises ``RecipeError`` for one that another process could not import, such as a
    lambda."""
    if isinstance(given, Reward):
        return structs.replace(given, **settings)
    return Reward(function=given if isinstance(given, str) else named(given), **settings)
