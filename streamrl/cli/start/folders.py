"""Files of a new folder, out of templates."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
_ENDING = ".txt"
"""Of a template: it is Python or TOML only once its ``$names`` are replaced, and then it is the user's."""


def template(name: str, values: Mapping[str, object]) -> str:
    """The text of a template, with ``$name`` replaced by ``values``."""
    return string.Template((TEMPLATES / name).read_text(encoding="utf-8")).substitute(values)


def write_templates(folder: Path, directory: str, values: Mapping[str, object]) -> None:
    """Write every template of a directory of templates into ``folder``."""
    for path in sorted((TEMPLATES / directory).glob(f"*{_ENDING}")):
        text = template(f"{directory}/{path.name}", values)
        (folder / path.name.removesuffix(_ENDING)).write_text(text, encoding="utf-8")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``rows`` as JSON objects, one a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
