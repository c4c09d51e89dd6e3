"""From Python: a recipe of dicts, structs and functions, and what a notebook lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import streamrl
from streamrl.base.errors import RecipeError
from streamrl.recipe.sections import Rollout

DEMO = Path(__file__).parents[1] / "examples" / "sort"


async def half(completion: str, **columns: Any) -> float:
    return 0.5


def table(**sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(DEMO / "model")},
        "prompts": {"train": str(DEMO / "train.jsonl")},
        "rewards": [half, {"function": half, "name": "again", "weight": 0.5}, {"function": "exact"}],
        **sections,
    }


def test_what_a_notebook_lists() -> None:
    assert {"Pipeline", "Recipe", "load_recipe"} <= set(dir(streamrl))


async def test_a_recipe_of_dicts_structs_and_functions() -> None:
    pipeline = streamrl.Pipeline(table(rollout=Rollout(group_size=4), run={"name": "mine"}))
    recipe = pipeline.recipe
    assert recipe.rollout.group_size == 4
    assert [reward.function.rpartition(":")[2] for reward in recipe.rewards] == ["half", "half", "exact"]
    assert (recipe.rewards[1].name, recipe.rewards[1].weight) == ("again", 0.5)
    assert "'mine'" in repr(pipeline)
    pipeline._let_go()
    assert streamrl.load_recipe(table(rewards=[{"function": "exact"}]), ["run.steps=3"]).run.steps == 3


def test_what_is_wrong_with_them_is_said() -> None:
    with pytest.raises(RecipeError, match=r"recipe: rollout.num_generations: unknown key: that is rollout.group_size"):
        streamrl.Pipeline(table(rollout={"num_generations": 4}))
    with pytest.raises(RecipeError, match=r"overrides is one text: write load_recipe\(..., \['run.steps=3'\]\)"):
        streamrl.load_recipe(DEMO / "recipe.toml", "run.steps=3")
    with pytest.raises(RecipeError, match="cannot be imported by another process"):
        streamrl.Pipeline(table(rewards=[lambda completion: 1.0]))
