"""Checks of settings that are to change while a run goes on: the recipe that they would make must be one, and nothing
else of the run may have to know of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.control.events import SettingsChanged
from streamrl.control.model import RunState
from streamrl.control.settings import ControlSettings, control_settings
from streamrl.control.steering.live_keys import LIVE, STEPS, why_not
from streamrl.recipe.fields import ADVANCED, keys_of
from streamrl.recipe.rules.load import overridden_recipe
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value

_REMEDY = "drain the run, and begin another from its checkpoint (checkpoint.resume_from)"
_NOT_CHOSEN_LATER = (RoundKind.AUTO, RoundKind.CUSTOM)
MOST_GROWTH = 2
"""How many times as many trajectories may be in flight as at the start: what the streams of a run have room for."""


def settings_change(started: Recipe, state: RunState, changes: Sequence[str], step: int) -> SettingsChanged:
    """The event that carries ``changes``, each ``key=value``. ``started``: the recipe of the run; ``state``: with what
    was changed since. Raises ``RecipeError`` with every reason why they cannot be made."""
    steering = state.steering
    keys = {_bare(change.partition("=")[0]): change for change in changes}
    before = _with(started, steering.changed)
    earlier = _with(
        before, {key: value for one in steering.asked if one.step <= step for key, value in one.values.items()}
    )
    asked = overridden_recipe(
        earlier, [f"{written_key(key)}={text.partition('=')[2]}" if "=" in text else text for key, text in keys.items()]
    )
    problems = [
        f"{key} stays as it is while a run goes on: {why_not(key)}; {_REMEDY}" for key in keys if key not in LIVE
    ]
    if 0 < step <= state.trainer_version:
        problems.append(f"--step {step}: the run has made step {state.trainer_version} already: give a later one")
    if problems:
        raise RecipeError(*problems)
    values = {key: _value(control_settings(asked), asked, key) for key in keys}
    change = SettingsChanged(values=values, step=step, recipe_steps=started.run.steps if STEPS in values else 0)
    recipe = before
    for one in sorted([*steering.asked, change], key=lambda one: one.step):
        recipe = _with(recipe, one.values)
        problems += _why_impossible(started, recipe, one.values, state)
    if problems:
        raise RecipeError(*dict.fromkeys(problems))
    return change


def _why_impossible(started: Recipe, recipe: Recipe, values: Mapping[str, Any], state: RunState) -> Iterator[str]:
    """Reasons for which a run that was started with ``started`` cannot have ``recipe``, of which ``values`` are new."""
    rounds = recipe.rollout.rounds
    first = started.rollout.rounds
    sorts = RoundKind.LENGTH_SORTED in (rounds, first)
    if rounds != first and (rounds in _NOT_CHOSEN_LATER or (sorts and recipe.length_sorted.single)):
        reason = "cohorts of single trajectories are" if sorts else f'what rounds = "{rounds}" needs is'
        yield f"rollout.rounds: {reason} set up at the start: {_REMEDY}"
    if rounds != first and sorts and recipe.training.updates_per_batch > 1:
        yield f"rollout.rounds: with training.updates_per_batch the trainer sorts groups from its start on: {_REMEDY}"
    if recipe.objective_settings != started.objective_settings:
        yield f"{', '.join(values)}: the objective would be another, which ranks read at the start: {_REMEDY}"
    if recipe.sampling.max_tokens > (most := started.sampling.max_tokens):
        yield f"sampling.max_tokens: {recipe.sampling.max_tokens} is more than engines have room for: at most {most}"
    if recipe.max_in_flight > (most := MOST_GROWTH * started.max_in_flight):
        yield f"{', '.join(values)}: {recipe.max_in_flight} trajectories would be in flight: at most {most} may be"
    if "evaluation.every" in values and set(recipe.evaluation.sets) != {"held_out"}:
        yield "evaluation.every: it may change where evaluation.prompts names one set of held-out prompts"
    if values.get(STEPS, state.trainer_version + 1) <= state.trainer_version:
        yield f"{STEPS}: the run has made {state.trainer_version} steps: give more, or `streamrl drain` it"


def _with(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    return overridden_recipe(recipe, [f"{written_key(key)}={toml_value(value)}" for key, value in values.items()])


def _value(settings: ControlSettings, recipe: Recipe, key: str) -> Any:
    """The value as control has it: resolved, where a recipe leaves that to a default."""
    for place, path in ((settings, LIVE[key]), (recipe, key)):
        found: Any = place
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else getattr(found, part)
        if found is not None:
            break
    return msgspec.to_builtins(found)


def _bare(key: str) -> str:
    return key.strip().replace(f".{ADVANCED}.", ".")


def written_key(key: str) -> str:
    """The key as a recipe has it, below ``advanced`` where it belongs there."""
    section, _, name = key.partition(".")
    known = keys_of(Recipe).get(section)
    field = keys_of(known.section).get(name) if known else None
    return f"{section}.{ADVANCED}.{name}" if field and field.advanced else key
