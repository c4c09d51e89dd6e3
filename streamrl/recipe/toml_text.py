"""TOML text: where a key stands in a file, how a value is written, how a recipe is written."""

from __future__ import annotations

import enum
import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.recipe.fields import ADVANCED, keys_of

# No two parts in a row can match the same characters: the time is that of the length of a line, not of its square.
_TABLE = re.compile(r"^\s*+(\[\[?)\s*+([^\]]++)\]\]?\s*+(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_BARE_KEY = re.compile(r"^[A-Za-z0-9_-]+$")


_DEEPEST = 64
_ENDLESS_KEY = re.compile(r"""(?:(?:(?<![A-Za-z0-9_-])[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}""")
_ENDLESS_NUMBER = re.compile(r"(?<![0-9A-Fa-f_])[0-9A-Fa-f_]{5000}")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ``ValueError``, of which ``TOMLDecodeError`` is one, and ``RecursionError``."""
    # tomllib takes memory with the square of the number of parts, and 300 bytes for each digit
    if text.count(".") >= _DEEPEST and _ENDLESS_KEY.search(text):
        raise ValueError("a key of more than 64 parts")
    if _ENDLESS_NUMBER.search(text):
        raise ValueError("a number of 5,000 digits or more")
    table = tomllib.loads(text)
    if is_nested_deeper(table):
        raise ValueError(f"values inside of values, more than {_DEEPEST} deep")
    return table


def value_or_text(raw: str) -> Any:
    """The TOML value that ``raw`` is, otherwise ``raw`` itself."""
    try:
        parsed = parse_toml(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    return parsed["value"] if list(parsed) == ["value"] else raw


def is_nested_deeper(value: Any, most: int = _DEEPEST) -> bool:
    """Return whether values are in more than ``most`` others, such as a list in itself."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(most == 0 or is_nested_deeper(item, most - 1) for item in inside)


def _split_key(text: str) -> list[str]:
    return [part.strip().strip("\"'") for part in text.split(".")]


def key_lines(text: str) -> dict[str, int]:
    """Line number (from 1) of every table and key, by dotted path; the n-th ``[[rewards]]`` is ``rewards.n``.

    It scans lines and does not parse: keys of inline tables have no line, and a line inside a multi-line
    string that looks like ``key =`` is taken for one. Both cost a hint, never a wrong value."""
    lines: dict[str, int] = {}
    array_lengths: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), start=1):
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
    """Dotted path of a table header: ``[rewards.options]`` belongs to the last ``[[rewards]]`` above it."""
    path = keys[0]
    for key in keys[1:]:
        path = f"{path}.{array_lengths[path] - 1}.{key}" if path in array_lengths else f"{path}.{key}"
    return path


def toml_value(value: Any) -> str:
    """One value in TOML notation. ``value``: str, bool, int, float, a sequence or a mapping of those."""
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
    if isinstance(value, msgspec.Struct):
        value = {name: item for name, item in msgspec.structs.asdict(value).items() if item is not None}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return str(value)


def toml_key(key: str) -> str:
    """A key, quoted where TOML asks for it."""
    return key if _BARE_KEY.match(key) else toml_value(key)


def toml_document(struct: msgspec.Struct) -> str:
    """A struct of sections as TOML. Fields that are None are left out: TOML has no null; so are advanced keys that are
    at their default, and sections in which nothing is left."""
    blocks: list[str] = []
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        items = [value] if isinstance(value, msgspec.Struct) else value
        for item in items:
            blocks += _section_blocks(f"[{name}]" if item is value else f"[[{name}]]", name, item)
    return "\n\n".join(blocks) + "\n"


def _section_blocks(head: str, name: str, section: msgspec.Struct) -> list[str]:
    lines: list[str] = []
    below: list[str] = []
    for key in keys_of(type(section)).values():
        value = getattr(section, key.name)
        if value is not None and not (key.advanced and value == key.default):
            (below if key.advanced else lines).append(f"{key.name} = {toml_value(value)}")
    blocks = ["\n".join([head, *lines])] if lines else []
    return blocks + (["\n".join([f"[{name}.{ADVANCED}]", *below])] if below else [])
