"""A recipe around a few sections."""

from __future__ import annotations

from typing import Any

from streamrl.recipe.sections import Model, Prompts, Recipe, Reward


def small_recipe(path: str = "m", **sections: Any) -> Recipe:
    """A model, prompts and a reward that are not read, and these sections."""
    given: dict[str, Any] = {"prompts": Prompts(train="t.jsonl"), "rewards": (Reward(function="m:f"),)}
    return Recipe(model=Model(path=path), **(given | sections))
