"""Checks every field of a parsed recipe on its own, so that all errors are reported at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
    if isinstance(kind, inspect.UnionType):
        return " or ".join(expected(t) for t in kind.types if not isinstance(t, inspect.NoneType))
    if names := choices(kind):
        return "one of " + ", ".join(map(shown, names))
    if isinstance(kind, inspect.VarTupleType):
        item = bare(kind.item_type)
        if isinstance(item, inspect.StructType):
            return f"a list of tables with keys out of {', '.join(f.name for f in item.fields)}"
        return "a list of " + (NUMBERS[type(item)][1] + _range(item) if type(item) in NUMBERS else "strings")
    if isinstance(kind, inspect.DictType | inspect.StructType):
        return "a table of keys and values"
    return "true or false" if isinstance(kind, inspect.BoolType) else "a string"


def choices(kind: inspect.Type) -> list[str]:
    """Return the values of an enumeration."""
    kind = bare(kind)
    if isinstance(kind, inspect.UnionType):
        return [name for member in kind.types for name in choices(member)]
    return list(kind.cls) if isinstance(kind, inspect.EnumType) else list(getattr(kind, "values", ()))


def _range(kind: Any) -> str:
    low = kind.gt if kind.gt is not None else kind.ge
    high = kind.lt if kind.lt is not None else kind.le
    low_sign = ">" if kind.gt is not None else ">="
    high_sign = "<" if kind.lt is not None else "<="
    bounds = [f"{low_sign} {low}"] if low is not None else []
    bounds += [f"{high_sign} {high}"] if high is not None else []
    return " " + " and ".join(bounds) if bounds else ""


class CheckedTable:
    """Checks a parsed recipe: unknown sections and keys, missing keys, types and ranges.

    ``values``: the good ones; ``problems``: a line about each of the others; ``bad_paths``: the paths of those.
    ``foreign``: what a key of another system is here with its value, or what a value of another system is for a key of
    a recipe; empty where they are not known."""

    def __init__(self, table: Mapping[str, Any], origin: Origin, foreign: Callable[[str, Any], str]) -> None:
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
            known = {} if _is_own(name, value) else {path: foreign(path, one) for path, one in leaves(name, value)}
            for path, answer in known.items():
                if answer:
                    self._refuse(path, f"unknown key: {answer}")
            if not any(known.values()):
                self._refuse(name, self._unknown_section(name, value))
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
        name = section.name
        struct = section.section
        if section.item is None:
            if isinstance(value, Mapping):
                self.values[name] = self._check_keys(name, value, struct)
            else:
                first = next(iter(keys_of(struct)))
                text = f"write [{name}] and its keys below, such as {first}, or --set {name}.{first}=VALUE"
                self._refuse(name, f"{shown(value)} is not a section: {text}")
        elif not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            self._refuse(name, f"must be a list of tables: write [[{name}]] with double brackets")
        else:
            self.values[name] = [self._check_keys(f"{name}.{at}", item, struct) for at, item in enumerate(value)]

    def _check_keys(self, path: str, table: Mapping[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
        keys = keys_of(struct)
        good: dict[str, Any] = {}
        for name, value, below in self._written_keys(path, table):
            where = f"{path}.{name}"
            written = f"{path}.{ADVANCED}.{name}" if below else f"{path}.{name}"
            key = keys.get(name)
            if key is None:
                self._refuse(written, self._unknown_key(path, name, keys, value), where)
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
        item: Any = getattr(bare(key.kind), "item_type", None)
        if isinstance(value, str) and written in self._origin.overridden and isinstance(bare(item), inspect.StrType):
            value = [part.strip() for part in value.split(",")]
        try:
            made = msgspec.convert(value, key.annotation)
        except (msgspec.ValidationError, UnicodeError) as error:  # of an override: bytes that are no text
            answer = self._foreign(_without_index(path), value)
            hint = did_you_mean(value, choices(key.kind)) if isinstance(value, str) and not answer else ""
            inside = (
                f" ({str(error).replace('`', '')})"
                if isinstance(value, Mapping) and "table" in expected(key.kind)
                else ""
            )
            text = f"{shown(value)} is not allowed: must be {expected(key.kind)}{hint}{inside}"
            self._refuse(written, f"{text}; {answer}" if answer else text, path)
            return
        if isinstance(made, float) and not math.isfinite(made):
            self._refuse(written, f"{shown(made)} is not allowed: must be finite", path)
        else:
            good[key.name] = made

    def _unknown_key(self, path: str, name: str, keys: Mapping[str, Key], value: Any) -> str:
        elsewhere = paths_to(Recipe, name)
        answer = self._foreign(f"{path}.{name}", value)
        if answer and not (elsewhere and answer == self._foreign(name, value)):  # it is the section's that tells
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
        sections = keys_of(Recipe)
        homes = [] if isinstance(value, Mapping) else paths_to(Recipe, name)
        hint = f'; did you mean "{homes[0]}"?' if homes else did_you_mean(name, sections, ".")
        return f"unknown {'section' if is_table else 'key outside a section'}{hint} Sections: {', '.join(sections)}"


def _is_own(name: str, value: Any) -> bool:
    """Return whether ``name`` is a key of a recipe, or a section misspelt, whose keys are below."""
    meant = nearest(name, keys_of(Recipe))
    if not isinstance(value, Mapping) or meant is None:
        return bool(paths_to(Recipe, name)) and not isinstance(value, Mapping)
    return all(key in keys_of(keys_of(Recipe)[meant].section) for key in value)


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Values in tables and in lists of tables by their dotted paths, and what is neither; empty tables, too."""
    tables = isinstance(value, list) and value and isinstance(value[0], Mapping)
    items = dict(enumerate(value)) if tables else value if isinstance(value, Mapping) else {}
    for name, item in items.items():
        yield from leaves(f"{path}.{name}" if path else str(name), item)
    if not items:
        yield path, value


def _without_index(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdigit())
