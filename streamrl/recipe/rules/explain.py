"""Explanations of the keys of a recipe: one at a time (``streamrl explain``), or all of them (docs/recipe.md)."""

from __future__ import annotations

import inspect as python_inspect
import re
from collections.abc import Iterator

import msgspec
from msgspec import inspect

from streamrl.base.errors import RecipeError
from streamrl.recipe.check_fields import expected
from streamrl.recipe.dialects.foreign_keys import foreign_answer
from streamrl.recipe.fields import ADVANCED, Key, bare, keys_of, paths_in_view, paths_to, written_path
from streamrl.recipe.objectives.catalog import METHODS, AlgorithmName
from streamrl.recipe.problems import did_you_mean, shown
from streamrl.recipe.rules.systems import explained_systems
from streamrl.recipe.scheduling import System
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import value_or_text


def explain(path: str) -> list[str]:
    """Lines about a section, about a key (``section.key``, or only ``key``: of every section that has one), or about
    all sections for an empty one. Raises ``RecipeError`` for what nobody has."""
    sections = keys_of(Recipe)
    if not path:
        return [f"[{name}]  {_doc(section.section)[0]}" for name, section in sections.items()]
    path, equals, value = (part.strip() for part in path.partition("="))
    answer = foreign_answer(path, *([value_or_text(value)] if equals else []))
    if lines := _explained(path):
        return [f"{path} = {value}: {answer}", "", *lines] if answer and equals else lines
    if "." not in path and (homes := paths_to(Recipe, path)):
        return [line for home in homes for line in (*_explained(home), "")][:-1]
    if answer:
        here = re.search(r": ([a-z_]+\.(?:N\.)?(?:advanced\.)?[a-z_0-9]+).* here$|; here: ([a-z_.0-9]+)", answer)
        written = f"{path}{equals}{value}: {answer}"
        return [written, *(["", *_explained(here[1] or here[2])] if here else [])]
    section, _, name = path.partition(".")
    known: list[str] = list(sections)
    if section in sections:
        known = [one.partition(".")[2] for one in paths_in_view(Recipe, with_advanced=True) if one.startswith(section)]
    hint = did_you_mean(name if section in sections else section, known, ".")
    what, names = ("key", f"Keys of [{section}]") if section in sections else ("section", "Sections")
    raise RecipeError(f"{path}: unknown {what}{hint} {names}: {', '.join(known)}")


def _explained(path: str) -> list[str]:
    """Lines on a section, on the advanced keys of one, or on a key; empty where the path leads nowhere."""
    parts = [part for part in path.split(".") if not part.isdigit() and part != "N"]
    keys = keys_of(Recipe)
    key = None
    for part in parts:
        if part == ADVANCED and part is parts[-1] and key is not None:
            return [f"[{path}]", *(line for one in keys.values() if one.advanced for line in _key_lines(one))]
        if part == ADVANCED:
            continue
        if part not in keys:
            return []
        key = keys[part]
        keys = keys_of(key.struct) if key.struct is not None else {}
    if key is None:
        return []
    if len(parts) == 1:
        return _section_lines(key)
    written = written_path(Recipe, ".".join(part for part in parts if part != ADVANCED))
    lines = [f"{written}: {_allowed(key)}", *([f"  {key.text}"] if key.text else []), *_choices(key)]
    return lines + [f"  {line}" for one in keys.values() for line in _key_lines(one)]


def _section_lines(section: Key) -> list[str]:
    keys = keys_of(section.section).values()
    lines = [f"[{section.name}]", *(f"  {line}".rstrip() for line in _doc(section.section)), ""]
    lines += [line for key in keys if not key.advanced for line in _key_lines(key)]
    if hidden := [key.name for key in keys if key.advanced]:
        lines += ["", f"[{section.name}.{ADVANCED}]  {', '.join(hidden)}"]
    return lines


def _key_lines(key: Key) -> list[str]:
    return [f"{key.name}: {_allowed(key)}", *([f"  {key.text}"] if key.text else [])]


def _allowed(key: Key) -> str:
    return f"{expected(key.kind)}; {_default(key)}"


def _choices(key: Key) -> Iterator[str]:
    """Lines on the values of an enumeration."""
    for cls in _enums(key.kind):
        values = algorithm_lines() if cls is AlgorithmName else explained_systems() if cls is System else []
        yield from (f"  {line}".rstrip() for line in (*_doc(cls), *values))


def algorithm_lines() -> list[str]:
    """List the fields that each algorithm sets, one line each."""
    lines = []
    for method in METHODS.values():
        values = msgspec.structs.asdict(method)
        values |= {"surrogate": method.surrogate.name, "advantages": method.advantages.name}
        fields = ", ".join(
            f"{name} = {shown(value)}"
            for name, value in values.items()
            if name != "name" and not (name.startswith("clip_") and not method.surrogate.clips)
        )
        lines.append(f"{method.name}: {fields}")
    return lines


def _enums(kind: inspect.Type) -> Iterator[type]:
    kind = bare(kind)
    if isinstance(kind, inspect.EnumType):
        yield kind.cls
    for member in kind.types if isinstance(kind, inspect.UnionType) else ():
        yield from _enums(member)


def _doc(cls: type) -> list[str]:
    return (python_inspect.getdoc(cls) or "").replace("``", '"').splitlines()


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "default: not set" if key.default is None else f"default {shown(key.default)}"


REFERENCE_HEAD = f"""\
# The recipe: all keys

Made by `streamrl explain --markdown`; `streamrl explain KEY` prints one of them. A key below
`[SECTION.{ADVANCED}]` is one that few runs need: the dry run shows it only where it is set. In Python
(`streamrl.Recipe`) it is a field of its section like the others."""


def reference() -> str:
    """All keys as a Markdown page: type, default and text of each."""
    blocks = [f"{REFERENCE_HEAD}\n"]
    for name, section in keys_of(Recipe).items():
        head = f"[[{name}]]" if section.item else f"[{name}]"
        blocks.append(f"## `{head}`\n\n{_markdown(section.section)}\n\n{_table(section.section, name)}\n")
    return "\n".join(blocks)


def _table(struct: msgspec.StructMeta, prefix: str) -> str:
    rows = ["| key | may be | default | |", "|---|---|---|---|"]

    def add(struct: msgspec.StructMeta, before: str) -> None:
        for key in sorted(keys_of(struct).values(), key=lambda key: key.advanced):
            default = "required" if key.required else "" if key.default is None else f"`{shown(key.default)}`"
            name = f"{before}{ADVANCED}.{key.name}" if key.advanced else f"{before}{key.name}"
            rows.append(f"| `{name}` | {expected(key.kind)} | {default} | {_cell(key)} |".replace("|  |", "| |"))
            if key.struct is not None:
                add(key.struct, f"{name}.")

    add(struct, "")
    return "\n".join(rows)


def _cell(key: Key) -> str:
    texts = [key.text, *(_markdown(cls).replace("\n", " ") for cls in _enums(key.kind))]
    return ". ".join(text.rstrip(".") for text in texts if text).replace("|", "\\|")


def _markdown(cls: type) -> str:
    return (python_inspect.getdoc(cls) or "").replace("``", "`")
