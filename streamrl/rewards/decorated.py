"""Rewards that are written down in Python: what a recipe would say, beside the function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from streamrl.base.errors import RecipeError
from streamrl.recipe.rewards import Reward

_SETTINGS = "__streamrl_reward__"

Function = TypeVar("Function", bound=Callable[..., Any])


def reward(**settings: Any) -> Callable[[Function], Function]:
    """Give a function what a recipe would say about it: ``@reward(weight=0.5, timeout_s=2)``.

    They apply where the function itself is attached (``pipeline.rewards.attach(function)``). The function stays what it
    is. Raises ``TypeError`` for a setting that ``[[rewards]]`` does not have.
    """
    unknown = sorted(set(settings) - (set(Reward.__struct_fields__) - {"function"}))
    if unknown:
        raise TypeError(f"a reward has no setting {', '.join(unknown)} (see [[rewards]])")

    def decorate(function: Function) -> Function:
        setattr(function, _SETTINGS, settings)
        return function

    return decorate


def as_reward(given: Reward | str | Callable[..., Any], **settings: Any) -> Reward:
    """A reward from a function, its name as in a recipe, or a ``Reward``; ``settings`` override what it says.

    Raises ``RecipeError`` for a function that another process could not import, such as a lambda.
    """
    if isinstance(given, Reward):
        return structs.replace(given, **settings)
    if isinstance(given, str):
        return Reward(function=given, **settings)
    return Reward(function=_spec_of(given), **(getattr(given, _SETTINGS, {}) | settings))


def _spec_of(function: Callable[..., Any]) -> str:
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if not name.isidentifier() or not module or (module == "__main__" and file is None):
        raise RecipeError(
            [f"{function!r} cannot be imported by a reward process: define it at the top level of a module or a file"]
        )
    return f"{Path(str(file)).absolute()}:{name}" if module == "__main__" else f"{module}:{name}"
