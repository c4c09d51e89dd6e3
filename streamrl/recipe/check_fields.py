"""Checks every field of a parsed recipe on its own, so that all errors are reported at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from streamrl.recipe.problems import Origin, nearest, problem, shown
from streamrl.recipe.sections import Recipe
from streamrl.rules.foreign_keys import foreign_answer


class CheckedTable(msgspec.Struct):
    """What came out of a check: the good values, the lines about the others, and the paths of those."""

    values: dict[str, Any]
    problems: list[str]
    bad_paths: set[str]


def expected(kind: inspect.Type) -> str:
    """What a value of this type may be, in words: ``an integer > 0``, ``one of "keep", "recompute"``."""
    if isinstance(kind, inspect.Metadata):
        return expected(kind.type)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return ("an integer" if isinstance(kind, inspect.IntType) else "a number") + _range(kind)
    if isinstance(kind, inspect.EnumType):
        return "one of " + ", ".join(shown(member) for member in kind.cls)
    if isinstance(kind, inspect.VarTupleType):
        if isinstance(kind.item_type, inspect.StructType):
            return f"a list of tables with keys out of {', '.join(f.name for f in kind.item_type.fields)}"
        return "a list of strings"
    if isinstance(kind, inspect.UnionType):
        return " or ".join(expected(t) for t in kind.types if not isinstance(t, inspect.NoneType))
    if isinstance(kind, inspect.DictType | inspect.StructType):
        return "a table of keys and values"
    return "true or false" if isinstance(kind, inspect.BoolType) else "a string"


def _nested_struct(kind: inspect.Type) -> type[msgspec.Struct] | None:
    """The struct of a section inside of a section (``adaptive_timeout`` of a reward), optional or not."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((k.cls for k in kinds if isinstance(k, inspect.StructType)), None)


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low = kind.gt if kind.gt is not None else kind.ge
    high = kind.lt if kind.lt is not None else kind.le
    low_sign, high_sign = (">" if kind.gt is not None else ">="), ("<" if kind.lt is not None else "<=")
    bounds = [f"{low_sign} {low}"] if low is not None else []
    bounds += [f"{high_sign} {high}"] if high is not None else []
    return " " + " and ".join(bounds) if bounds else ""


def check_recipe_table(table: Mapping[str, Any], origin: Origin) -> CheckedTable:
    """Check a parsed recipe: unknown sections and keys, missing keys, types and ranges."""
    checked = CheckedTable(values={}, problems=[], bad_paths=set())
    sections = {field.name: field for field in struct_fields(Recipe)}
    for name, value in table.items():
        if name not in sections:
            _refuse(checked, origin, name, _unknown_section(name, value, sections))
            for key in value if isinstance(value, Mapping) else ():
                if answer := foreign_answer(f"{name}.{key}"):
                    _refuse(checked, origin, f"{name}.{key}", f"unknown key: {answer}")
            continue
        _check_section(checked, origin, name, value, sections[name].type)
    for name, field in sections.items():
        if name not in table and field.required:
            wanted = f"[[{name}]]" if isinstance(field.type, inspect.VarTupleType) else f"[{name}]"
            _refuse(checked, origin, name, f"missing: add {wanted} with {_required_keys(field.type)}")
    return checked


@cache
def struct_fields(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    """Fields of a section, with their types as msgspec sees them."""
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    return kind.fields


@cache
def _field_types(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    return get_type_hints(struct, include_extras=True)


def section_struct(kind: inspect.Type) -> type[msgspec.Struct]:
    """The struct of a section, or of the items where the section is a list."""
    item = kind.item_type if isinstance(kind, inspect.VarTupleType) else kind
    assert isinstance(item, inspect.StructType), "the recipe is sections, and lists of sections"
    return item.cls


def _required_keys(kind: inspect.Type) -> str:
    return ", ".join(f'"{field.name}"' for field in struct_fields(section_struct(kind)) if field.required)


def _refuse(checked: CheckedTable, origin: Origin, path: str, text: str) -> None:
    checked.problems.append(problem(origin, path, text))
    checked.bad_paths.add(path)


def _check_section(checked: CheckedTable, origin: Origin, name: str, value: Any, kind: inspect.Type) -> None:
    struct = section_struct(kind)
    if not isinstance(kind, inspect.VarTupleType):
        if isinstance(value, Mapping):
            checked.values[name] = _check_keys(checked, origin, name, value, struct)
        else:
            _refuse(checked, origin, name, f"{shown(value)} is not a section: write [{name}] and its keys below")
        return
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        _refuse(checked, origin, name, f"must be a list of tables: write [[{name}]] with double brackets")
        return
    checked.values[name] = [
        _check_keys(checked, origin, f"{name}.{index}", item, struct) for index, item in enumerate(value)
    ]


def _check_keys(
    checked: CheckedTable, origin: Origin, path: str, table: Mapping[str, Any], struct: type[msgspec.Struct]
) -> dict[str, Any]:
    fields = {field.name: field for field in struct_fields(struct)}
    types = _field_types(struct)
    good: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}.{key}"
        if key not in fields:
            _refuse(checked, origin, where, _unknown_key(path, key, fields))
            continue
        nested = _nested_struct(fields[key].type)
        if nested is not None and isinstance(value, Mapping):
            good[key] = _check_keys(checked, origin, where, value, nested)
            continue
        try:
            good[key] = msgspec.convert(value, types[key])
        except (msgspec.ValidationError, UnicodeError):  # of an override: bytes that are no text
            good.pop(key, None)
            _refuse(checked, origin, where, f"{shown(value)} is not allowed: must be {expected(fields[key].type)}")
            continue
        if isinstance(good[key], float) and not math.isfinite(good[key]):
            _refuse(checked, origin, where, f"{shown(good.pop(key))} is not allowed: must be finite")
    for key, field in fields.items():
        if field.required and key not in table:
            _refuse(checked, origin, f"{path}.{key}", f"missing: must be {expected(field.type)}")
    return good


def _unknown_key(path: str, key: str, fields: Mapping[str, Any]) -> str:
    elsewhere = [f"{section}.{key}" for section in sections_with(key)]
    if not elsewhere and (answer := foreign_answer(f"{path}.{key}")):
        return f"unknown key: {answer}"
    meant = elsewhere[0] if elsewhere else nearest(key, fields)
    hint = f'; did you mean "{meant}"?' if meant else "."
    return f"unknown key{hint} Keys of [{path.partition('.')[0]}]: {', '.join(fields)}"


def _unknown_section(name: str, value: Any, sections: Mapping[str, Any]) -> str:
    if not isinstance(value, Mapping | list) and (answer := foreign_answer(name)):
        return f"unknown key: {answer}"
    close = nearest(name, sections)
    kind = "section" if isinstance(value, Mapping | list) else "key outside a section"
    homes = list(sections_with(name))
    meant = f"{homes[0]}.{name}" if homes and not isinstance(value, Mapping) else close
    hint = f'; did you mean "{meant}"?' if meant else "."
    return f"unknown {kind}{hint} Sections: {', '.join(sections)}"


def sections_with(key: str) -> Iterator[str]:
    """Sections of the recipe that have a key of this name."""
    for field in struct_fields(Recipe):
        if not isinstance(field.type, inspect.VarTupleType) and key in section_struct(field.type).__struct_fields__:
            yield field.name
