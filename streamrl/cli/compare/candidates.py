"""Recipes that are compared with each other: one recipe under several systems or kinds of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamrl.base.errors import RecipeError
from streamrl.recipe.rules.load import load_recipe
from streamrl.recipe.scheduling import RoundKind, System
from streamrl.recipe.sections import Recipe


def compared_recipes(path: Path, overrides: Sequence[str], names: str, flag: str) -> list[tuple[str, Recipe]]:
    """The recipe in ``path`` for each ``NAME[:key=value...]`` of ``names``, which commas part; a name is one of a
    system or of a kind of rounds. Raises ``RecipeError`` with the problems of all of them, which name the ``flag``."""
    load_recipe(path, overrides)  # its own problems once
    chosen: dict[str, Recipe] = {}
    problems: list[str] = []
    for text in filter(None, (part.strip() for part in names.split(","))):
        name, *settings = text.split(":")
        if name not in (*System, *RoundKind):
            known = ", ".join(dict.fromkeys((*System, *RoundKind)))
            problems.append(f"{flag}: {name!r} is no system and no kind of rounds: choose from {known}")
            continue
        # A system of the recipe would contradict the rounds.
        one = [f'rollout.system="{name}"']
        if name not in set(System) - {System.SYNCHRONOUS}:
            one = ['rollout.system=""', f'rollout.rounds="{name}"']
        try:
            chosen[text] = load_recipe(path, (*overrides, *one, *settings))
        except RecipeError as error:
            problems += [f"{text}: {line}" for line in error.problems]
    if problems:
        raise RecipeError(*problems)
    if not chosen:
        raise RecipeError(f"{flag} {names!r} names no policy: give some, such as synchronous,continuous")
    return list(chosen.items())
