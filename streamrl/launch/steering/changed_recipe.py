"""Checks of changes of settings while a run goes on: the changed recipe must be valid, and the change must concern only
control. Pure; ``steering`` calls it in the controller's process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import to_builtins

from streamrl.base.errors import RecipeError, raise_problems
from streamrl.base.types import JsonMapping, JsonObject
from streamrl.control.events import SettingsChanged
from streamrl.control.run_state import RunState
from streamrl.control.settings import ControlSettings, control_settings
from streamrl.control.steering.live_keys import LIVE, STEPS, why_not
from streamrl.recipe.field_types import ADVANCED, keys_of
from streamrl.recipe.rules.load_recipe import overridden_recipe
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value

_REMEDY = "drain the run, and begin another from its checkpoint (checkpoint.resume_from)"
_NOT_CHOSEN_LATER = (RoundKind.AUTO, RoundKind.CUSTOM)
MOST_GROWTH = 2
"""Largest ratio of trajectories in flight to their number at the start: the streams of a run have room for so many."""


def settings_change(started: Recipe, state: RunState, changes: Sequence[str], step: int) -> SettingsChanged:
    """The event of control for ``changes``, each ``key=value``. ``started``: recipe with which the run was started;
    ``state``: present state, which has earlier changes; ``step``: first step with the changes, or 0. Raises
    ``RecipeError`` with every reason for which the changes cannot be made."""
    steering = state.steering
    keys = {change.partition("=")[0].strip().replace(f".{ADVANCED}.", "."): change for change in changes}
    present_recipe = _with(started, steering.changed)
    waiting_values: JsonObject = {}
    for waiting_change in steering.waiting_changes:
        if waiting_change.step <= step:
            waiting_values |= waiting_change.values
    overrides = []
    for key, text in keys.items():
        _, equals, value = text.partition("=")
        overrides.append(f"{written_key(key)}={value}" if equals else text)
    requested_recipe = overridden_recipe(_with(present_recipe, waiting_values), overrides)
    problems = [
        f"{key} stays as it is while a run goes on: {why_not(key)}; {_REMEDY}" for key in keys if key not in LIVE
    ]
    if 0 < step <= state.trainer_version:
        problems.append(f"--step {step}: the run has made step {state.trainer_version} already: give a later one")
    raise_problems(problems)
    values = {key: _value(control_settings(requested_recipe), requested_recipe, key) for key in keys}
    change = SettingsChanged(values=values, step=step, recipe_steps=started.run.steps if STEPS in values else 0)
    # The recipe must be possible after each change that waits, in the order of their steps.
    recipe = present_recipe
    for later_change in sorted([*steering.waiting_changes, change], key=lambda waiting_change: waiting_change.step):
        recipe = _with(recipe, later_change.values)
        problems += _why_impossible(started, recipe, later_change.values, state)
    if problems:
        raise RecipeError(*dict.fromkeys(problems))
    return change


def _why_impossible(started: Recipe, recipe: Recipe, values: JsonMapping, state: RunState) -> Iterator[str]:
    """Reasons for which a run that was started with ``started`` cannot go on with ``recipe``, where ``values`` are
    new."""
    rounds = recipe.rollout.rounds
    started_rounds = started.rollout.rounds
    sorts = RoundKind.LENGTH_SORTED in (rounds, started_rounds)
    if rounds != started_rounds and (rounds in _NOT_CHOSEN_LATER or (sorts and recipe.length_sorted.single)):
        reason = "cohorts of single trajectories are" if sorts else f'what rounds = "{rounds}" needs is'
        yield f"rollout.rounds: {reason} set up at the start: {_REMEDY}"
    if rounds != started_rounds and sorts and recipe.training.updates_per_batch > 1:
        yield f"rollout.rounds: with training.updates_per_batch the trainer sorts groups from its start on: {_REMEDY}"
    if recipe.objective_settings != started.objective_settings:
        yield f"{', '.join(values)}: the objective would be another, which ranks read at the start: {_REMEDY}"
    limit = started.sampling.max_tokens
    if recipe.sampling.max_tokens > limit:
        yield f"sampling.max_tokens: {recipe.sampling.max_tokens} is more than engines have room for: at most {limit}"
    if recipe.max_tokens != started.max_tokens and recipe.objective.overlong_buffer:
        yield f"sampling.max_tokens: ranks punish lengths below {limit} (objective.overlong_buffer): {_REMEDY}"
    limit = MOST_GROWTH * started.max_in_flight
    if recipe.max_in_flight > limit:
        yield f"{', '.join(values)}: {recipe.max_in_flight} trajectories would be in flight: at most {limit} may be"
    if "evaluation.every" in values and set(recipe.evaluation.sets) != {"held_out"}:
        yield "evaluation.every: it may change where evaluation.prompts names one set of held-out prompts"
    if values.get(STEPS, state.trainer_version + 1) <= state.trainer_version:
        yield f"{STEPS}: the run has made {state.trainer_version} steps: give more, or `streamrl drain` it"


def _with(recipe: Recipe, values: JsonMapping) -> Recipe:
    """Return ``recipe`` with ``values`` by key."""
    return overridden_recipe(recipe, [f"{written_key(key)}={toml_value(value)}" for key, value in values.items()])


def _value(settings: ControlSettings, recipe: Recipe, key: str) -> Any:
    """The value of ``key`` in the settings of control, where defaults are resolved, or else in the recipe."""
    value = _value_at(settings, LIVE[key])
    if value is None:
        value = _value_at(recipe, key)
    return to_builtins(value)


def _value_at(root: Any, path: str) -> Any:
    """The value at a path with dots through structs and dictionaries."""
    value = root
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def written_key(key: str) -> str:
    """Return ``key`` in the form of a recipe, below ``advanced`` for an advanced setting."""
    section, _, name = key.partition(".")
    section_field = keys_of(Recipe).get(section)
    field = keys_of(section_field.section).get(name) if section_field else None
    return f"{section}.{ADVANCED}.{name}" if field and field.advanced else key
