"""TOML text: parsing with limits, line numbers of keys, and writing of values and of a recipe. Used wherever a recipe
is read (``rules.load_recipe``) or shown."""

from __future__ import annotations

import enum
import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from streamrl.base.types import JsonObject
from streamrl.recipe.field_types import ADVANCED, as_table, keys_of

# No two adjacent parts of a pattern match the same characters, so the time is linear in the length of a line.
_TABLE = re.compile(r"^\s*+(\[\[?)\s*+([^\]]++)\]\]?\s*+(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_BARE_KEY = re.compile(r"^[A-Za-z0-9_-]+$")


TOML_REMEDIES = {
    "Cannot overwrite": "the key is there twice, so remove one",
    "Cannot declare": "the section is there twice, so put its keys together",
    "Illegal character '\\n'": "close the quotes",
    "hex value": "write a path of Windows in single quotes",
    "Expected ']'": "close the brackets",
    "Expected": "write one KEY = VALUE a line, and a number with a point",
    "Invalid statement": "write [SECTION] or KEY = VALUE",
    "Invalid value": "write a text in double quotes, a number with a point, true or false, or leave the key out",
}
"""What to write instead, by words of the errors of tomllib."""
_DEEPEST = 64
_ENDLESS_KEY = re.compile(r"""(?:(?:(?<![A-Za-z0-9_-])[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")
_ENDLESS_NUMBER = re.compile(r"(?<![0-9A-Fa-f_])[0-9A-Fa-f_]{5000}")


def parse_toml(text: str) -> JsonObject:
    """Parse TOML. Raises ``ValueError`` (``TOMLDecodeError`` is one) and ``RecursionError``."""
    # tomllib takes memory with the square of the number of parts of a key, and 300 bytes for each digit.
    if text.count(".") >= _DEEPEST and _ENDLESS_KEY.search(text):
        raise ValueError("a key of more than 64 parts")
    if _ENDLESS_NUMBER.search(text):
        raise ValueError("a number of 5,000 digits or more")
    table = tomllib.loads(text)
    if is_nested_deeper(table):
        raise ValueError(f"values inside of values, more than {_DEEPEST} deep")
    return table


def value_or_text(raw: str) -> Any:
    """Return the TOML value in ``raw``, or ``raw`` itself where it is none."""
    try:
        parsed = parse_toml(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    return parsed["value"] if list(parsed) == ["value"] else raw


def is_nested_deeper(value: Any, levels: int = _DEEPEST) -> bool:
    """Return whether tables and lists are nested deeper than ``levels``, such as a list that contains itself."""
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list):
        items = value
    else:
        return False
    return any(levels == 0 or is_nested_deeper(item, levels - 1) for item in items)


def _split_key(text: str) -> list[str]:
    return [part.strip().strip("\"'") for part in text.split(".")]


def key_lines(text: str) -> dict[str, int]:
    """Return the line number (from 1) of every table and key, by dotted path; the n-th ``[[rewards]]`` is
    ``rewards.n``.

    It scans lines and does not parse: keys of inline tables have no line, and a line inside of a multi-line string that
    looks like ``key =`` is taken for a key. Both make a hint less exact, never a value wrong."""
    lines: dict[str, int] = {}
    array_lengths: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if table := _TABLE.match(line):
            prefix = _indexed(_split_key(table[2]), array_lengths)
            lines.setdefault(prefix, number)
            if table[1] == "[[":
                index = array_lengths.get(prefix, 0)
                array_lengths[prefix] = index + 1
                prefix = f"{prefix}.{index}"
                lines.setdefault(prefix, number)
        elif key := _KEY.match(line):
            lines.setdefault(".".join([*filter(None, [prefix]), *_split_key(key[1])]), number)
    return lines


def _indexed(keys: list[str], array_lengths: Mapping[str, int]) -> str:
    """Dotted path of a table header. ``[rewards.options]`` belongs to the last ``[[rewards]]`` above."""
    path = keys[0]
    for key in keys[1:]:
        path = f"{path}.{array_lengths[path] - 1}.{key}" if path in array_lengths else f"{path}.{key}"
    return path


def toml_value(value: Any) -> str:
    """Return a value in TOML notation. ``value``: str, bool, int, float, or a sequence, mapping or struct of these."""
    if isinstance(value, enum.Enum):
        return toml_value(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Struct):
        value = as_table(value)
    if isinstance(value, Mapping):
        items = {toml_key(name): item for name, item in value.items() if item is not None}
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in items.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return str(value)


def toml_key(key: str) -> str:
    """Return a key, in quotes where TOML requires them."""
    return key if _BARE_KEY.match(key) else toml_value(key)


def toml_document(struct: Struct) -> str:
    """Return a struct of sections as TOML. Left out are fields that are None (TOML has no null), advanced keys with
    their default, and sections that are then empty."""
    blocks = []
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        items = [value] if isinstance(value, Struct) else value
        for item in items:
            blocks += _section_blocks(f"[{name}]" if item is value else f"[[{name}]]", name, item)
    return "\n\n".join(blocks) + "\n"


def _section_blocks(head: str, name: str, section: Struct) -> list[str]:
    """The blocks of a section: its own, and that of its advanced keys."""
    lines: list[str] = []
    advanced_lines: list[str] = []
    for key in keys_of(type(section)).values():
        value = getattr(section, key.name)
        if value is not None and not (key.advanced and value == key.default):
            target = advanced_lines if key.advanced else lines
            target.append(f"{key.name} = {toml_value(value)}")
    blocks = []
    if lines:
        blocks.append("\n".join([head, *lines]))
    if advanced_lines:
        blocks.append("\n".join([f"[{name}.{ADVANCED}]", *advanced_lines]))
    return blocks
