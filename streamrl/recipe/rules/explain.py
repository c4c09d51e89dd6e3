"""Explanations of the keys of a recipe, from the texts and docstrings of the sections: of one key, or of all
(docs/recipe.md). Called by the command ``streamrl explain``."""

from __future__ import annotations

import inspect as python_inspect
import re
from collections.abc import Iterator

import msgspec
from msgspec import inspect
from msgspec.structs import asdict

from streamrl.base.errors import RecipeError
from streamrl.recipe.check_fields import expected
from streamrl.recipe.dialects.foreign_keys import foreign_answer
from streamrl.recipe.field_types import ADVANCED, Key, bare, keys_of, paths_in_view, paths_to, written_path
from streamrl.recipe.objectives.catalog import METHODS, AlgorithmName
from streamrl.recipe.problems import did_you_mean, short_toml
from streamrl.recipe.rules.systems import explained_systems
from streamrl.recipe.scheduling import System
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import value_or_text


def explain(path: str) -> list[str]:
    """Return the lines about a section, about ``section.key``, about all keys of one name, about a key of another
    system, or, for an empty path, about all sections. ``KEY=VALUE`` explains a value of another system, too. Raises
    ``RecipeError`` for an unknown name."""
    sections = keys_of(Recipe)
    if not path:
        return [f"[{name}]  {_doc(section.section)[0]}" for name, section in sections.items()]
    path, equals, value = (part.strip() for part in path.partition("="))
    answer = foreign_answer(path, value_or_text(value)) if equals else foreign_answer(path)
    lines = _explained(path)
    if lines:
        return [f"{path} = {value}: {answer}", "", *lines] if answer and equals else lines
    homes = paths_to(Recipe, path)
    if homes and "." not in path:
        return [line for home in homes for line in (*_explained(home), "")][:-1]
    if answer:
        lines = [f"{path}{equals}{value}: {answer}"]
        recipe_key = re.search(r": ([a-z_]+\.(?:N\.)?(?:advanced\.)?[a-z_0-9]+).* here$|; here: ([a-z_.0-9]+)", answer)
        if recipe_key:
            lines += ["", *_explained(recipe_key[1] or recipe_key[2])]
        return lines
    section, _, name = path.partition(".")
    if section not in sections:
        hint = did_you_mean(section, sections, ".")
        raise RecipeError(f"{path}: unknown section{hint} Sections: {', '.join(sections)}")
    paths = paths_in_view(Recipe, with_advanced=True)
    keys = [key_path.partition(".")[2] for key_path in paths if key_path.startswith(section)]
    hint = did_you_mean(name, keys, ".")
    raise RecipeError(f"{path}: unknown key{hint} Keys of [{section}]: {', '.join(keys)}")


def _explained(path: str) -> list[str]:
    """Lines about a section, about its advanced keys, or about a key; empty: there is no such path."""
    parts = [part for part in path.split(".") if not part.isdigit() and part != "N"]
    keys = keys_of(Recipe)
    key = None
    for part in parts:
        if part == ADVANCED and part is parts[-1] and key is not None:
            advanced = [below for below in keys.values() if below.advanced]
            return [f"[{path}]", *(line for below in advanced for line in _key_lines(below))]
        if part == ADVANCED or (part not in keys and key is not None and key.named):
            continue  # a name of the user's
        if part not in keys:
            return []
        key = keys[part]
        keys = {}
        if (struct := key.inner[0]) is not None:
            keys = keys_of(struct)
    if key is None:
        return []
    if len(parts) == 1:
        return _section_lines(key)
    written = written_path(Recipe, ".".join(part for part in parts if part != ADVANCED))
    lines = [f"{written}: {_allowed(key)}", *_text_lines(key), *_choices(key)]
    return lines + [f"  {line}" for below in keys.values() for line in _key_lines(below)]


