"""The journal's disk: files in memory of this machine, of which a killed process leaves behind what it had written.

A flush takes time, and may fail, be late, or find the disk full when a fault says so.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from campaigns.faults.virtual_time import PROCESS, SimulatedProcess
from streamrl.journal.journal_disk import LocalDisk

if TYPE_CHECKING:
    from campaigns.faults.world import World

FLUSH_S = 0.004
ERRORS = {"disk_full": errno.ENOSPC, "write_error": errno.EIO}


class SimulatedDisk(LocalDisk):
    """A ``buffers.journal_disk.Disk`` for the process that makes it; its locks and descriptors end with it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._process = _this_process()
        self._open: set[int] = set()
        self._process.at_end.append(self._close_all)

    def create(self, path: Path) -> int:
        return self._opened(super().create(path))

    def open(self, path: Path) -> int:
        return self._opened(super().open(path))

    def lock(self, path: Path, holder: str) -> int:
        return self._opened(super().lock(path, holder))

    def write(self, descriptor: int, block: bytes, offset: int) -> int:
        if self._process.dead:
            raise OSError(errno.EIO, "the process was killed before")
        mischief = self._world.faults.take("disk", "torn_write", *ERRORS)
        if mischief == "torn_write":
            super().write(descriptor, block[: len(block) // 2], offset)
            self._world.faults.suspects.add(self._process.name)
            self._world.machine.kill(self._process.name)
            raise OSError(errno.EIO, "the process was killed in the middle of a write")
        if mischief in ERRORS:
            raise OSError(ERRORS[mischief], os.strerror(ERRORS[mischief]))
        return super().write(descriptor, block, offset)

    def flush(self, descriptor: int) -> None:
        """Time passes before it: see ``Writer``."""

    def flush_directory(self, directory: Path) -> None:
        """As ``flush``."""

    def close(self, descriptor: int) -> None:
        if descriptor in self._open:  # not after the end of its process, which closes them all
            self._open.discard(descriptor)
            super().close(descriptor)

    def _opened(self, descriptor: int) -> int:
        self._open.add(descriptor)
        return descriptor

    def _close_all(self) -> None:
        for descriptor in list(self._open):
            self.close(descriptor)


class Writer:
    """The journal's thread: its work is done at the end of the time that a flush takes."""

    def __init__(self, world: World, work: Callable[[], bool]) -> None:
        self._world = world
        self._work = work
        self._due = False
        self._ended = False

    def wake(self) -> None:
        if not self._due:
            self._due = True
            seconds = self._world.random.expovariate(1 / FLUSH_S) + self._world.faults.slow_flush_s
            self._world.loop.call_later(seconds, self._run)

    def join(self) -> None:
        while not self._ended:
            self._ended = self._work()

    def _run(self) -> None:
        self._due = False
        if not self._ended:
            self._ended = self._work()


class SimulatedLock:
    """``processes.run_lock.RunLock`` of a process that may be killed."""

    held: dict[Path, SimulatedProcess] = {}

    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory
        holder = self.held.get(run_directory)
        assert holder is None or holder.dead, f"{run_directory} runs already"
        self.held[run_directory] = _this_process()

    def release(self) -> None:
        self.held.pop(self._path, None)


def _this_process() -> SimulatedProcess:
    process = PROCESS.get()
    assert process is not None
    return process
