"""Files of JSON lines: the controller appends to them (metrics, samples, trace, evaluations), and other processes (the
dashboard, trackers, commands) read them while the run goes on."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from msgspec import json

from streamrl.base.atomic_files import append_whole
from streamrl.base.errors import UNDECODABLE

LONGEST_LINE = 64 << 20
"""Bytes. A longer line is not read: a line of a run has some megabytes at most, and a sparse file has no end."""
_TAIL_BYTES = 1 << 16


class LineFile:
    """Appends objects to ``path``, one a line. When ``append`` returns, a line is written completely, or, where the
    disk is full, not at all (``OSError``).

    ``goes_on``: whether to keep the lines of an earlier run, without half a line at the end, which a killed process may
    have left; False empties the file;
    ``head``: first line of each file;
    ``most_bytes``: size of the file (0: unlimited) at which it is renamed to ``older-NAME``, in place of the file of
    that name, and a new file is begun."""

    def __init__(self, path: Path, *, goes_on: bool = True, head: object = None, most_bytes: int = 0) -> None:
        self._path = path
        self._head = head
        self._most_bytes = most_bytes
        if goes_on and path.exists():
            _remove_torn_line(path)
        self._open("ab" if goes_on else "wb")

    def append(self, *lines: object) -> None:
        """Write ``lines``, all into the same file."""
        if 0 < self._most_bytes < self._file.tell():
            self._file.close()
            self._path.replace(older(self._path))
            self._open("wb")
        append_whole(self._file, b"".join(json.encode(line) + b"\n" for line in lines))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _open(self, mode: str) -> None:
        self._file: IO[bytes] = self._path.open(mode, buffering=0)
        if self._head is not None and not self._path.stat().st_size:
            append_whole(self._file, json.encode(self._head) + b"\n")


def _remove_torn_line(path: Path) -> None:
    """Remove half a line from the end of ``path``."""
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
    """Path of the older part of the file, to which a full file is renamed."""
    return path.with_name(f"older-{path.name}")


def open_regular(path: Path) -> IO[bytes]:
    """Open ``path`` to read, if it is a regular file. A directory of a run may come from another user: a link would
    show a file of the reader, and a pipe would block. Raises ``OSError``."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def open_rotated(path: Path) -> list[IO[bytes]]:
    """Open the older part of ``path`` and ``path``, without missing files. Where the file is renamed meanwhile, no part
    is opened twice or left out."""
    files: list[IO[bytes]] = []
    for part in (path, older(path)):
        with suppress(OSError):
            files.append(open_regular(part))
    if len(files) == 2 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
        files.pop().close()
    return files[::-1]


def read_lines(path: Path, kind: Any = Any) -> Iterator[Any]:
    """Yield the lines of the older part of ``path`` and of ``path``, decoded as ``kind``; none where there is no file.
    Lines that cannot be decoded are left out (half a line of a killed run)."""
    with ExitStack() as stack:
        for file in [stack.enter_context(file) for file in open_rotated(path)]:
            with suppress(OSError):
                yield from decoded_lines(bounded_lines(file), kind)


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of ``file`` with their newlines; a line of more than ``LONGEST_LINE`` is left out."""
    continues_line = False
    while part := file.readline(LONGEST_LINE):
        ends_line = part.endswith(b"\n") or len(part) < LONGEST_LINE
        if ends_line and not continues_line:
            yield part
        continues_line = not ends_line


def decoded_lines(lines: Iterable[bytes], kind: Any) -> Iterator[Any]:
    """Yield ``lines``, decoded as ``kind``, without those that cannot be decoded."""
    decode = json.Decoder(kind).decode
    for line in lines:
        with suppress(*UNDECODABLE):
            yield decode(line)
