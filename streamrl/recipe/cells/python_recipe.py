"""Converts a recipe of Python objects (sections, functions, rows of prompts) to the table of a recipe file. Called by
``rules.load_recipe`` in the process of the user's script or notebook."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import json, to_builtins

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping, JsonObject
from streamrl.recipe.cells.cell_code import CELLS, name_of_code, written
from streamrl.recipe.field_types import as_table
from streamrl.recipe.sections import Run

_SHORT = {"model": "path", "prompts": "train", "objective": "algorithm"}
"""Sections that may be written as one value, with the key of this value."""


def python_table(sections: JsonMapping) -> JsonObject:
    """Return ``sections`` as a table of plain values. ``model``, ``prompts`` and ``objective`` may be one value, and
    ``rewards`` one reward. A function or class becomes its name, rows of prompts (a list, a dataset) a file. Raises
    ``RecipeError``."""
    table = as_table(sections)
    for name, key in _SHORT.items():
        if name in table and not isinstance(table[name], Mapping):
            table[name] = {key: table[name]}
    if "rewards" in table:
        rewards = table["rewards"] if isinstance(table["rewards"], list) else [table["rewards"]]
        table["rewards"] = [
            {"function": reward} if callable(reward) or isinstance(reward, str) else reward for reward in rewards
        ]
    run = table.get("run")
    directory = Run().directory
    if isinstance(run, dict):
        directory = run.get("directory", directory)
    cells = Path(str(directory)) / CELLS
    for section, key in (("prompts", "train"), ("evaluation", "prompts")):
        if isinstance(table.get(section), dict) and key in table[section]:
            table[section][key] = _source(table[section][key], f"{section}.{key}", cells)
    plain: JsonObject = to_builtins(table, enc_hook=partial(_plain, cells))
    return plain


def _plain(cells: Path, value: Any) -> Any:
    """Convert an object of another type: an array to a list, a function or class to its name, others to text."""
    if hasattr(value, "tolist"):  # NumPy
        return value.tolist()
    return name_of_code(value, cells) if callable(value) else str(value)


def _source(value: Any, path: str, cells: Path) -> Any:
    """Return a source of prompts as it is, or the file to which its rows are written; of a table of sets, each of them.
    Raises ``RecipeError``."""
    if isinstance(value, dict):
        sets = {name: table if isinstance(table, dict) else {"prompts": table} for name, table in value.items()}
        return {
            name: table | {"prompts": _source(table.get("prompts", ""), f"{path}.{name}", cells)}
            for name, table in sets.items()
        }
    if isinstance(value, str | Path) or callable(value):
        return value
    if not hasattr(value, "__len__") or isinstance(value, Mapping):
        raise RecipeError(
            f"{path}: a {type(value).__name__} cannot be read by another process, and not again after a resume: give "
            "rows in a list, or the function that makes the iterator"
        )
    rows = b"".join(json.encode(row, enc_hook=partial(_plain, cells)) + b"\n" for row in value)
    return str(written(cells, "rows", ".jsonl", rows))
