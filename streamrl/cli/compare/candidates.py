"""Recipes to compare: one recipe under several systems or kinds of rounds. Called by ``compare`` and ``simulate`` in
the command's own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamrl.base.errors import RecipeError, raise_problems
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.scheduling import RoundKind, System
from streamrl.recipe.sections import Recipe


def compared_recipes(path: Path, overrides: Sequence[str], names: str, flag: str) -> list[tuple[str, Recipe]]:
    """Return the recipe in ``path`` for each ``NAME[:key=value...]`` of ``names``, separated by commas; a name is that
    of a system or of a kind of rounds. Raises ``RecipeError`` with the problems of all names, which name ``flag``."""
    load_recipe(path, overrides)  # problems of the recipe itself are reported once
    recipes = {}
    problems = []
    for text in filter(None, (part.strip() for part in names.split(","))):
        name, *settings = text.split(":")
        if name not in (*System, *RoundKind):
            valid_names = ", ".join(dict.fromkeys((*System, *RoundKind)))
            problems.append(f"{flag}: {name!r} is no system and no kind of rounds: choose from {valid_names}")
            continue
        # Kinds of rounds replace the system of the recipe, which would contradict them.
        scheduling = [f'rollout.system="{name}"']
        if name not in set(System) - {System.SYNCHRONOUS}:
            scheduling = ['rollout.system=""', f'rollout.rounds="{name}"']
        try:
            recipes[text] = load_recipe(path, (*overrides, *scheduling, *settings))
        except RecipeError as error:
            problems += [f"{text}: {line}" for line in error.problems]
    raise_problems(problems)
    if not recipes:
        raise RecipeError(f"{flag} {names!r} names no policy: give some, such as synchronous,continuous")
    return list(recipes.items())
