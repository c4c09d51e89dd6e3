"""Rewards of functions that are given in Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from streamrl.base.errors import RecipeError
from streamrl.recipe.rewards import Reward


def as_reward(given: Reward | str | Callable[..., Any], **settings: Any) -> Reward:
    """A reward from a function, its name as in a recipe, or a ``Reward``; ``settings`` override what it says. Raises
    ``RecipeError`` for a function that another process could not import, such as a lambda."""
    if isinstance(given, Reward):
        return structs.replace(given, **settings)
    return Reward(function=given if isinstance(given, str) else _spec_of(given), **settings)


def _spec_of(function: Callable[..., Any]) -> str:
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not name.isidentifier() or not module or (module == "__main__" and file is None):
        raise RecipeError(
            [f"{function!r} cannot be imported by a reward process: define it at the top level of a module or a file"]
        )
    return f"{Path(str(file)).absolute()}:{name}" if module == "__main__" else f"{module}:{name}"
