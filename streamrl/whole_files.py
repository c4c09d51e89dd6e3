"""Small files that are whole or absent, whoever reads them meanwhile and whenever their writer is killed."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` beside ``path``, then put it there in one step. Not flushed: a power cut may take it. Blocking;
    raises ``OSError``."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)
