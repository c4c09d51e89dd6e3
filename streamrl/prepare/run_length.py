"""Steps of a run whose length is given in passes over its prompts."""

from __future__ import annotations

import math

from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.recipe.problems import short_toml
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe
from streamrl.run.prompts.open_prompts import stored_rows
from streamrl.run.prompts.prompt_spec import training_sources


def with_steps_of_epochs(recipe: Recipe) -> tuple[Recipe, str]:
    """``recipe`` with ``run.prompts`` in place of ``training.epochs``, and a line for people that says how it follows.

    Control counts the prompts that it draws, whatever a round or a group takes of them; ``run.steps`` is a prediction.
    Prompts that cannot be read are reported by ``preflight``. Raises ``RecipeError`` for an iterator, which cannot be
    counted."""
    epochs = recipe.training.epochs
    batch = recipe.rollout.prompts_per_batch
    if not epochs:
        return recipe, ""
    try:
        (source,) = training_sources(recipe).values()  # a rule refuses passes over several sets
        size = stored_rows(source)
    except RecipeError:
        return recipe, ""
    if size is None:
        problem = f"{short_toml(epochs)} passes over {source}, an iterator, which has no length"
        raise RecipeError(f"training.epochs: {problem}: set run.steps in its place")
    prompts = max(1, math.ceil(epochs * size))
    steps = math.ceil(prompts / batch)
    text = f"epochs      {short_toml(epochs)} of {size:,} prompts: run.prompts = {prompts}, {steps} steps of {batch}"
    if recipe.rollout.rounds is not RoundKind.SYNCHRONOUS or recipe.group_sizing.varies:
        text += ", fewer or more where rounds or groups take other numbers of prompts"
    run = replace(recipe.run, steps=steps, prompts=prompts)
    training = replace(recipe.training, epochs=0.0)
    return replace(recipe, run=run, training=training), text
