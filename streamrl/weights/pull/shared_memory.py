"""Anonymous memory that processes of one machine share, and that is gone when the last of them is, however it ended.

A memory file descriptor has no name that could be left behind. Who shares it is written down (``Segment``); others open
it through ``/proc`` of one of those, as long as one lives and is of the same user.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import cast

import msgspec
import numpy as np

from streamrl.weights.codec.bits import BitArray, BitType, PositionArray

_ALIGNMENT = 64


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A process that has the memory open, and under which number."""

    pid: int
    descriptor: int


class Segment(msgspec.Struct, frozen=True):
    """Shared memory and who has it open. ``inode`` tells it from another file under a number that was used again."""

    inode: int
    size: int
    holders: tuple[Holder, ...]


class SharedMemory:
    """A mapped segment of this process. Arrays on it stay valid after ``close``, which only gives its number back."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        status = os.fstat(descriptor)
        self.inode, self.size = status.st_ino, status.st_size
        self._map = mmap.mmap(descriptor, self.size)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Raises ``OSError`` where there is no such memory."""
        descriptor = os.memfd_create("streamrl-weights")
        try:
            os.ftruncate(descriptor, max(size, 1))
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, segment: Segment) -> SharedMemory | None:
        """Open what others share; None when none of them is left, or lets us."""
        for holder in segment.holders:
            try:
                descriptor = os.open(f"/proc/{holder.pid}/fd/{holder.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            status = os.fstat(descriptor)
            if (status.st_ino, status.st_size) == (segment.inode, segment.size):
                return cls(descriptor)
            os.close(descriptor)
        return None

    def held_with(self, others: Iterable[Holder] = ()) -> Segment:
        """As a segment of this process and those of ``others`` that live."""
        own = Holder(os.getpid(), self.descriptor)
        living = (holder for holder in others if holder.pid != own.pid and os.path.exists(f"/proc/{holder.pid}"))
        return Segment(self.inode, self.size, (own, *living))

    def bits(self, dtype: BitType, offset: int, count: int) -> BitArray:
        """``count`` bit patterns at byte ``offset``."""
        return cast("BitArray", np.frombuffer(self._map, dtype=dtype, count=count, offset=offset))

    def positions(self, offset: int, count: int) -> PositionArray:
        """``count`` positions at byte ``offset``."""
        return np.frombuffer(self._map, dtype=np.int64, count=count, offset=offset)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def aligned(offset: int) -> int:
    """The next offset at which an array may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
