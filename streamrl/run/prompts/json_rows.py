"""Rows of JSON files: objects one on each line, or an array of them. ``open_prompts`` opens them in the process that
draws or checks prompts."""

from __future__ import annotations

import bisect
import json
import os
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from streamrl.base.errors import UNDECODABLE, RecipeError, StreamRLError
from streamrl.base.types import JsonObject
from streamrl.pretrained.lfs_pointers import FETCH, IS_POINTER, POINTER
from streamrl.run.prompts.prompt_rows import BadRow, OtherFormat, RowStore

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPRESSED = "the file is compressed): unpack it"
_OTHER_FILES = {
    b"[": "it begins a JSON array): write its rows one a line",
    b"\x1f\x8b": _COMPRESSED,
    b"(\xb5/\xfd": _COMPRESSED,
    POINTER: f"it {IS_POINTER}): {FETCH}",
    b"<": "it begins a web page): download the file itself",
    b"\xff\xfe": "it is UTF-16): save it as UTF-8",
}


def open_json(files: Sequence[Path]) -> RowStore:
    """Open the rows of ``files``, one file after the other. Raises ``RecipeError``."""
    stores = [ArrayRows(file) if _is_array(file) else LineRows(file) for file in files]
    return stores[0] if len(stores) == 1 else JoinedRows(files, stores)


def _is_array(path: Path) -> bool:
    """Return whether a file begins as a JSON array of objects does."""
    try:
        with path.open("rb") as file:
            beginning = file.read(4096).removeprefix(_BYTE_ORDER_MARK)
    except OSError:
        return False  # ``LineRows`` says why
    return re.match(rb"\s*\[\s*[{\]]", beginning) is not None


class ArrayRows(RowStore):
    """Rows of a JSON array, whose text is kept in memory. Raises ``RecipeError``."""

    def __init__(self, path: Path) -> None:
        try:
            text = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
            self._rows = msgspec.json.decode(text, type=list[msgspec.Raw])
        except (OSError, *UNDECODABLE) as error:
            remedy = "correct it, or write its rows one a line"
            raise RecipeError(f"prompts {path} begins a JSON array and is none ({error}): {remedy}") from error
        self.size = len(self._rows)
        if not self.size:
            raise RecipeError(f"prompts {path} is empty: add rows")

    def row(self, index: int) -> JsonObject:
        """Return an object of the array. Raises ``BadRow``."""
        return decode_row(bytes(self._rows[index]))


class JoinedRows(RowStore):
    """Rows of several files, in the order of the files."""

    def __init__(self, files: Sequence[Path], stores: Sequence[RowStore]) -> None:
        self._files = files
        self._stores = stores
        # Index of the row after the last one of each file.
        self._ends = list(accumulate(store.size for store in stores))
        self.size = self._ends[-1]

    def place(self, index: int) -> str:
        number, inside = self._inside(index)
        return f"{self._files[number].name}, {self._stores[number].place(inside)}"

    def row(self, index: int) -> JsonObject:
        """Return the object of a row. Raises ``BadRow``."""
        number, inside = self._inside(index)
        return self._stores[number].row(inside)

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _inside(self, index: int) -> tuple[int, int]:
        """Return the number of the file of a row, and its index there."""
        number = bisect.bisect_right(self._ends, index)
        return number, index - self._ends[number] + self._stores[number].size


class LineRows(RowStore):
    """Rows of a JSONL file, read one by one by an index of line offsets (8 bytes a row). Raises ``RecipeError`` when
    the file is missing or empty."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RecipeError(f"prompts {path} cannot be read ({error.strerror}): correct the path") from error
        self._stamp = self._stamp_now()
        self._offsets, self._numbers, self._checksum = _index(self._file)
        self.size = len(self._numbers)
        if not self.size:
            self._file.close()
            raise RecipeError(f"prompts {path} is empty: add rows")

    def number(self, index: int) -> int:
        return self._numbers[index]

    def place(self, index: int) -> str:
        return f"line {self._numbers[index]}"

    def row(self, index: int) -> JsonObject:
        """Return the object of a line. Raises ``BadRow``, and ``StreamRLError`` where the file was changed."""
        stamp = self._stamp_now()
        if stamp != self._stamp:
            # A file that was only touched, or written again with the same content, is read on.
            if _index(self._file) != (self._offsets, self._numbers, self._checksum):
                raise StreamRLError(
                    f"prompts {self._file.name} was changed while this run reads it: put back what it was and resume "
                    "the run, or begin another"
                )
            self._stamp = stamp
        start = self._offsets[index]
        end = self._offsets[index + 1]
        return decode_row(os.pread(self._file.fileno(), end - start, start).strip())

    def close(self) -> None:
        self._file.close()

    def _stamp_now(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


def _index(file: BinaryIO) -> tuple[array[int], array[int], int]:
    """Return the offsets of the lines that are not blank and of the end, the numbers of these lines (from 1), and a
    checksum of their bytes. A byte order mark is skipped."""
    offsets = array("Q")
    numbers = array("Q")
    checksum = 0
    offset = 0
    file.seek(0)
    for number, line in enumerate(file, start=1):
        start = 3 if number == 1 and line.startswith(_BYTE_ORDER_MARK) else 0
        if line[start:].strip():
            offsets.append(offset + start)
            numbers.append(number)
            checksum = zlib.crc32(line[start:], checksum)
        offset += len(line)
    offsets.append(offset)
    return offsets, numbers, checksum


def decode_row(line: bytes) -> JsonObject:
    """Return the row of one JSONL line. Raises ``BadRow``."""
    try:
        row: JsonObject = msgspec.json.decode(line, type=JsonObject)
        if line.count(b'":') > len(row):  # objects in its values, such a text, or a key that is there twice
            json.loads(line, object_pairs_hook=_refuse_double_keys)
        return row
    except UNDECODABLE as error:
        remedies = (remedy for start, remedy in _OTHER_FILES.items() if line.startswith(start))
        remedy = next(remedies, f"{error}): correct it, or name the file by its format, such as .csv")
        kind = BadRow if line.startswith(b"{") else OtherFormat
        raise kind(f"is not a JSON object ({remedy}") from error


def _refuse_double_keys(pairs: Sequence[tuple[str, Any]]) -> None:
    """Raise ``BadRow`` for an object that has a key twice: json takes the last, and ``datasets`` refuses it."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise BadRow(f'has the key "{key}" {count} times: leave one')
