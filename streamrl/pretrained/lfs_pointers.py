"""Pointers of git-lfs: text in place of a large file, which a clone has where git-lfs was not installed. Readers of
models (``weight_files``, ``tokenizer``) and of rows (``run.prompts``) name them, since nothing else explains such a
file."""

from __future__ import annotations

from pathlib import Path

POINTER = b"version https://git-lfs"
IS_POINTER = "is a pointer of git-lfs, not the file itself"
FETCH = "run `git lfs pull` there, or `hf download`"


def pointer_problem(path: Path) -> str:
    """Return that ``path`` is a pointer of git-lfs, with the remedy, as the part of a sentence that begins with its
    subject; empty for another file."""
    try:
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                return f"{path.name} {IS_POINTER}: {FETCH}"
    except OSError:
        pass  # the reader of the file says why
    return ""
