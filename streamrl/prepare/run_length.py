"""Steps of a run whose length is given in passes over its prompts."""

from __future__ import annotations

import math

from msgspec import structs

from streamrl.base.errors import RecipeError
from streamrl.recipe.problems import shown
from streamrl.recipe.sections import Recipe
from streamrl.run.prompts.open_prompts import stored_rows
from streamrl.run.prompts.prompt_spec import prompt_sources


def with_steps_of_epochs(recipe: Recipe) -> tuple[Recipe, str]:
    """``recipe`` with ``run.steps`` in place of ``training.epochs``, and a line for people that says how they follow.

    Every prompt is drawn ``training.epochs`` times in these steps; groups that are dropped and filled again draw more.
    Prompts that cannot be read are reported by ``preflight``. Raises ``RecipeError`` for an iterator, which cannot be
    counted."""
    epochs = recipe.training.epochs
    batch = recipe.rollout.prompts_per_batch
    if not epochs:
        return recipe, ""
    try:
        size = stored_rows(prompt_sources(recipe)["prompts.train"])
    except RecipeError:
        return recipe, ""
    if size is None:
        problem = f"{shown(epochs)} passes over {recipe.prompts.train}, an iterator, which has no length"
        raise RecipeError(f"training.epochs: {problem}: set run.steps in its place")
    steps = max(1, math.ceil(epochs * size / batch))
    text = f"epochs      {shown(epochs)} of {size:,} prompts, {batch} a step: run.steps = {steps}"
    run = structs.replace(recipe.run, steps=steps)
    training = structs.replace(recipe.training, epochs=0.0)
    return structs.replace(recipe, run=run, training=training), text
