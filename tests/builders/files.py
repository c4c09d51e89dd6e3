"""Places of the checkout, and files of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SORT = EXAMPLES / "sort"
SORT_MODEL = SORT / "model"
SORT_RECIPE = SORT / "recipe.toml"


def json_lines(path: Path) -> list[Any]:
    """The lines of a file of JSON lines, in order."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def rows_of_table(path: Path) -> list[str]:
    """Rows of a table in a text file: a row may go on in an indented line, and comments begin with ``#``."""
    rows = path.read_text().replace("\n    ", " -> ").splitlines()
    return [row for row in rows if row and not row.startswith("#")]
