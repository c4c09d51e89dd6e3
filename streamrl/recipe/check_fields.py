"""Checks every field of a parsed recipe on its own, so that all errors are reported at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from streamrl.recipe.fields import ADVANCED, Key, bare, keys_of, paths_to
from streamrl.recipe.problems import Origin, did_you_mean, nearest, problem, shown
from streamrl.recipe.sections import Recipe

NUMBERS = {inspect.IntType: ("an integer", "integers"), inspect.FloatType: ("a number", "numbers")}


def expected(kind: inspect.Type) -> str:
    """Describe the values of a type in words: ``an integer > 0``, ``one of "keep", "recompute"``."""
    kind = bare(kind)
    if type(kind) in NUMBERS:
        return NUMBERS[type(kind)][0] + _range(kind)
    if isinstance(kind, inspect.EnumType | inspect.LiteralType):
        return "one of " + ", ".join(map(shown, kind.cls if isinstance(kind, inspect.EnumType) else kind.values))
    if isinstance(kind, inspect.VarTupleType):
        item = bare(kind.item_type)
        if isinstance(item, inspect.StructType):
            return f"a list of tables with keys out of {', '.join(f.name for f in item.fields)}"
        return "a list of " + (NUMBERS[type(item)][1] + _range(item) if type(item) in NUMBERS else "strings")
    if isinstance(kind, inspect.UnionType):
        return " or ".join(expected(t) for t in kind.types if not isinstance(t, inspect.NoneType))
    if isinstance(kind, inspect.DictType | inspect.StructType):
        return "a table of keys and values"
    return "true or false" if isinstance(kind, inspect.BoolType) else "a string"


def _range(kind: Any) -> str:
    low = kind.gt if kind.gt is not None else kind.ge
    high = kind.lt if kind.lt is not None else kind.le
    low_sign, high_sign = (">" if kind.gt is not None else ">="), ("<" if kind.lt is not None else "<=")
    bounds = [f"{low_sign} {low}"] if low is not None else []
    bounds += [f"{high_sign} {high}"] if high is not None else []
    return " " + " and ".join(bounds) if bounds else ""


class CheckedTable:
    """Checks a parsed recipe: unknown sections and keys, missing keys, types and ranges.

    ``values``: the good ones; ``problems``: a line about each of the others; ``bad_paths``: the paths of those.
    ``foreign``: what a key of another system is called here; empty where it is not known."""

    def __init__(self, table: Mapping[str, Any], origin: Origin, foreign: Callable[[str], str]) -> None:
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.bad_paths: set[str] = set()
        self._origin = origin
        self._foreign = foreign
        self._listed: set[str] = set()
        sections = keys_of(Recipe)
        for name, value in table.items():
            if name in sections:
                self._check_section(sections[name], value)
                continue
            self._refuse(name, self._unknown_section(name, value))
            for key in value if isinstance(value, Mapping) else ():
                if answer := foreign(f"{name}.{key}"):
                    self._refuse(f"{name}.{key}", f"unknown key: {answer}")
        for name, section in sections.items():
            if name not in table and section.required:
                wanted = f"[[{name}]]" if section.item else f"[{name}]"
                keys = ", ".join(f'"{key.name}"' for key in keys_of(section.section).values() if key.required)
                self._refuse(name, f"missing: add {wanted} with {keys}")

    def _refuse(self, written: str, text: str, path: str = "") -> None:
        """``path``: of the field, where it is written elsewhere."""
        self.problems.append(problem(self._origin, written, text))
        self.bad_paths.add(path or written)

    def _check_section(self, section: Key, value: Any) -> None:
        name, struct = section.name, section.section
        if section.item is None:
            if isinstance(value, Mapping):
                self.values[name] = self._check_keys(name, value, struct)
            else:
                self._refuse(name, f"{shown(value)} is not a section: write [{name}] and its keys below")
        elif not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            self._refuse(name, f"must be a list of tables: write [[{name}]] with double brackets")
        else:
            self.values[name] = [self._check_keys(f"{name}.{at}", item, struct) for at, item in enumerate(value)]

    def _check_keys(self, path: str, table: Mapping[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
        keys = keys_of(struct)
        good: dict[str, Any] = {}
        for name, value, below in self._written_keys(path, table):
            where, written = f"{path}.{name}", f"{path}.{ADVANCED}.{name}" if below else f"{path}.{name}"
            key = keys.get(name)
            if key is None:
                self._refuse(written, self._unknown_key(path, name, keys), where)
            elif key.advanced != below:
                home = f"{path}.{ADVANCED}" if key.advanced else path
                self._refuse(written, f"belongs into [{_without_index(home)}]: write it there", where)
            elif key.nested is not None and isinstance(value, Mapping):
                good[name] = self._check_keys(written, value, key.nested)
            else:
                self._check_value(key, value, written, where, good)
        for name, key in keys.items():
            if key.required and name not in table:
                self._refuse(f"{path}.{name}", f"missing: must be {expected(key.kind)}")
        return good

    def _written_keys(self, path: str, table: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """(name, value, whether it is below ``advanced``)."""
        pairs = [(name, value, False) for name, value in table.items() if name != ADVANCED]
        below = table.get(ADVANCED, {})
        if not isinstance(below, Mapping):
            self._refuse(
                f"{path}.{ADVANCED}", f"{shown(below)} is not a table: write [{_without_index(path)}.{ADVANCED}]"
            )
            return pairs
        return pairs + [(name, value, True) for name, value in below.items()]

    def _check_value(self, key: Key, value: Any, written: str, path: str, good: dict[str, Any]) -> None:
        try:
            made = msgspec.convert(value, key.annotation)
        except (msgspec.ValidationError, UnicodeError):  # of an override: bytes that are no text
            self._refuse(written, f"{shown(value)} is not allowed: must be {expected(key.kind)}", path)
            return
        if isinstance(made, float) and not math.isfinite(made):
            self._refuse(written, f"{shown(made)} is not allowed: must be finite", path)
        else:
            good[key.name] = made

    def _unknown_key(self, path: str, name: str, keys: Mapping[str, Key]) -> str:
        elsewhere = paths_to(Recipe, name)
        if not elsewhere and (answer := self._foreign(f"{path}.{name}")):
            return f"unknown key: {answer}"
        meant = elsewhere or list(filter(None, [nearest(name, keys)]))
        hint = "; did you mean " + " or ".join(f'"{one}"' for one in meant) + "?" if meant else "."
        section = path.partition(".")[0]
        if section in self._listed:
            return f"unknown key{hint.rstrip('.')}"
        self._listed.add(section)
        advanced = [key.name for key in keys.values() if key.advanced]
        more = f"; below [{_without_index(path)}.{ADVANCED}]: {', '.join(advanced)}" if advanced else ""
        names = ", ".join(key.name for key in keys.values() if not key.advanced)
        return f"unknown key{hint} Keys of [{_without_index(path)}]: {names or 'none'}{more}"

    def _unknown_section(self, name: str, value: Any) -> str:
        is_table = isinstance(value, Mapping | list)
        if not is_table and (answer := self._foreign(name)):
            return f"unknown key: {answer}"
        sections = keys_of(Recipe)
        homes = [] if isinstance(value, Mapping) else paths_to(Recipe, name)
        hint = f'; did you mean "{homes[0]}"?' if homes else did_you_mean(name, sections, ".")
        return f"unknown {'section' if is_table else 'key outside a section'}{hint} Sections: {', '.join(sections)}"


def _without_index(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdigit())
