"""What a journal asks of a disk: a dozen calls, each of which may fail. Tests give it others than ``os``."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """Calls on files and directories. Every one may raise ``OSError``; ``lock`` raises ``BlockingIOError`` where
    another holds it. Offsets and sizes are bytes; descriptors are what ``create``, ``open`` and ``lock`` gave."""

    def make_directory(self, path: Path) -> None:
        """Make it, for this user only, unless it exists. Durable after ``flush_directory`` of its parent."""

    def names(self, directory: Path) -> list[str]:
        """Names of the entries, in no order."""

    def create(self, path: Path) -> int:
        """An empty file for writing, in place of one of that name."""

    def open(self, path: Path) -> int:
        """An existing file for reading and for ``flush``."""

    def size(self, descriptor: int) -> int:
        """Bytes of the file."""

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        """Up to ``count`` bytes; fewer only at the end of the file."""

    def write(self, descriptor: int, block: bytes, offset: int) -> int:
        """Write some of ``block``; returns how many bytes. They survive the process, not a power cut."""

    def flush(self, descriptor: int) -> None:
        """Return once the content of the file is on the disk."""

    def close(self, descriptor: int) -> None:
        """Give the descriptor back; with it a lock."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, in one step."""

    def remove(self, path: Path) -> None:
        """Remove a file's name."""

    def flush_directory(self, directory: Path) -> None:
        """Return once the names in it are on the disk."""

    def lock(self, path: Path, holder: str) -> int:
        """Take the lock of this file until ``close`` or the end of the process, and write ``holder`` into it."""


class LocalDisk:
    """The disk of this machine."""

    def make_directory(self, path: Path) -> None:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)

    def names(self, directory: Path) -> list[str]:
        return os.listdir(directory)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        block = os.pread(descriptor, count, offset)
        if len(block) == count or not block:
            return block
        parts = [block]
        while block := os.pread(descriptor, count - sum(map(len, parts)), offset + sum(map(len, parts))):
            parts.append(block)
        return b"".join(parts)

    def write(self, descriptor: int, block: bytes, offset: int) -> int:
        return os.pwrite(descriptor, block, offset)

    def flush(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def flush_directory(self, directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: Path, holder: str) -> int:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is(path, descriptor):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, holder.encode(), 0)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # somebody replaced the file between the two calls: take the one that has the name

    @staticmethod
    def _is(path: Path, descriptor: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.stat(path), os.fstat(descriptor))
        return False
