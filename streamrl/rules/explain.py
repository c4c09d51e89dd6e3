"""``streamrl explain rollout.group_size``: what a key means, its default and what it may be."""

from __future__ import annotations

import inspect as python_inspect
import re
from collections.abc import Iterator

import msgspec
from msgspec import inspect

from streamrl.base.errors import RecipeError
from streamrl.recipe.check_fields import expected, section_struct, sections_with, struct_fields
from streamrl.recipe.objective import Algorithm
from streamrl.recipe.problems import nearest, shown
from streamrl.recipe.sections import Recipe
from streamrl.rules.foreign_keys import foreign_answer
from streamrl.rules.objective_text import algorithm_lines


def explain(key: str) -> list[str]:
    """Lines about a section, about a key (``section.key``, or only ``key``), or about all sections for an empty one."""
    sections = {field.name: section_struct(field.type) for field in struct_fields(Recipe)}
    if not key:
        return [f"[{name}]  {_doc(struct)[0]}" for name, struct in sections.items()]
    section, _, name = key.partition(".")
    if section not in sections and not name:
        homes = list(sections_with(section))
        if homes:
            section, name = homes[0], section
    known = section in sections and (not name or name in {field.name for field in struct_fields(sections[section])})
    if not known and (answer := foreign_answer(key)):
        here = re.match(r"that is ([a-z_]+\.[a-z_0-9]+)", answer)
        return [f"{key}: {answer}", *(["", *explain(here[1])] if here else [])]
    if section not in sections:
        close = nearest(section, sections)
        hint = f'; did you mean "{close}"?' if close else "."
        raise RecipeError([f"{key}: unknown section{hint} Sections: {', '.join(sections)}"])
    return _explain_section(section, sections[section], name.rpartition(".")[2])


def _explain_section(section: str, struct: type[msgspec.Struct], name: str) -> list[str]:
    fields = struct_fields(struct)
    if name and name not in {field.name for field in fields}:
        names = [field.name for field in fields]
        close = nearest(name, names)
        hint = f'; did you mean "{close}"?' if close else "."
        raise RecipeError([f"{section}.{name}: unknown key{hint} Keys: {', '.join(names)}"])
    lines = [f"[{section}]", *(f"  {line}".rstrip() for line in _doc(struct)), ""]
    for field in fields:
        if not name or field.name == name:
            lines.append(f"{field.name}: {expected(field.type)}; {_default(field)}")
            for cls in _enums(field.type):
                lines += [
                    f"  {line}".rstrip() for line in (*_doc(cls), *(algorithm_lines() if cls is Algorithm else ()))
                ]
    return lines


def _enums(kind: inspect.Type) -> Iterator[type]:
    if isinstance(kind, inspect.EnumType):
        yield kind.cls
    if isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _enums(member)


def _doc(cls: type) -> list[str]:
    return (python_inspect.getdoc(cls) or "").replace("``", '"').splitlines()


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    return "default: not set" if field.default is None else f"default {shown(field.default)}"
