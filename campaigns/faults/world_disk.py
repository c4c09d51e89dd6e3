"""The journal's disk: files in memory of this machine, of which a killed process leaves behind what it had written.

A flush takes time, and may fail, be late, or find the disk full when a fault says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from campaigns.faults.virtual_time import PROCESS, SimulatedProcess
from campaigns.faults.world_state import WorldState

FLUSH_S = 0.004
ERRORS = {"disk_full": errno.ENOSPC, "write_error": errno.EIO}


class SimulatedOs:
    """``os`` for the journal: its files are closed when the process that opened them ends, and its writes can fail."""

    def __init__(self, world: WorldState) -> None:
        self._world = world
        self._open: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, *arguments: Any) -> int:
        descriptor = os.open(*arguments)
        self._open.add(descriptor)
        _this_process().at_end.append(lambda: self.close(descriptor))
        return descriptor

    def close(self, descriptor: int) -> None:
        if descriptor in self._open:  # not after the end of its process
            self._open.discard(descriptor)
            os.close(descriptor)

    def pwrite(self, descriptor: int, block: bytes, offset: int) -> int:
        process = _this_process()
        if process.dead:
            raise OSError(errno.EIO, "the process was killed before")
        mischief = self._world.faults.take("disk", "torn_write", *ERRORS)
        if mischief == "torn_write":
            os.pwrite(descriptor, block[: len(block) // 2], offset)
            self._world.faults.suspects.add(process.name)
            self._world.machine.kill(process.name)
            raise OSError(errno.EIO, "the process was killed in the middle of a write")
        if mischief in ERRORS:
            raise OSError(ERRORS[mischief], os.strerror(ERRORS[mischief]))
        return os.pwrite(descriptor, block, offset)

    def fdatasync(self, descriptor: int) -> None:
        """Time passes before it: see ``SimulatedThread``."""

    def fsync(self, descriptor: int) -> None:
        """As ``fdatasync``."""


class SimulatedThread:
    """``anyio.to_thread`` for the journal: a write is done at the end of the time that a flush takes."""

    def __init__(self, world: WorldState) -> None:
        self._world = world

    async def run_sync(self, write: Callable[..., None], *arguments: Any) -> None:
        seconds = self._world.random.expovariate(1 / FLUSH_S) + self._world.faults.slow_flush_s
        with anyio.CancelScope(shield=True):
            await anyio.sleep(seconds)
        write(*arguments)


class SimulatedLock:
    """What ``atomic_files.hold_lock`` returns to a process that may be killed."""

    held: dict[Path, SimulatedProcess] = {}

    def __init__(self, path: Path, _refused: object) -> None:
        self._path = path
        holder = self.held.get(path)
        assert holder is None or holder.dead, f"{path} is held already"
        self.held[path] = _this_process()

    def close(self) -> None:
        self.held.pop(self._path, None)


def _this_process() -> SimulatedProcess:
    process = PROCESS.get()
    assert process is not None
    return process
