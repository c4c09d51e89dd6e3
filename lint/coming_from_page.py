"""Print docs/this_or_trl_verl_prime_rl.md with its tables as the table of foreign keys is now (a test compares).

For a new row write "| `key` | |" below the heading of its system, then run ``python lint/coming_from_page.py > page``
and move it there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from streamrl.recipe.dialects.foreign_keys import Row, dialects
from streamrl.recipe.field_types import as_written
from streamrl.recipe.sections import Recipe

PAGE = Path(__file__).parents[1] / "docs" / "this_or_trl_verl_prime_rl.md"


def cell(row: Row) -> str:
    """The answer to a key, and those to its values; reasons in italics."""
    values: dict[str, list[str]] = {}
    for value, effect in row.values.items():
        values.setdefault(effect, []).append(f"`{value}`")
    parts = [_effect(row.here, ""), *(f"{', '.join(names)}: {_effect(one, '`')}" for one, names in values.items())]
    return as_written(Recipe, "; ".join(parts)).replace("|", "\\|")


def _effect(effect: str, quote: str) -> str:
    return f"*{effect[1:]}*" if effect[0] in "-=!" else f"{quote}{effect.lstrip('~')}{quote}"


def page() -> str:
    """The page, with every row of its tables made again."""
    lines, table = [], dialects()["TRL"]
    for line in PAGE.read_text().splitlines():
        table = dialects().get(line.removeprefix("## "), table)
        found = re.match(r"\| `([^`]+)` \|", line)
        lines.append(f"| `{found[1]}` | {cell(table[found[1]])} |" if found else line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
