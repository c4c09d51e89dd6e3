"""Reads the table of other systems' keys (foreign_keys.toml): the recipe's key and value for each, or the reason why
there is none. The checks of a recipe, ``streamrl explain`` and the translation of other systems' settings
(``cli.dialects``) use it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from streamrl.base.types import JsonMapping, JsonObject, TextMapping, TextsByName
from streamrl.recipe.field_types import as_written, paths_in_view
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value, value_or_text

TABLE = Path(__file__).with_name("foreign_keys.toml")
NOT_GIVEN = object()
"""Marker for a key without a value."""
_COPIED = re.compile(r"([a-z_]+(?:\.[a-z_0-9*]+)+)(?: \(.*\))?")
SHARED = "vLLM"
"""Dialect whose keys all other systems accept, too."""


class Row(Struct, frozen=True):
    """Effects of a key of another system; foreign_keys.toml explains their notation.

    ``key``: name of the key;
    ``here``: effect of any value that is not in ``values``;
    ``values``: effects of particular values, by the value in lower case."""

    key: str
    here: str
    values: TextMapping = {}

    def effect(self, value: Any, key: str) -> str:
        """Return the effect of ``value``, in which the last part of the dotted ``key`` replaces ``*``."""
        effect = self.values.get(toml_value(value).strip('"').lower(), self.here)
        return effect.replace(".*", f".{key.rpartition('.')[2]}")


@cache
def _table() -> tuple[Mapping[str, Mapping[str, Row]], Mapping[str, JsonMapping], TextMapping, TextMapping]:
    """Read (rows of each system by key, defaults of each system, arguments of vLLM that a recipe cannot set,
    switches)."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    texts = {f"@{name}": text for name, text in table.pop("texts").items()}
    switches = {key: switch for keys, switch in table.pop("switches").items() for key in keys.split()}
    owned = {}
    for arguments, owner in table.pop("owned").items():
        for argument in arguments.split():
            owned[argument] = owner.replace(".*", f".{argument}")
    defaults = {dialect: entries.pop("DEFAULTS", {}) for dialect, entries in table.items()}
    defaults["TRL.RLOO"] = table["TRL"].pop("RLOO")
    rows: dict[str, dict[str, Row]] = {}
    for dialect, entries in table.items():
        rows[dialect] = {}
        for keys, entry in entries.items():
            default_effect, *texts_of_values = [entry] if isinstance(entry, str) else entry
            effects: TextsByName = {}
            for text in texts_of_values:  # "VALUE VALUE: EFFECT"
                values, _, effect = text.partition(": ")
                effects |= dict.fromkeys(values.split(), texts.get(effect, effect))
            for key in keys.split():
                rows[dialect][key] = Row(key, texts.get(default_effect, default_effect), effects)
    return rows, defaults, owned, switches


def dialects() -> Mapping[str, Mapping[str, Row]]:
    """Return the rows of each system by their keys."""
    return _table()[0]


def owned_arguments() -> TextMapping:
    """Return the arguments of vLLM that ``engines.args`` cannot have: for each the key that sets it, or ``-`` and the
    reason why no key does."""
    return _table()[2]


def switches() -> TextMapping:
    """Return the keys that have an effect only where another has a value: for each ``OTHER=VALUE``."""
    return _table()[3]


def defaults_of(dialect: str, method: str) -> JsonMapping:
    """Return the defaults of a system that differ from the recipe's, or from which another of its keys is computed.
    ``method``: method of the system whose defaults differ from those of its others, such as RLOO."""
    defaults = _table()[1]
    return {**defaults[dialect], **defaults.get(f"{dialect}.{method}", {})}


def find(dialect: str, key: str) -> Row | None:
    """Return the row that matches a dotted key or an end of it, the longest first: ``critic.optim.lr`` is not the
    policy's ``optim.lr``, and no key of ``ref.*`` is the policy's. Indices are left out."""
    parts = [part for part in key.replace("-", "_").split(".") if not part.isdigit()]
    for table in (dialects()[dialect], dialects()[SHARED]):
        for pattern in _patterns(parts):
            if pattern in table:
                return table[pattern]
    return None


def _patterns(parts: list[str]) -> Iterator[str]:
    """Yield the keys of rows that would match, the best first: each end of the key, then its beginnings with ``.*``."""
    for start in range(len(parts)):
        yield ".".join(parts[start:])
        yield from (f"{'.'.join(parts[start:end])}.*" for end in range(len(parts) - 1, start, -1))


def assigned(effect: str, value: Any) -> JsonObject:
    """Return the values that an effect sets, by the recipe's keys; empty: it sets none. ``value``: value of the other
    system's key, which some effects copy."""
    values: JsonObject = {}
    if effect.startswith(("-", "!", "=", "~")):
        return values
    for part in effect.split("; "):
        if copied := _COPIED.fullmatch(part):
            values[copied[1]] = value
        elif " = " in part:
            path, _, text = part.partition(" = ")
            values[path] = value_or_text(text)
    return values


def foreign_answer(key: str, value: Any = NOT_GIVEN) -> str:
    """Return a sentence about another system's key: the recipe's key for it (and for ``value``, where it is given), or
    the reason why there is none. For a key of the recipe, return the key's value for ``value`` of another system.
    Empty: no system has the key or the value."""
    recipe_key = key.replace(".advanced.", ".")
    if recipe_key in _recipe_paths():
        if not isinstance(value, str):
            return ""
        return as_written(Recipe, _answer_for_value(recipe_key, value))
    effects = _effects_by_owner(key, value)
    answers = []
    for effect, owners_by_key in effects.items():
        names = [f"{' and '.join(owners)} {name}" for name, owners in owners_by_key.items()]
        answers.append(_answer(" and ".join(names), effect))
    return as_written(Recipe, "; ".join(answers))


def _effects_by_owner(key: str, value: Any) -> dict[str, dict[str, list[str]]]:
    """Effects of the best matching rows of all systems: for each effect the keys that have it, each with its systems as
    ``verl's``."""
    rows = {}
    for dialect, table in dialects().items():
        row = find(dialect, key)
        if row is not None and row.key in table:
            rows[dialect] = row
    longest = max((_length(row) for row in rows.values()), default=0)
    effects: dict[str, dict[str, list[str]]] = {}
    for dialect, row in rows.items():
        if _length(row) == longest:
            effect = row.effect("" if value is NOT_GIVEN else value, key)
            effects.setdefault(effect, {}).setdefault(row.key, []).append(f"{dialect}'s")
    return effects


def _length(row: Row) -> int:
    """Number of parts of the row's dotted key."""
    return len(row.key.removesuffix(".*").split("."))


def _answer(name: str, effect: str) -> str:
    """A sentence about the key ``name`` with its effect."""
    if effect.startswith(("-", "!")):
        return f"that is {name}, and there is no such key here: {effect[1:]}"
    if effect.startswith("="):
        return f"that is {name}, which need not be set here: {effect[1:]}"
    equivalent = effect.lstrip("~").replace("; ", " and ")
    if ":" in equivalent or "(" in equivalent:
        return f"that is {name}; here: {equivalent}"
    return f"that is {name}: {equivalent} here"


@cache
def _recipe_paths() -> frozenset[str]:
    return frozenset(paths_in_view(Recipe, with_advanced=True))


def _answer_for_value(path: str, value: str) -> str:
    """A sentence about ``value`` of another system for the recipe's key ``path``; empty: no system has it."""
    for dialect, table in dialects().items():
        for row in table.values():
            effect = row.values.get(value.lower(), "")
            if path in assigned(effect, value):
                return f"that is a value of {dialect}'s {row.key}: write {effect}"
    return ""