def _section_lines(section: Key) -> list[str]:
    """Lines about a section and its keys, with the names of the advanced ones."""
    keys = keys_of(section.section).values()
    lines = [f"[{section.name}]", *(f"  {line}".rstrip() for line in _doc(section.section)), ""]
    lines += [line for key in keys if not key.advanced for line in _key_lines(key)]
    if hidden := [key.name for key in keys if key.advanced]:
        lines += ["", f"[{section.name}.{ADVANCED}]  {', '.join(hidden)}"]
    return lines


def _key_lines(key: Key) -> list[str]:
    return [f"{key.name}: {_allowed(key)}", *_text_lines(key)]


def _text_lines(key: Key) -> list[str]:
    """The line with the text of a key; empty: it has none."""
    if not key.text:
        return []
    return [f"  {key.text}"]


def _allowed(key: Key) -> str:
    return f"{expected(key.kind)}; {_default(key)}"


def _choices(key: Key) -> Iterator[str]:
    """Yield the lines about the values of an enumeration."""
    for cls in _enums(key.kind):
        lines = _doc(cls)
        if cls is AlgorithmName:
            lines += algorithm_lines()
        elif cls is System:
            lines += explained_systems()
        yield from (f"  {line}".rstrip() for line in lines)


def algorithm_lines() -> list[str]:
    """Return the fields that each algorithm sets, one line for each algorithm."""
    lines = []
    for method in METHODS.values():
        values = asdict(method)
        values |= {"surrogate": method.surrogate.name, "advantages": method.advantages.name}
        fields = ", ".join(
            f"{name} = {short_toml(value)}"
            for name, value in values.items()
            if name != "name" and not (name.startswith("clip_") and not method.surrogate.clips)
        )
        lines.append(f"{method.name}: {fields}")
    return lines


def _enums(kind: inspect.Type) -> Iterator[type]:
    """Yield the enumerations in a type."""
    kind = bare(kind)
    if isinstance(kind, inspect.EnumType):
        yield kind.cls
    if isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _enums(member)


def _doc(cls: type) -> list[str]:
    return (python_inspect.getdoc(cls) or "").replace("``", '"').splitlines()


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return "default: not set" if key.default is None else f"default {short_toml(key.default)}"


REFERENCE_HEAD = f"""\
# The recipe: all keys

Made by `streamrl explain --markdown`; `streamrl explain KEY` prints one of them. A key below
`[SECTION.{ADVANCED}]` is one that few runs need: the dry run shows it only where it is set. In Python
(`streamrl.Recipe`) it is a field of its section like the others."""


def reference() -> str:
    """Return docs/recipe.md, with type, default and text of all keys."""
    blocks = [f"{REFERENCE_HEAD}\n"]
    for name, section in keys_of(Recipe).items():
        head = f"[[{name}]]" if section.item else f"[{name}]"
        blocks.append(f"## `{head}`\n\n{_markdown(section.section)}\n\n{_table(section.section, name)}\n")
    return "\n".join(blocks)


def _table(struct: msgspec.StructMeta, prefix: str) -> str:
    """The Markdown table of the keys of a section; advanced keys come last."""
    rows = ["| key | may be | default | |", "|---|---|---|---|"]

    def add(struct: msgspec.StructMeta, prefix: str) -> None:
        for key in sorted(keys_of(struct).values(), key=lambda key: key.advanced):
            default = ""
            if key.required:
                default = "required"
            elif key.default is not None:
                default = f"`{short_toml(key.default)}`"
            name = f"{prefix}{ADVANCED}.{key.name}" if key.advanced else f"{prefix}{key.name}"
            rows.append(f"| `{name}` | {expected(key.kind)} | {default} | {_cell(key)} |".replace("|  |", "| |"))
            inner, place = key.inner
            if inner is not None:
                add(inner, f"{name}.{place}")

    add(struct, "")
    return "\n".join(rows)


def _cell(key: Key) -> str:
    texts = [key.text, *(_markdown(cls).replace("\n", " ") for cls in _enums(key.kind))]
    return ". ".join(text.rstrip(".") for text in texts if text).replace("|", "\\|")


def _markdown(cls: type) -> str:
    return (python_inspect.getdoc(cls) or "").replace("``", "`")
