"""A disk that can lose its power, fail at its n-th call, and lie after a failed flush as Linux does.

What was not flushed is lost in part at a power cut: of each sector of 512 bytes any version since the last flush is
there, the size is any that the file had since, and what was never written up to it is zero. Names are the same: of
the changes since the directory was flushed any part is there, each of them whole.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 512


class PowerCut(BaseException):
    """The power went at this call."""


@dataclass
class Inode:
    """A file. ``flushed``: what is on the disk; ``cached``: what a read gives; ``writes``: between them, in order;
    ``doomed``: writes of a flush that failed: the cache calls them clean."""

    flushed: bytes = b""
    cached: bytearray = field(default_factory=bytearray)
    writes: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, block: bytes, offset: int) -> None:
        self.cached.extend(bytes(max(0, offset + len(block) - len(self.cached))))
        self.cached[offset : offset + len(block)] = block
        self.writes.append((offset, block))

    def flush(self) -> None:
        """Only what the cache calls dirty."""
        for offset, block in self.writes:
            self.flushed = written_over(self.flushed, block, offset)
        self.writes.clear()

    def after_power_cut(self, rng: random.Random) -> bytes:
        """One of the contents that the disk may have."""
        size = rng.choice([len(self.flushed), *(at + len(block) for at, block in self.writes)])
        size = max(size, len(self.flushed))
        versions = [self.flushed]
        for offset, block in self.writes:
            versions.append(written_over(versions[-1], block, offset))
        if rng.random() < 0.3:  # the plain case as well: a prefix of the writes
            return rng.choice(versions)
        mixed = bytearray()
        for start in range(0, size, SECTOR):
            mixed += rng.choice(versions)[start : start + SECTOR].ljust(SECTOR, b"\0")
        return bytes(mixed[:size])


def written_over(content: bytes, block: bytes, offset: int) -> bytes:
    """``content`` with ``block`` at ``offset``; zeros between."""
    return content[:offset].ljust(offset, b"\0") + block + content[offset + len(block) :]


Change = tuple[str, Path, Path | None, Inode | None]


class SimulatedDisk:
    """``calls``: what was asked, in order. ``fail_at``: the number of the call that fails, and how; ``cut_at``: the
    one at which the power goes. ``shortest``: a write takes at most so many bytes."""

    def __init__(self) -> None:
        self.entries: dict[Path, Inode] = {}
        self.flushed_entries: dict[Path, Inode] = {}
        self.changes: list[Change] = []
        self.directories: set[Path] = set()
        self.calls: list[tuple[str, str]] = []
        self.fail_at: tuple[int, int] | None = None
        self.cut_at: int | None = None
        self.shortest: int | None = None
        self._open: dict[int, tuple[Path, Inode]] = {}
        self._locked: dict[int, Path] = {}
        self._next = 1000

    def _call(self, name: str, path: Path) -> int:
        number = len(self.calls)
        self.calls.append((name, path.name))
        if self.fail_at and number == self.fail_at[0]:
            raise OSError(self.fail_at[1], os.strerror(self.fail_at[1]))
        return number

    def _cut(self, number: int) -> None:
        if number == self.cut_at:
            raise PowerCut

    def make_directory(self, path: Path) -> None:
        self._cut(self._call("make_directory", path))
        self.directories.add(path)

    def names(self, directory: Path) -> list[str]:
        self._cut(self._call("names", directory))
        return [path.name for path in self.entries if path.parent == directory]

    def create(self, path: Path) -> int:
        number = self._call("create", path)
        inode = Inode()
        self._change("link", path, None, inode)
        self._cut(number)
        return self._opened(path, inode)

    def open(self, path: Path) -> int:
        self._cut(self._call("open", path))
        if path not in self.entries:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return self._opened(path, self.entries[path])

    def size(self, descriptor: int) -> int:
        path, inode = self._open[descriptor]
        self._cut(self._call("size", path))
        return len(inode.cached)

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        path, inode = self._open[descriptor]
        self._cut(self._call("read", path))
        return bytes(inode.cached[offset : offset + count])

    def write(self, descriptor: int, block: bytes, offset: int) -> int:
        path, inode = self._open[descriptor]
        try:
            number = self._call("write", path)
        except OSError:
            inode.write(block[: len(block) // 2], offset)  # it failed on its way
            raise
        taken = block if self.shortest is None else block[: self.shortest]
        inode.write(bytes(taken), offset)
        self._cut(number)
        return len(taken)

    def flush(self, descriptor: int) -> None:
        path, inode = self._open[descriptor]
        try:
            number = self._call("flush", path)
        except OSError:
            inode.writes.clear()  # never written, and called clean from now on
            raise
        self._cut(number)
        inode.flush()

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        self._locked.pop(descriptor, None)

    def rename(self, old: Path, new: Path) -> None:
        number = self._call("rename", old)
        self._change("rename", old, new, self.entries[old])
        self._cut(number)

    def remove(self, path: Path) -> None:
        number = self._call("remove", path)
        self._change("remove", path, None, None)
        self._cut(number)

    def flush_directory(self, directory: Path) -> None:
        self._cut(self._call("flush_directory", directory))
        for change in self.changes:
            apply_change(self.flushed_entries, change)
        self.changes.clear()

    def lock(self, path: Path, holder: str) -> int:
        self._cut(self._call("lock", path))
        if path in self._locked.values():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        if path not in self.entries:
            self._change("link", path, None, Inode())
        self.entries[path].cached[:] = holder.encode()
        descriptor = self._opened(path, self.entries[path])
        self._locked[descriptor] = path
        return descriptor

    def _change(self, what: str, path: Path, new: Path | None, inode: Inode | None) -> None:
        change = (what, path, new, inode)
        apply_change(self.entries, change)
        self.changes.append(change)

    def _opened(self, path: Path, inode: Inode) -> int:
        self._next += 1
        self._open[self._next] = (path, inode)
        return self._next

    def killed(self) -> SimulatedDisk:
        """The disk after the process was killed: nothing is lost."""
        self._open.clear()
        self._locked.clear()
        self.fail_at = self.cut_at = None
        self.calls.clear()
        return self

    def after_power_cut(self, rng: random.Random) -> SimulatedDisk:
        """The disk when the power is back, in one of the states it may have. This one stays as it is."""
        after = SimulatedDisk()
        after.directories = set(self.directories)
        entries = dict(self.flushed_entries)
        plain = rng.random() < 0.3
        upto = rng.randrange(len(self.changes) + 1) if plain else len(self.changes)
        for change in self.changes[:upto]:
            if plain or rng.random() < 0.5:
                apply_change(entries, change)
        for path, inode in entries.items():
            content = inode.after_power_cut(rng)
            after.entries[path] = after.flushed_entries[path] = Inode(content, bytearray(content))
        return after


def apply_change(entries: dict[Path, Inode], change: Change) -> None:
    """Carry out one change of names."""
    what, path, new, inode = change
    if what == "remove":
        entries.pop(path, None)
        return
    assert inode is not None
    entries[new or path] = inode
    if new is not None and entries.get(path) is inode:
        del entries[path]
