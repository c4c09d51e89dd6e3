"""A copy of the last commit, in which campaigns plant faults that the tests must see."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """Clone the last commit, with this environment as its ``.venv``. Yields its folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="planted-copy-") as folder:
        copy = Path(folder) / "streamrl"
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(copy)], check=True)
        (copy / ".venv").symlink_to(sys.prefix)
        yield copy


@contextmanager
def planted(copy: Path, file: str, line: str, instead: str) -> Iterator[None]:
    """Replace ``line``, which ``file`` (below ``streamrl/``) has once, by ``instead`` meanwhile. Raises ``SystemExit``
    where it does not have it once."""
    path = copy / "streamrl" / file
    text = path.read_text()
    if text.count(line) != 1:
        raise SystemExit(f"{file} has this line {text.count(line)} times, and a fault needs it once: {line!r}")
    path.write_text(text.replace(line, instead))
    try:
        yield
    finally:
        path.write_text(text)
