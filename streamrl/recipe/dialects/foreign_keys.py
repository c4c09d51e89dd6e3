"""The table of other systems' keys (foreign_keys.toml): what a key and its value are in a recipe, or why not."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from streamrl.recipe.fields import as_written, paths_in_view
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value, value_or_text

TABLE = Path(__file__).with_name("foreign_keys.toml")
NOT_GIVEN = object()
_COPIED = re.compile(r"([a-z_]+(?:\.[a-z_0-9*]+)+)(?: \(.*\))?")
SHARED = "vLLM"
"""The dialect whose keys all others pass on."""


class Row(msgspec.Struct, frozen=True):
    """Effects of a key. ``here``: where the value is in none of ``values``."""

    key: str
    here: str
    values: Mapping[str, str] = {}

    def effect(self, value: Any, key: str) -> str:
        """Return the effect of ``value``; ``*`` in it is the last part of the dotted ``key``."""
        effect = self.values.get(toml_value(value).strip('"').lower(), self.here)
        return effect.replace(".*", f".{key.rpartition('.')[2]}")


@cache
def _table() -> tuple[Mapping[str, Mapping[str, Row]], Mapping[str, Mapping[str, Any]], Mapping[str, str]]:
    """Rows of each system, its defaults, and the arguments of vLLM that a recipe cannot give."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    texts = {f"@{name}": text for name, text in table.pop("texts").items()}
    owned = {key: by.replace(".*", f".{key}") for keys, by in table.pop("owned").items() for key in keys.split()}
    defaults = {name: entries.pop("DEFAULTS", {}) for name, entries in table.items()}
    rows: dict[str, dict[str, Row]] = {name: {} for name in table}
    for name, keys, entry in ((name, *pair) for name, entries in table.items() for pair in entries.items()):
        here, *values = [entry] if isinstance(entry, str) else entry
        pairs = [text.partition(": ") for text in values]
        effects = {value: texts.get(effect, effect) for names, _, effect in pairs for value in names.split()}
        rows[name] |= {key: Row(key, texts.get(here, here), effects) for key in keys.split()}
    return rows, defaults, owned


def dialects() -> Mapping[str, Mapping[str, Row]]:
    """Rows of each system by their keys."""
    return _table()[0]


def owned_arguments() -> Mapping[str, str]:
    """Arguments of vLLM that ``engines.args`` cannot have: the key that sets each, or ``-`` and why none does."""
    return _table()[2]


def defaults_of(dialect: str) -> Mapping[str, Any]:
    """Defaults of a system that differ from those of a recipe, or from which one of its keys is computed."""
    return _table()[1][dialect]


def find(dialect: str, key: str) -> Row | None:
    """Return the row of a dotted key: the one whose first part is furthest to the left, so that ``critic.optim.lr`` is
    no ``optim.lr`` and nothing of ``ref.*`` is taken for the policy's. Indices count for nothing."""
    parts = [part for part in key.replace("-", "_").split(".") if not part.isdigit()]
    for table in (dialects()[dialect], dialects()[SHARED]):
        found = (table.get(pattern) for pattern in _patterns(parts))
        if row := next(filter(None, found), None):
            return row
    return None


def _patterns(parts: list[str]) -> Iterator[str]:
    for start in range(len(parts)):
        yield ".".join(parts[start:])
        yield from (f"{'.'.join(parts[start:end])}.*" for end in range(len(parts) - 1, start, -1))


def assigned(effect: str, value: Any) -> dict[str, Any]:
    """Return the values that an effect sets, by their keys; empty where it sets none. ``value``: what is copied."""
    found: dict[str, Any] = {}
    for part in effect.split("; ") if effect[:1] not in ("-", "=", "~") else ():
        if copied := _COPIED.fullmatch(part):
            found[copied[1]] = value
        elif " = " in part:
            path, _, text = part.partition(" = ")
            found[path] = value_or_text(text)
    return found


def foreign_answer(key: str, value: Any = NOT_GIVEN) -> str:
    """Return what another system's key is here, for this value where one is given, or why there is none; of a recipe's
    own key, what to write for a value of another system. Empty for what no system has."""
    if (own := key.replace(".advanced.", ".")) in _own_paths():
        return as_written(Recipe, _own_value(own, value)) if isinstance(value, str) else ""
    found = {dialect: row for dialect, table in dialects().items() if (row := find(dialect, key)) and row.key in table}
    closest = max((_parts(row) for row in found.values()), default=0)
    owners: dict[str, dict[str, list[str]]] = {}
    for dialect, row in found.items():
        if _parts(row) == closest:
            effect = row.effect("" if value is NOT_GIVEN else value, key)
            owners.setdefault(effect, {}).setdefault(row.key, []).append(f"{dialect}'s")
    said = (
        _said(" and ".join(f"{' and '.join(whose)} {name}" for name, whose in names.items()), effect)
        for effect, names in owners.items()
    )
    return as_written(Recipe, "; ".join(said))


def _parts(row: Row) -> int:
    return len(row.key.removesuffix(".*").split("."))


def _said(name: str, effect: str) -> str:
    if effect.startswith("-"):
        return f"that is {name}, and there is no such key here: {effect[1:]}"
    if effect.startswith("="):
        return f"that is {name}, which need not be set here: {effect[1:]}"
    here = effect.lstrip("~").replace("; ", " and ")
    return f"that is {name}; here: {here}" if ":" in here or "(" in here else f"that is {name}: {here} here"


@cache
def _own_paths() -> frozenset[str]:
    return frozenset(paths_in_view(Recipe, with_advanced=True))


def _own_value(path: str, value: str) -> str:
    for dialect, table in dialects().items():
        for row in table.values():
            effect = row.values.get(value.lower(), "")
            if path in assigned(effect, value):
                return f"that is a value of {dialect}'s {row.key}: write {effect}"
    return ""
