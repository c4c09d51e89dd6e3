"""examples/smollm2: what is measured was not trained on."""

from __future__ import annotations

from contextlib import closing

import pytest
from builders.files import EXAMPLES

from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.run.prompts.open_prompts import open_rows
from streamrl.run.prompts.prompt_spec import imitated_sources, prompt_sources, read_spec

EXAMPLE = EXAMPLES / "smollm2"


@pytest.mark.parametrize(
    ("recipe", "trained", "held_out"), [("recipe.toml", 131, 40), ("gym.toml", 320, 64), ("new_format.toml", 131, 40)]
)
def test_no_held_out_prompt_is_trained_on(recipe: str, trained: int, held_out: int) -> None:
    pytest.importorskip("reasoning_gym")
    read: list[list[str]] = []
    loaded = load_recipe(EXAMPLE / recipe)
    sources = [*prompt_sources(loaded).values(), *imitated_sources(loaded).values()]
    for spec in sources:
        with closing(open_rows(read_spec(spec))) as rows:
            read.append([rows.row(index)["prompt"] for index in range(rows.size)])
    train_prompts, held_out_prompts, *imitated_prompts = read
    assert not set(held_out_prompts).intersection(train_prompts, *imitated_prompts)
    assert [len(train_prompts), len(held_out_prompts)] == [trained, held_out]
