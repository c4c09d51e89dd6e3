"""Makes a recipe out of the settings of another system: each key with its origin beside it, and the outcome of each
setting. ``streamrl init --from`` calls it for files of settings, ``trl_trainers`` for the objects of a script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import RecipeError, raise_problems
from streamrl.base.types import JsonMapping, JsonObject
from streamrl.cli.dialects.conversions import CONVERSIONS, ForeignSettings
from streamrl.cli.dialects.setting_files import Foreign
from streamrl.recipe.check_fields import CheckedTable
from streamrl.recipe.dialects.foreign_keys import assigned, defaults_of, dialects, find
from streamrl.recipe.field_types import as_written, keys_of, written_path
from streamrl.recipe.problems import Origin, did_you_mean, short_toml
from streamrl.recipe.rules.load_recipe import read_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import parse_toml, toml_value

TRANSLATED = "translated"
DEFAULT = "default that differs"
BY_HAND = "by hand"
WITHOUT = "no counterpart"
NEEDLESS = "need not be set"
NOT_READ = "not read"
_OUTCOMES = {"-": WITHOUT, "!": WITHOUT, "=": NEEDLESS}
"""Outcomes by the first character of an effect."""
MISSING = {
    "model.path": ("model", "name a directory in Hugging Face format, or a model of the Hub"),
    "prompts.train": ("train.jsonl", 'write rows with the column "prompt", and those that the reward names'),
    "rewards.0.function": ("reward.py:reward", "write it, and try it with: streamrl reward test reward.py:reward"),
}
"""Keys that every recipe needs: the value where the settings do not have it, and what to do."""


class ForeignSetting(Struct, frozen=True):
    """Outcome of one setting.

    ``key``, ``value``: setting of the other system (no key: a remark about the recipe);
    ``outcome``: such as ``TRANSLATED``;
    ``here``: keys and values of the recipe, or a reason;
    ``sets``: values by the keys of the recipe."""

    key: str
    value: Any
    outcome: str
    here: str
    sets: JsonMapping = {}


class Translation(Struct, frozen=True):
    """A recipe out of the settings of another system. ``recipe``: text of the recipe."""

    dialect: str
    recipe: str
    settings: tuple[ForeignSetting, ...]

    def lines(self) -> list[str]:
        """Return the outcome of every setting, as a table for a terminal, with settings of one answer in one line."""
        lines = [f"{self.dialect} -> recipe.toml"]
        for outcome in (TRANSLATED, DEFAULT, BY_HAND, WITHOUT, NOT_READ, NEEDLESS):
            answers = _by_answer(setting for setting in self.settings if setting.outcome == outcome)
            if answers:
                lines += ["", f"{outcome}:"]
            lines += [f"  {names}\n      {here}" if names else f"  {here}" for here, names in answers]
        return lines

    def refused(self) -> list[str]:
        """Return a line for each setting that has no effect on the recipe and would have one on the training."""
        return [
            f"{_named(setting)}: {setting.here}".removeprefix(": ")
            for setting in self.settings
            if setting.outcome in (BY_HAND, WITHOUT, NOT_READ)
        ]


def translated(foreign: Foreign) -> Translation:
    """Translate settings. Raises ``RecipeError`` for settings of a method or a section that is not known here."""
    settings = _settings_with_effects(foreign)
    every = []
    for key, value in settings.items():
        setting = outcome_of(foreign.dialect, key, value, settings)
        if key not in settings.defaults:
            every.append(setting)
        elif setting.outcome == TRANSLATED:
            every.append(replace(setting, outcome=DEFAULT))
        elif setting.outcome == BY_HAND:
            every.append(setting)
    _refuse_other_methods(foreign, every)
    values, origins = _values(foreign, every)
    if not values.get("evaluation.prompts"):
        for path in [path for path in values if path.startswith("evaluation.")]:
            text = f"{path} = {values.pop(path)} needs evaluation.prompts, which the settings do not have"
            if any(path in setting.sets for setting in every if setting.outcome == TRANSLATED):
                every.append(ForeignSetting("", None, BY_HAND, text))
    for path, (value, remedy) in MISSING.items():
        if path not in values:
            values[path] = value
            origins[path] = [f"not in the settings: {remedy}"]
            every.append(ForeignSetting("", value, BY_HAND, f"{path} is not in the settings: {remedy}"))
    try:
        read_recipe(parse_toml(_recipe_text(foreign, values, origins, every)))
    except RecipeError as error:  # values that are allowed alone, and not together
        every += [ForeignSetting("", None, BY_HAND, problem.removeprefix("recipe: ")) for problem in error.problems]
    return Translation(foreign.dialect, _recipe_text(foreign, values, origins, every), tuple(every))


def _settings_with_effects(foreign: Foreign) -> ForeignSettings:
    """Return the settings of ``foreign`` and its system's defaults for the others. A null is a setting that nobody
    wrote, unless its key has a meaning for null."""
    settings = ForeignSettings()
    for key, value in foreign.settings.items():
        if value is not None or "none" in getattr(find(foreign.dialect, key), "values", ()):
            settings[key] = value
    for key, value in defaults_of(foreign.dialect, foreign.method).items():
        if settings.value(key) is None:
            settings[key] = value
            settings.defaults.add(key)
    return settings


def _refuse_other_methods(foreign: Foreign, outcomes: Iterable[ForeignSetting]) -> None:
    """Raise ``RecipeError`` for settings of another method, and for sections of which no key is known."""
    problems = []
    sections = set()
    known = set()
    for setting in outcomes:
        row = find(foreign.dialect, setting.key)
        section, dot, _ = setting.key.partition(".")
        if dot and foreign.dialect != "TRL":
            sections.add(section)
        if row is not None:
            known.add(section)
            if row.effect(setting.value, setting.key).startswith("!"):
                problems.append(f"{foreign.name}: {_named(setting)}: {setting.here}")
    for section in sorted(sections - known):
        remedy = "leave it out where it does not change the training"
        problems.append(f"{foreign.name}: {section} is no section of {foreign.dialect} that is known here: {remedy}")
    raise_problems(problems)


def _values(foreign: Foreign, every: list[ForeignSetting]) -> tuple[JsonObject, dict[str, list[str]]]:
    """Return the values of the recipe and their origins. A default gives way to a setting, and a key for two values to
    a key for one of them. Two settings for one value that differ are to be decided by hand: ``every`` gets a line."""
    values: JsonObject = {}
    origins: dict[str, list[str]] = {}
    ranks: dict[str, tuple[bool, int]] = {}
    for setting in sorted(every, key=lambda setting: (setting.outcome != DEFAULT, -len(setting.sets))):
        rank = (setting.outcome != DEFAULT, -len(setting.sets))
        for path, value in setting.sets.items():
            placed = _placed(path, value, foreign)
            before = origins.pop(path, [])
            if values.get(path, placed) != placed:
                if ranks[path] == rank:
                    text = f"{path} is {values[path]} by {before[0]}, and {placed} by {setting.key}: choose one"
                    every.append(ForeignSetting("", None, BY_HAND, text))
                before = []
            mark = " (its default)" if setting.outcome == DEFAULT else ""
            origins[path] = [*before, f"{foreign.dialect}'s {setting.key}{mark}"]
            values[path] = placed
            ranks[path] = rank
    return values, origins


def _placed(path: str, value: Any, foreign: Foreign) -> Any:
    """Return ``value``, with the absolute path of a file that is in the current directory, or beside the settings."""
    match = re.match(r"[^?:]+", value) if isinstance(value, str) else None
    if match is None:
        return value
    file = match[0]
    options = value[match.end() :]
    is_path = path in ("model.path", "prompts.train", "evaluation.prompts") and not options.startswith(":")
    if is_path or file.endswith(".py"):
        for directory in (Path(), foreign.directory):
            if (directory / file).exists():
                return f"{(directory / file).resolve()}{options}"
    return value


def outcome_of(dialect: str, key: str, value: Any, settings: ForeignSettings) -> ForeignSetting:
    """Return the outcome of one of ``settings``, or of a value for one of them."""
    row = find(dialect, key)
    if row is None:
        meant = did_you_mean(key.rpartition(".")[2], (name.rpartition(".")[2] for name in dialects()[dialect]))
        return ForeignSetting(key, value, NOT_READ, f"no key of {dialect} that is known{meant}")
    convert = CONVERSIONS.get(dialect, {}).get(row.key)
    effect: Any = ""
    try:
        if reason := settings.reason_without_effect(row.key):
            effect = f"={reason}"
        elif convert is not None:
            effect = convert(value, settings)
        effect = effect or row.effect(value, key)
    except (TypeError, ValueError, ArithmeticError, LookupError):
        effect = f"~{short_toml(value)} is no value that it takes; {row.here.lstrip('~=-!')}"
    sets = assigned(effect, value) if isinstance(effect, str) else effect
    if problems := [problem for path, item in sets.items() for problem in _problems(path, item)]:
        return ForeignSetting(key, value, BY_HAND, "; ".join(problems))
    if isinstance(effect, str) and not sets:
        outcome = _OUTCOMES.get(effect[:1], BY_HAND)
        return ForeignSetting(key, value, outcome, as_written(Recipe, effect.lstrip("-=~!")))
    here = ", ".join(f"{written_path(Recipe, path)} = {short_toml(item)}" for path, item in sets.items())
    return ForeignSetting(key, value, TRANSLATED, here, sets)


def _problems(path: str, value: Any) -> list[str]:
    """Return the problems of the value that a recipe would be refused for, whatever its other values are."""
    parts = [part for part in written_path(Recipe, path).split(".") if not part.isdigit()]
    table: Any = value
    for part in reversed(parts[1:]):
        table = {part: table}
    checked = CheckedTable({parts[0]: [table] if parts[0] == "rewards" else table}, Origin("", {}), lambda *_: "")
    return [problem.removeprefix(": ") for problem in checked.problems if "not allowed" in problem]


def _recipe_text(
    foreign: Foreign, values: JsonMapping, origins: Mapping[str, list[str]], settings: Iterable[ForeignSetting]
) -> str:
    sections = list(keys_of(Recipe))
    tables: dict[str, list[str]] = {}
    places = (
        (sections.index(path.partition(".")[0]), *written_path(Recipe, path).rpartition("."), path) for path in values
    )
    for _, table, _, name, path in sorted(places):
        section, _, index = table.partition(".")
        heading = f"[{table}]"
        if index.isdigit():
            heading = f"[[{section}]]{' ' * int(index)}"  # spaces tell the items apart
        line = f"{name} = {toml_value(values[path])}  # {_in_one_line(', '.join(origins[path]))}"
        tables.setdefault(heading, []).append(line)
    blocks = [f"# Translated from {foreign.name} of {foreign.dialect}: beside each key is where its value is from.\n"]
    blocks += ["\n".join([heading.rstrip(), *lines]) + "\n" for heading, lines in tables.items()]
    left = _by_answer(setting for setting in settings if setting.outcome in (BY_HAND, WITHOUT, NOT_READ))
    if left:
        notes = [f"#   {_in_one_line(f'{names}: {here}'.removeprefix(': '))}" for here, names in left]
        blocks += ["# Not translated:", *notes, ""]
    return "\n".join(blocks)


def _by_answer(settings: Iterable[ForeignSetting]) -> list[tuple[str, str]]:
    """Return pairs of an answer and the settings that have it, by name."""
    names: dict[str, list[str]] = {}
    for setting in settings:
        names.setdefault(setting.here, []).append(_named(setting))
    return [(here, ", ".join(group)) for here, group in names.items()]


def _named(setting: ForeignSetting) -> str:
    return f"{setting.key} = {short_toml(setting.value)}" if setting.key else ""


def _in_one_line(text: str) -> str:
    return re.sub(r"[\s\x00-\x1f\x7f]+", " ", text)
