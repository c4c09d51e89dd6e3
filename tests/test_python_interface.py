"""From Python: a recipe of dicts, structs and functions, and what a notebook lists."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from builders.files import SORT as DEMO

import streamrl
from streamrl.base.errors import RecipeError
from streamrl.recipe.sections import Rollout
from streamrl.recipe.user_code import load_user_object

CELLS = {
    "<cell 1>": "import re\nimport math as maths\nfrom pathlib import Path\nfile, LIST = object(), re.compile(r'\\d')\n"
    "SHIFT = {'by': [2, 1]}\nclass Shift:\n    def by(self): return SHIFT['by'][0]\n",
    "<cell 2>": "def found(text):\n    return LIST.findall(text)\n",
    "<cell 3>": "def known(f): return f\n@known\ndef reward(completion, *, path: Path = None):\n"
    "    return maths.sqrt(sum(1 for f in found(completion) for _ in 'ab')) + Shift().by() * 2\n"
    "def reads(completion): return file\ndef outer():\n    def inner(completion): return 1\n    return inner\n"
    "inner = outer()\ndef endless():\n    yield {'prompt': 'x'}\n",
}


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
    pipeline._release()
    assert streamrl.load_recipe(table(rewards=[{"function": "exact"}]), ["run.steps=3"]).run.steps == 3


def test_what_is_wrong_with_them_is_said() -> None:
    with pytest.raises(
        RecipeError,
        match=r"recipe: rollout.num_generations: unknown key: that is TRL's num_generations: rollout.group_size",
    ):
        streamrl.Pipeline(table(rollout={"num_generations": 4}))
    with pytest.raises(RecipeError, match=r"overrides is one text: write load_recipe\(..., \['run.steps=3'\]\)"):
        streamrl.load_recipe(DEMO / "recipe.toml", "run.steps=3")
    with pytest.raises(RecipeError, match="cannot be imported by another process"):
        streamrl.Pipeline(table(rewards=[lambda completion: 1.0]))


def test_functions_of_a_cell_are_written_with_what_they_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    for name, cell in CELLS.items():
        monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(keepends=True), name))
        exec(compile(cell, name, "exec"), vars(notebook))
    given: Any = {"model": str(DEMO / "model"), "rewards": [notebook.reward, "exact"], "objective": "dapo"}
    recipe = streamrl.load_recipe(given | {"prompts": notebook.endless, "run": {"directory": "here"}})
    assert (recipe.objective.algorithm, recipe.rewards[1].function) == ("dapo", "exact")
    written = load_user_object(recipe.rewards[0].function)
    assert written("7 8") == 6.0 and Path(recipe.prompts.train).parent == tmp_path / "here" / "cells"  # type: ignore[operator]
    for wrong, problem in {
        "reads": r"reads uses file \(object\), which cannot be written to a file: make it inside of the function",
        "inner": "cannot be imported by another process",
    }.items():
        with pytest.raises(RecipeError, match=problem):
            streamrl.load_recipe(given | {"prompts": "p.jsonl", "rewards": getattr(notebook, wrong)})
    with pytest.raises(RecipeError, match=r"prompts\.train: a generator cannot be read by another process"):
        streamrl.load_recipe(given | {"prompts": notebook.endless()})
    with pytest.raises(RecipeError, match=r"a recipe and sections beside it \(run\): give one of them"):
        streamrl.Pipeline(given, run={"steps": 1})
