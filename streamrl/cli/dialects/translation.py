"""A recipe out of the settings of another system: every key with its origin beside it, and what became of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.cli.dialects.conversions import CONVERSIONS, Given
from streamrl.cli.dialects.setting_files import Foreign, read_foreign
from streamrl.recipe.check_fields import CheckedTable
from streamrl.recipe.dialects.foreign_keys import assigned, defaults_of, dialects, find
from streamrl.recipe.field_types import as_written, keys_of, written_path
from streamrl.recipe.problems import Origin, did_you_mean, short_toml
from streamrl.recipe.rules.load_recipe import read_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import parse_toml, toml_value

TRANSLATED = "translated"
BY_HAND = "by hand"
WITHOUT = "no counterpart"
NEEDLESS = "need not be set"
UNKNOWN = "not known"
MOST = 6
"""Settings that are named beside one answer."""
MISSING = {
    "model.path": ("model", "name a directory in Hugging Face format, or a model of the Hub"),
    "prompts.train": ("train.jsonl", 'write rows with the column "prompt", and those that the reward names'),
    "rewards.0.function": ("reward.py:reward", "write it, and try it with: streamrl reward test reward.py:reward"),
}
"""Keys that every recipe needs: the value where the settings do not say it, and what to do."""


class ForeignSetting(msgspec.Struct, frozen=True):
    """``key`` and ``value`` as the other system has them, and ``here``: keys and values of the recipe, or a reason.
    ``default``: of the other system, which nobody wrote. ``sets``: values by the keys of the recipe."""

    key: str
    value: Any
    outcome: str
    here: str
    default: bool = False
    sets: Mapping[str, Any] = {}


class Translation(msgspec.Struct, frozen=True):
    """``recipe``: its text. ``files``: texts of other files beside it, by name."""

    dialect: str
    recipe: str
    files: Mapping[str, str]
    settings: tuple[ForeignSetting, ...]

    def lines(self) -> list[str]:
        """Return what became of every setting, as a table for a terminal: those of one answer in one line."""
        lines = [f"{self.dialect} -> recipe.toml"]
        for outcome in (TRANSLATED, BY_HAND, WITHOUT, UNKNOWN, NEEDLESS):
            found = _by_answer(one for one in self.settings if one.outcome == outcome)
            lines += ["", f"{outcome}:"] if found else []
            lines += [f"  {names}\n      {here}" if names else f"  {here}" for here, names in found]
        return lines


def translate(source: str | Path) -> Translation:
    """Translate a file of another system, or its command line. Nothing of it is executed. Raises ``RecipeError`` for
    what cannot be read, or is of no system that is known."""
    return translated(read_foreign(source))


def translated(foreign: Foreign) -> Translation:
    """Translate settings that were read."""
    # A null is what was not set, but for keys to which it means something.
    means = {key for key in foreign.settings if "none" in getattr(find(foreign.dialect, key), "values", ())}
    written = Given({key: value for key, value in foreign.settings.items() if value is not None or key in means})
    defaults = {key: value for key, value in defaults_of(foreign.dialect).items() if written.of(key) is None}
    given = Given(written | defaults)
    every = [_setting(foreign.dialect, key, value, given, default=key in defaults) for key, value in given.items()]
    every += [_unread(foreign.dialect, key, *expression) for key, expression in foreign.unread.items()]
    values = dict[str, Any]()
    origins = dict[str, list[str]]()
    # A default gives way to what was written, and a key for two things to a key for one of them.
    for one in sorted(every, key=lambda one: (not one.default, -len(one.sets))):
        for path, chosen in one.sets.items():
            before = origins.pop(path, []) if values.get(path) == chosen else []
            origins[path] = [*before, f"{foreign.dialect}'s {one.key}{' (its default)' if one.default else ''}"]
            values[path] = _placed(path, chosen, foreign)
    if str(values.get("prompts.train")).startswith("hf:openai/gsm8k") and "rewards.0.function" not in values:
        values["rewards.0.function"] = "math"
        origins["rewards.0.function"] = ["what GSM8K's answers are compared by"]
    for path in ("evaluation.every", "evaluation.limit") if not values.get("evaluation.prompts") else ():
        if path in values:
            what = f"{path} = {values.pop(path)} needs evaluation.prompts, which the settings do not say"
            every.append(ForeignSetting("", None, BY_HAND, what))
    for path, (value, what) in MISSING.items():
        if path not in values:
            values[path] = value
            origins[path] = [f"not in the settings: {what}"]
            every.append(ForeignSetting("", value, BY_HAND, f"{path} is not in the settings: {what}"))
    settings = [one for one in every if one.outcome == TRANSLATED or not one.default]
    try:
        read_recipe(parse_toml(_recipe_text(foreign, values, origins, settings)))
    except RecipeError as error:  # values that are allowed alone, and not together
        settings += [ForeignSetting("", None, BY_HAND, problem.removeprefix("recipe: ")) for problem in error.problems]
    text = _recipe_text(foreign, values, origins, settings)
    return Translation(foreign.dialect, text, foreign.files, tuple(settings))


def _placed(path: str, value: Any, foreign: Foreign) -> Any:
    """``value``, with the whole path of a file that is in the current directory, or beside the settings."""
    found = re.match(r"[^?:]+", value) if isinstance(value, str) else None
    file, options = (found[0], value[found.end() :]) if found else ("", "")
    plain = path in ("model.path", "prompts.train", "evaluation.prompts") and not options.startswith(":")
    for directory in (
        (Path(), foreign.directory) if (plain or file.endswith(".py")) and file not in foreign.files else ()
    ):
        if (directory / file).exists():
            return f"{(directory / file).absolute()}{options}"
    return value


def _setting(dialect: str, key: str, value: Any, given: Given, *, default: bool) -> ForeignSetting:
    row = find(dialect, key)
    if row is None:
        meant = did_you_mean(key.rpartition(".")[2], (one.rpartition(".")[2] for one in dialects()[dialect]))
        return ForeignSetting(key, value, UNKNOWN, f"no key of {dialect} that is known here{meant}", default)
    convert = CONVERSIONS.get(dialect, {}).get(row.key)
    try:
        effect = convert(value, given) if convert is not None else row.effect(value, key)
        if reason := given.reason_without_effect(row.key):
            effect = f"={reason}"
    except (TypeError, ValueError, ArithmeticError, LookupError):
        effect = f"~{short_toml(value)} is no value that it takes; {row.here.lstrip('~=-')}"
    sets = assigned(effect, value) if isinstance(effect, str) else effect
    if problems := [problem for path, one in sets.items() for problem in _problems(path, one)]:
        return ForeignSetting(key, value, BY_HAND, "; ".join(problems), default)
    if isinstance(effect, str) and not sets:
        outcome = {"-": WITHOUT, "=": NEEDLESS}.get(effect[:1], BY_HAND)
        return ForeignSetting(key, value, outcome, as_written(Recipe, effect.lstrip("-=~")), default)
    here = ", ".join(f"{written_path(Recipe, path)} = {short_toml(one)}" for path, one in sets.items())
    return ForeignSetting(key, value, TRANSLATED, here, default, sets)


def _unread(dialect: str, key: str, text: str, line: int) -> ForeignSetting:
    """An expression: the answer to its key, where no value is needed for it."""
    row = find(dialect, key)
    here = "" if row is None else as_written(Recipe, row.here)
    if here[:1] in ("-", "="):
        return ForeignSetting(key, text, WITHOUT if here[0] == "-" else NEEDLESS, here[1:])
    meant = here.lstrip("~") or "it"
    return ForeignSetting(key, text, BY_HAND, f"line {line} is known only when the script runs: write {meant} yourself")


def _problems(path: str, value: Any) -> list[str]:
    """Return what a recipe would refuse the value for, alone."""
    parts = [part for part in written_path(Recipe, path).split(".") if not part.isdigit()]
    table: Any = value
    for part in reversed(parts[1:]):
        table = {part: table}
    checked = CheckedTable({parts[0]: [table] if parts[0] == "rewards" else table}, Origin("", {}), lambda *_: "")
    return [one.removeprefix(": ") for one in checked.problems if "not allowed" in one]


def _recipe_text(
    foreign: Foreign, values: Mapping[str, Any], origins: Mapping[str, list[str]], settings: Iterable[ForeignSetting]
) -> str:
    sections = list(keys_of(Recipe))
    tables = dict[str, list[str]]()
    places = (
        (sections.index(path.partition(".")[0]), *written_path(Recipe, path).rpartition("."), path) for path in values
    )
    for _, table, _, name, path in sorted(places):
        section, _, index = table.partition(".")
        lines = tables.setdefault(f"[[{section}]]{' ' * int(index)}" if index.isdigit() else f"[{table}]", [])
        lines.append(f"{name} = {toml_value(values[path])}  # {_line(', '.join(origins[path]))}")
    head = f"# Translated from {foreign.name} of {foreign.dialect}: beside each key is where its value is from.\n"
    blocks = [head] + ["\n".join([name.rstrip(), *lines]) + "\n" for name, lines in tables.items()]
    left = _by_answer(one for one in settings if one.outcome not in (TRANSLATED, NEEDLESS))
    notes = [f"#   {_line(f'{names}: {here}'.removeprefix(': '))}" for here, names in left]
    return "\n".join([*blocks, *(["# Not translated:", *notes, ""] if notes else [])])


def _by_answer(settings: Iterable[ForeignSetting]) -> list[tuple[str, str]]:
    """Answers, with the settings that have them, the first ones by name."""
    found: dict[str, list[str]] = {}
    for one in settings:
        mark = " (default)" if one.default else ""
        found.setdefault(one.here, []).append(f"{one.key} = {short_toml(one.value)}{mark}" if one.key else "")
    return [
        (here, ", ".join(names[:MOST] + [f"{len(names) - MOST} more"] * (len(names) > MOST)))
        for here, names in found.items()
    ]


def _line(text: str) -> str:
    return re.sub(r"[\s\x00-\x1f\x7f]+", " ", text)
