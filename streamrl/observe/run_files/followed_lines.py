"""Lines of a file that a run appends to and rotates (``LineFile``), from a cursor on. The dashboard, ``streamrl top``
and the trackers follow a run with it, each in its own process."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import IO
from zlib import crc32

from msgspec import Struct

from streamrl.base.line_file import LONGEST_LINE, open_rotated

_CHECKED_BYTES = 1024
_BLOCK_BYTES = 1 << 20


class Cursor(Struct, frozen=True):
    """A position in a file; ``Cursor()`` is the start of the file.

    ``offset``: bytes of the complete lines that were read. ``check``: CRC-32 of the first 1,024 bytes of them, because
    another file may get the inode of a removed file."""

    inode: int = 0
    offset: int = 0
    check: int = 0


class FollowedLines:
    """Reads the complete lines of ``path`` after ``cursor``, and later the lines that are appended. Where the file was
    rotated to ``older-NAME`` meanwhile, its remaining lines come first. The file need not exist yet.

    ``gaps``: number of times that the file of the cursor was gone, because two rotations lay between two reads. The
    lines after the cursor are lost then, and reading continues with the oldest remaining line."""

    def __init__(self, path: Path, cursor: Cursor = Cursor()) -> None:  # noqa: B008 - frozen
        self._path = path
        self.cursor = cursor
        self.gaps = 0

    def read(self, most_bytes: int = _BLOCK_BYTES) -> list[bytes]:
        """Return the next complete lines without their newlines, and move ``cursor`` behind them. They have up to
        ``most_bytes``, but a longer line is returned as well. An empty list: everything was read. Lines of two files
        are never mixed. Raises ``OSError`` where the disk cannot be read."""
        with ExitStack() as stack:
            files = [stack.enter_context(file) for file in open_rotated(self._path)]
            first = next((index for index, file in enumerate(files) if self._is_of(file)), None)
            if first is None and files and self.cursor.offset:
                self.gaps += 1
                self.cursor = Cursor()
            for file in files[first or 0 :]:
                if lines := self._read(file, most_bytes):
                    return lines
        return []

    def _is_of(self, file: IO[bytes]) -> bool:
        """Return whether the cursor is a position in ``file``, or in a file that ``file`` is a copy of."""
        file.seek(0)
        head = file.read(min(self.cursor.offset, _CHECKED_BYTES))
        same = self.cursor.inode == _inode(file) or len(head) == _CHECKED_BYTES
        return same and self.cursor.check == crc32(head) and _size(file) >= self.cursor.offset > 0

    def _read(self, file: IO[bytes], most_bytes: int) -> list[bytes]:
        begin = self.cursor.offset if self._is_of(file) else 0
        file.seek(begin)
        block = file.read(most_bytes)
        if b"\n" not in block and len(block) == most_bytes:
            block += file.readline(LONGEST_LINE)
        end = block.rfind(b"\n") + 1
        if not end and len(block) > LONGEST_LINE:
            end = len(block)  # passed on without an end, so that nobody can decode the line
        if not end:
            return []
        file.seek(0)
        head = file.read(min(begin + end, _CHECKED_BYTES))
        self.cursor = Cursor(_inode(file), begin + end, crc32(head))
        return block[: end - 1].split(b"\n")


def _inode(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_ino


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
