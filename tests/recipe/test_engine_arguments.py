"""Arguments of vLLM that a recipe cannot give are refused by their names, and the keys that set them are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.base.errors import RecipeError
from streamrl.engines.vllm.options import engine_options
from streamrl.recipe.dialects.foreign_keys import owned_arguments
from streamrl.recipe.field_types import paths_in_view
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.sections import Recipe

SMALL = {"model": {"path": "m"}, "prompts": {"train": "t.jsonl"}, "rewards": [{"function": "a:b"}]}


def test_every_argument_that_streamrl_owns_is_refused_by_name() -> None:
    keys = {*paths_in_view(Recipe, with_advanced=True), "engines.args.speculative_config"}
    names = owned_arguments()
    with pytest.raises(RecipeError) as caught:
        load_recipe(SMALL, [f"engines.args.{name}=1" for name in names])
    found = {problem.split(": ")[1].rpartition(".")[2]: problem for problem in caught.value.problems}
    assert found.keys() == names.keys()
    assert all(set_by in keys or set_by[0] == "-" for set_by in names.values())
    assert all(reason.removeprefix("-") in found[name].replace("advanced.", "") for name, reason in names.items())


def test_arguments_go_to_each_set_and_into_the_recorded_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    drafts = '{method = "draft_model", model = "./draft", num_speculative_tokens = 3}'
    recipe = load_recipe(
        SMALL | {"model": {"path": str(tmp_path)}},
        [
            "engines.args.watermark=0.1",
            f"engines.args.speculative_config={drafts}",
            "engines.advanced.sets=[{count = 2, args = {watermark = 0.2}}]",
        ],
    )
    given = [engine_options(recipe, index, "/s", device="cpu").args for index in range(3)]
    assert [one["watermark"] for one in given] == [0.1, 0.2, 0.2]
    assert given[2]["speculative_config"]["model"] == str(Path.cwd() / "draft")
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recipe.toml") == recipe
