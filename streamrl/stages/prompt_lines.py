"""Rows of a JSONL file, by an index of line offsets (8 bytes a row): the file is never held in memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from streamrl.errors import RecipeError
from streamrl.stages.prompt_rows import decode_row


class LineRows:
    """A ``RowStore``. Raises ``RecipeError`` when the file is missing or empty."""

    def __init__(self, path: Path) -> None:
        self._file = _open_file(path)
        self._offsets = array("Q")
        self._numbers = array("Q")
        for offset, number, _ in _lines(self._file):
            self._offsets.append(offset)
            self._numbers.append(number)
        if not self._offsets:
            self._file.close()
            raise RecipeError([f"prompts {path} is empty: add rows"])
        self._offsets.append(self._file.tell())

    @property
    def size(self) -> int:
        """Lines that are not blank."""
        return len(self._numbers)

    def number(self, index: int) -> int:
        """Of the line, from 1, blank ones counted."""
        return self._numbers[index]

    def place(self, index: int) -> str:
        """``line 12``."""
        return f"line {self._numbers[index]}"

    def row(self, index: int) -> dict[str, Any]:
        """The object of a line. Raises ``BadRow``."""
        start, end = self._offsets[index], self._offsets[index + 1]
        return decode_row(os.pread(self._file.fileno(), end - start, start).strip())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _open_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise RecipeError([f"prompts {path} cannot be read ({error.strerror}): correct the path"]) from error


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Offset, number (from 1) and bytes of every line that is not blank; a byte order mark is skipped."""
    offset = 0
    for number, line in enumerate(file, start=1):
        start = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
        if line[start:].strip():
            yield offset + start, number, line[start:]
        offset += len(line)
