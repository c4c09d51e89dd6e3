"""A new folder that is whole or absent, and its files out of templates."""

from __future__ import annotations

import json
import shutil
import string
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamrl.base.errors import RecipeError

TEMPLATES = Path(__file__).parent / "templates"
_ENDING = ".txt"
"""Of a template: it is Python or TOML only once its ``$names`` are replaced, and then it is the user's."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty directory beside ``folder`` that takes its name at the end; where the block raises it is removed.
    Raises ``RecipeError`` where ``folder`` is there and not empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise RecipeError(f"{folder} {what}: name a folder that is not there yet", outcome="nothing was written")
    target = folder.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


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
