"""Rows of a JSONL file, by an index of line offsets (8 bytes a row): the file is never held in memory."""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.prompts.prompt_rows import decode_row


class LineRows:
    """A ``RowStore``. Raises ``RecipeError`` when the file is missing or empty."""

    def __init__(self, path: Path) -> None:
        self._file = _open_file(path)
        self._seen = _stamp(self._file)
        self._offsets, self._numbers, self._digest = _index(self._file)
        if not self._numbers:
            self._file.close()
            raise RecipeError([f"prompts {path} is empty: add rows"])

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
        """The object of a line. Raises ``BadRow``; ``StreamRLError`` where the file was edited in place."""
        if (now := _stamp(self._file)) != self._seen:
            if _index(self._file) != (self._offsets, self._numbers, self._digest):
                raise StreamRLError(
                    f"prompts {self._file.name} was changed while this run reads it: put back what it was and resume "
                    "the run, or begin another"
                )
            self._seen = now
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


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _index(file: BinaryIO) -> tuple[array[int], array[int], int]:
    """Offsets of lines and of the end, numbers of lines, and a checksum of them all."""
    offsets, numbers, digest = array("Q"), array("Q"), 0
    file.seek(0)
    for offset, number, line in _lines(file):
        offsets.append(offset)
        numbers.append(number)
        digest = zlib.crc32(line, digest)
    offsets.append(file.tell())
    return offsets, numbers, digest


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Offset, number (from 1) and bytes of every line that is not blank; a byte order mark is skipped."""
    offset = 0
    for number, line in enumerate(file, start=1):
        start = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
        if line[start:].strip():
            yield offset + start, number, line[start:]
        offset += len(line)
