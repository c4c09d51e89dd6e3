"""Writes files of a new folder from templates. Called by ``command`` and ``tasks`` in the command's own process."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path

from streamrl.base.types import JsonMapping

TEMPLATES = Path(__file__).parent / "templates"
_SUFFIX = ".txt"
"""Suffix of templates, which become Python or TOML only when their ``$names`` are replaced."""


def template(name: str, values: Mapping[str, object]) -> str:
    """The text of a template, with ``$name`` replaced by ``values``."""
    return string.Template((TEMPLATES / name).read_text(encoding="utf-8")).substitute(values)


def write_templates(folder: Path, directory: str, values: Mapping[str, object]) -> None:
    """Write every template of a directory of templates into ``folder``."""
    for path in sorted((TEMPLATES / directory).glob(f"*{_SUFFIX}")):
        text = template(f"{directory}/{path.name}", values)
        (folder / path.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")


def write_rows(path: Path, rows: Iterable[JsonMapping]) -> None:
    """Write ``rows`` as JSON objects, one a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
