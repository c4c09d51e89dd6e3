"""Checks each field of a parsed recipe by its own type and range, so that all errors are reported at once.
``rules.load_recipe`` calls it for every recipe, and the commands that translate recipes of other systems; ``rules``
checks the relations between fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, ValidationError, convert, inspect

from streamrl.base.types import JsonMapping, JsonObject
from streamrl.recipe.field_types import ADVANCED, Key, bare, keys_of, paths_to, without_index
from streamrl.recipe.problems import Origin, did_you_mean, nearest, problem, short_toml
from streamrl.recipe.sections import Recipe

NUMBERS = {inspect.IntType: ("an integer", "integers"), inspect.FloatType: ("a number", "numbers")}


def expected(kind: inspect.Type) -> str:
    """Describe the allowed values of a type in words: ``an integer > 0``, ``one of "keep", "recompute"``."""
    kind = bare(kind)
    if type(kind) in NUMBERS:
        return NUMBERS[type(kind)][0] + _range(kind)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(expected(member) for member in kind.types if not isinstance(member, inspect.NoneType))
    if names := choices(kind):
        return "one of " + ", ".join(map(short_toml, names))
    if isinstance(kind, inspect.VarTupleType):
        item = bare(kind.item_type)
        if isinstance(item, inspect.StructType):
            return f"a list of tables with keys out of {', '.join(field.name for field in item.fields)}"
        if type(item) in NUMBERS:
            return f"a list of {NUMBERS[type(item)][1]}{_range(item)}"
        return "a list of strings"
    if isinstance(kind, inspect.DictType | inspect.StructType):
        return "a table of keys and values"
    return "true or false" if isinstance(kind, inspect.BoolType) else "a string"


def choices(kind: inspect.Type) -> list[str]:
    """Return the values of an enumeration, or of a union with one; empty for another type."""
    kind = bare(kind)
    if isinstance(kind, inspect.UnionType):
        return [name for member in kind.types for name in choices(member)]
    return list(kind.cls) if isinstance(kind, inspect.EnumType) else list(getattr(kind, "values", ()))


def _range(kind: Any) -> str:
    """The bounds of a number, as `` > 0 and <= 1``; empty: it has none."""
    lower = {">": kind.gt, ">=": kind.ge}
    upper = {"<": kind.lt, "<=": kind.le}
    bounds = [f" {sign} {bound}" for sign, bound in (lower | upper).items() if bound is not None]
    return " and".join(bounds)


class CheckedTable:
    """Checks a parsed recipe: unknown sections and keys, missing keys, types and ranges.

    ``table``: tables of the recipe by section;
    ``origin``: source of the values, for the places in problems;
    ``foreign``: function that explains a key (or a value) of another system, given the path and the value; it returns
    an empty text for an unknown one;
    ``values``: valid values by section and key;
    ``problems``: lines, one about each problem;
    ``bad_paths``: paths of the fields with a problem."""

    def __init__(self, table: JsonMapping, origin: Origin, foreign: Callable[[str, Any], str]) -> None:
        self.values: JsonObject = {}
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
            answers = {}
            if not _is_own(name, value):
                answers = {path: foreign(path, leaf) for path, leaf in leaves(name, value)}
            for path, answer in answers.items():
                if answer:
                    self._refuse(path, f"unknown key: {answer}")
            if not any(answers.values()):
                self._refuse(name, self._unknown_section(name, value))
        for name, section in sections.items():
            if name not in table and section.required:
                head = f"[[{name}]]" if section.item else f"[{name}]"
                keys = ", ".join(f'"{key.name}"' for key in keys_of(section.section).values() if key.required)
                self._refuse(name, f"missing: add {head} with {keys}")

    def _refuse(self, written: str, text: str, path: str = "") -> None:
        """Add a problem. ``written``: path as it is written in the recipe; ``path``: path of the field, where it
        differs."""
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
                self._refuse(name, f"{short_toml(value)} is not a section: {text}")
        elif _is_list_of_tables(value):
            self.values[name] = self._check_items(name, value, struct)
        else:
            self._refuse(name, f"must be a list of tables: write [[{name}]] with double brackets")

    def _check_items(self, path: str, tables: Sequence[JsonMapping], struct: type[Struct]) -> list[JsonObject]:
        """Check the keys of each table of a list; return the valid values of each."""
        return [self._check_keys(f"{path}.{index}", table, struct) for index, table in enumerate(tables)]

    def _check_keys(self, path: str, table: JsonMapping, struct: type[Struct]) -> JsonObject:
        """Check the keys of a section or of a table in it; return the valid values."""
        keys = keys_of(struct)
        valid: JsonObject = {}
        for name, value, is_below_advanced in self._written_keys(path, table):
            field = f"{path}.{name}"
            written = f"{path}.{ADVANCED}.{name}" if is_below_advanced else field
            key = keys.get(name)
            if key is None:
                self._refuse(written, self._unknown_key(path, name, keys, value), field)
            elif key.advanced != is_below_advanced:
                home = f"{path}.{ADVANCED}" if key.advanced else path
                self._refuse(written, f"belongs into [{without_index(home)}]: write it there", field)
            elif key.nested is not None and isinstance(value, Mapping):
                valid[name] = self._check_keys(written, value, key.nested)
            elif key.item is not None and _is_list_of_tables(value):
                problems = len(self.problems)
                items = self._check_items(written, value, key.item)
                if len(self.problems) == problems:
                    valid[name] = items
                else:
                    self.bad_paths.add(field)
            elif key.named is not None and isinstance(value, Mapping):
                self._check_named(key, value, written, field, valid)
            else:
                self._check_value(key, value, written, field, valid)
        for name, key in keys.items():
            if key.required and name not in table:
                self._refuse(f"{path}.{name}", f"missing: must be {expected(key.kind)}")
        return valid

    def _check_named(self, key: Key, tables: JsonMapping, written: str, path: str, valid: JsonObject) -> None:
        """Check each of the tables that users named, and add them to ``valid`` where all are. ``written``, ``path``:
        paths for ``_refuse``."""
        assert key.named is not None
        problems = len(self.problems)
        for name, table in tables.items():
            if isinstance(table, Mapping):
                self._check_keys(f"{written}.{name}", table, key.named)
        if len(self.problems) > problems:
            self.bad_paths.add(path)
        else:
            self._check_value(key, tables, written, path, valid)

    def _written_keys(self, path: str, table: JsonMapping) -> list[tuple[str, Any, bool]]:
        """Return (name, value, whether it is below ``advanced``) of each key."""
        pairs = [(name, value, False) for name, value in table.items() if name != ADVANCED]
        below = table.get(ADVANCED, {})
        if not isinstance(below, Mapping):
            self._refuse(
                f"{path}.{ADVANCED}", f"{short_toml(below)} is not a table: write [{without_index(path)}.{ADVANCED}]"
            )
            return pairs
        return pairs + [(name, value, True) for name, value in below.items()]

    def _check_value(self, key: Key, value: Any, written: str, path: str, valid: JsonObject) -> None:
        """Check the type and range of a value and add it to ``valid``. ``written``, ``path``: paths for ``_refuse``."""
        item: Any = getattr(bare(key.kind), "item_type", None)
        if isinstance(value, str) and written in self._origin.overridden and isinstance(bare(item), inspect.StrType):
            value = [part.strip() for part in value.split(",")]
        try:
            converted = convert(value, key.annotation)
        except (ValidationError, UnicodeError) as error:  # UnicodeError: an override with bytes that are no text
            answer = self._foreign(without_index(path), value)
            text = f"{short_toml(value)} is not allowed: must be {expected(key.kind)}"
            if isinstance(key.kind, inspect.BoolType) and key.text:
                text += f" ({key.text})"
            if isinstance(value, str) and not answer:
                text += did_you_mean(value, choices(key.kind))
            if isinstance(value, Mapping) and "table" in expected(key.kind):
                text += f" ({str(error).replace('`', '')})"
            self._refuse(written, f"{text}; {answer}" if answer else text, path)
            return
        if isinstance(converted, float) and not math.isfinite(converted):
            self._refuse(written, f"{short_toml(converted)} is not allowed: must be finite", path)
        else:
            valid[key.name] = converted

    def _unknown_key(self, path: str, name: str, keys: Mapping[str, Key], value: Any) -> str:
        """Return the problem with an unknown key, with the nearest key or the key of another system that it is."""
        same_name = paths_to(Recipe, name)
        answer = self._foreign(f"{path}.{name}", value)
        # Where the recipe has a key of this name, an answer for the name alone is no better than this key.
        if answer and not (same_name and answer == self._foreign(name, value)):
            return f"unknown key: {answer}"
        meant = same_name or list(filter(None, [nearest(name, keys)]))
        hint = "."
        if meant:
            hint = "; did you mean " + " or ".join(f'"{candidate}"' for candidate in meant) + "?"
        section = path.partition(".")[0]
        if section in self._listed:
            return f"unknown key{hint.rstrip('.')}"
        self._listed.add(section)
        advanced = [key.name for key in keys.values() if key.advanced]
        names = ", ".join(key.name for key in keys.values() if not key.advanced)
        text = f"unknown key{hint} Keys of [{without_index(path)}]: {names or 'none'}"
        if advanced:
            text += f"; below [{without_index(path)}.{ADVANCED}]: {', '.join(advanced)}"
        return text

    def _unknown_section(self, name: str, value: Any) -> str:
        """Return the problem with an unknown section, or with a key that stands outside of a section."""
        is_table = isinstance(value, Mapping | list)
        sections = keys_of(Recipe)
        hint = did_you_mean(name, sections, ".")
        homes = paths_to(Recipe, name)
        if homes and not isinstance(value, Mapping):
            hint = f'; did you mean "{homes[0]}"?'
        return f"unknown {'section' if is_table else 'key outside a section'}{hint} Sections: {', '.join(sections)}"


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _is_own(name: str, value: Any) -> bool:
    """Return whether ``name`` is a key of a recipe, or a misspelt section with keys of this section."""
    meant = nearest(name, keys_of(Recipe))
    if not isinstance(value, Mapping) or meant is None:
        return bool(paths_to(Recipe, name)) and not isinstance(value, Mapping)
    return all(key in keys_of(keys_of(Recipe)[meant].section) for key in value)


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every value in tables and lists of tables, to any depth. An empty table is a value,
    too."""
    items: Mapping[Any, Any] = {}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        items = dict(enumerate(value))
    elif isinstance(value, Mapping):
        items = value
    for name, item in items.items():
        yield from leaves(f"{path}.{name}" if path else str(name), item)
    if not items:
        yield path, value
