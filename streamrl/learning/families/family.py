"""The tables of model families."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from msgspec import Struct, convert, field

from streamrl.base.types import JsonObject, Texts

TABLES = Path(__file__).parent
_SHARED = "shared.toml"
_DIRECTIVES = ("use", "without", "like")


class Family(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of model as its publisher lays it out.

    ``name``: name of its table. ``title``: names under which it is published. ``model_class``: class in
    transformers. ``config``: configuration of a tiny model; a string that is a special token stands for the token's id.
    ``published``: keys of the published ``config.json`` that transformers does not write and vLLM reads. ``float32``:
    ends of the names of tensors that the checkpoint stores in float32; the others are bfloat16. ``transposed``:
    ends of the names of tensors whose last two dimensions are the other way round than transformers saves them.
    ``extra``: shapes of tensors that the checkpoint has and the model of transformers has not. ``copies``: parts of
    names; each tensor whose name has the first part is there a second time, with the second part in its name.
    ``engine_dtype``: dtype in which vLLM computes the model on a CPU."""

    name: str
    title: str
    model_class: str = field(name="class")
    config: JsonObject
    published: JsonObject = {}
    float32: Texts = ()
    transposed: Texts = ()
    extra: Mapping[str, tuple[int, ...]] = {}
    copies: tuple[tuple[str, str], ...] = ()
    engine_dtype: Literal["float32", "bfloat16"] = "float32"


def read_families() -> dict[str, Family]:
    """Read all tables of ``TABLES``, by name. Raises ``msgspec.ValidationError`` for a wrong table."""
    shared = tomllib.loads((TABLES / _SHARED).read_text())
    tables: dict[str, Any] = {}
    for file in sorted(TABLES.glob("*.toml")):
        if file.name != _SHARED:
            tables |= tomllib.loads(file.read_text())
    complete = {name: _completed(name, tables, shared) for name in tables}
    return {name: convert({"name": name, **table}, Family) for name, table in complete.items()}


def _completed(name: str, tables: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table ``name`` on top of the one that it is ``like``."""
    table = tables[name]
    base: dict[str, Any] = {}
    if "like" in table:
        base = _completed(table["like"], tables, shared)
    return merged(base, table, shared)


def merged(
    base: Mapping[str, Any], table: Mapping[str, Any], shared: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return ``base``, then the ``shared`` parts that ``table`` uses, then its own values, without what it leaves
    out."""
    result = dict(base)
    for part in table.get("use", ()):
        result |= shared[part]
    for key, value in table.items():
        if isinstance(value, dict):
            result[key] = merged(result.get(key) or {}, value, shared)
        elif key not in _DIRECTIVES:
            result[key] = value
    return {key: value for key, value in result.items() if key not in table.get("without", ())}
