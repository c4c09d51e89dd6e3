"""Files of JSON lines that a run appends to and others read while it goes on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from streamrl.base.atomic_files import append_whole
from streamrl.base.errors import UNDECODABLE

_TAIL_BYTES = 1 << 16


class LineFile:
    """Appends objects to ``path``, one a line, each on its way to the disk when ``append`` returns: whole or, where
    the disk is full, not at all (``OSError``).

    ``goes_on``: after the lines that are there, of which a killed run may have left half of the last one; else the
    file is emptied. ``head``: first line of each file. ``most_bytes``: of the file (0: any); then it is put aside as
    ``older-NAME``, in place of the one before, and another one is begun."""

    def __init__(self, path: Path, *, goes_on: bool = True, head: object = None, most_bytes: int = 0) -> None:
        self._path = path
        self._head = head
        self._most_bytes = most_bytes
        if goes_on and path.exists():
            _cut_torn_line(path)
        self._open("ab" if goes_on else "wb")

    def append(self, *lines: object) -> None:
        """Write them, all into the same file."""
        if 0 < self._most_bytes < self._file.tell():
            self._file.close()
            self._path.replace(older(self._path))
            self._open("wb")
        append_whole(self._file, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _open(self, mode: str) -> None:
        self._file: IO[bytes] = self._path.open(mode, buffering=0)
        if self._head is not None and not self._path.stat().st_size:
            append_whole(self._file, msgspec.json.encode(self._head) + b"\n")


def _cut_torn_line(path: Path) -> None:
    """Leave only whole lines in ``path``."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - _TAIL_BYTES, 0)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


def older(path: Path) -> Path:
    """The place where the part of ``path`` before the present one lies, once it was put aside."""
    return path.with_name(f"older-{path.name}")


def open_rotated(path: Path) -> list[IO[bytes]]:
    """The older part of ``path`` and ``path``, opened, those that are there; none twice, and none left out between
    them where the file is put aside meanwhile."""
    files: list[IO[bytes]] = []
    for place in (path, older(path)):
        with suppress(OSError):
            files.append(place.open("rb"))
    if len(files) == 2 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
        files.pop().close()
    return files[::-1]


def read_lines(path: Path, kind: Any = Any) -> Iterator[Any]:
    """Lines of the older part of ``path`` and of ``path`` as ``kind``; none where there is no file, and without those
    that cannot be read (half a line of a run that was killed)."""
    with ExitStack() as stack:
        for file in [stack.enter_context(file) for file in open_rotated(path)]:
            with suppress(OSError):
                yield from decoded_lines(file, kind)


def decoded_lines(lines: Iterable[bytes], kind: Any = Any) -> Iterator[Any]:
    """``lines`` as ``kind``, without those that cannot be read."""
    decode = msgspec.json.Decoder(kind).decode
    for line in lines:
        with suppress(*UNDECODABLE):
            yield decode(line)
