"""The bits of a trainer rank's newest version, in memory that engines of the same host map.

``publish.publisher`` creates the memory in the rank's process, ``memory_fetch`` attaches it in vLLM's worker processes.
It starts with the number of the version, which is ``NO_VERSION`` while the rank writes: a reader compares it before and
after. Then comes a table of the work units, and then their bits, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence
from os import getpid

import numpy as np
from msgspec import Struct, msgpack

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.base.messages import MemoryHandle
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.distance import this_host
from streamrl.weights.manifest import WorkUnit
from streamrl.weights.pull.shared_versions import Holder, MemorySegment, SharedMemory, aligned

NO_VERSION = -2
_TABLE_AT = 64


class MemoryTable(Struct, frozen=True):
    """Table of the memory. ``units``: work units of the rank. ``device``: encoded handle of the same bits on the rank's
    GPU (empty: none)."""

    run_id: str
    units: tuple[WorkUnit, ...]
    device: bytes = b""


_decoder = msgpack.Decoder(MemoryTable)


class TrainerMemory:
    """Memory with the bits of a version, as the rank that writes it or an engine that reads it has it mapped.
    ``bits``: bits of each unit (uint16 or uint32 [count]). ``handle``: handle for other processes."""

    def __init__(self, memory: SharedMemory, handle: MemoryHandle, table: MemoryTable) -> None:
        self.handle = handle
        self.table = table
        self._memory = memory
        self._header = memory.positions(0, 2)
        self.bits: list[BitArray] = []
        start = _first_bits(int(self._header[1]))
        for unit in table.units:
            self.bits.append(memory.bits(unit.bits, start, unit.count))
            start = aligned(start + unit.count * unit.bits.itemsize)

    @classmethod
    def create(cls, run_id: str, units: Sequence[WorkUnit], device: tuple[str, bytes]) -> TrainerMemory:
        """Make the memory of ``units``, without a version. ``device``: UUID of the GPU that has the bits too, and the
        encoded handle of its memory. Raises ``OSError`` where the system has no memory for it."""
        table = MemoryTable(run_id, tuple(units), device[1])
        encoded = msgpack.encode(table)
        size = _first_bits(len(encoded))
        for unit in units:
            size = aligned(size + unit.count * unit.bits.itemsize)
        memory = SharedMemory.create(size)
        memory.positions(0, 2)[:] = NO_VERSION, len(encoded)
        memory.octets(_TABLE_AT, len(encoded))[:] = np.frombuffer(encoded, np.uint8)
        place = (this_host(), getpid(), memory.descriptor, memory.inode, memory.size)
        return cls(memory, MemoryHandle(*place, device[0]), table)

    @classmethod
    def attach(cls, handle: MemoryHandle) -> TrainerMemory:
        """Map the memory of a rank of this host. Raises ``WeightError`` where the rank has ended, or the system refuses
        access."""
        segment = MemorySegment(handle.inode, handle.size, (Holder(handle.pid, handle.descriptor),))
        memory = SharedMemory.attach(segment)
        if memory is None:
            raise WeightError(f"the memory of the trainer's process {handle.pid} cannot be opened: has it ended?")
        try:
            size = int(memory.positions(0, 2)[1])
            table = _decoder.decode(memory.octets(_TABLE_AT, size).tobytes())
            return cls(memory, handle, table)
        except (*UNDECODABLE, ValueError) as error:
            memory.close()
            raise WeightError(f"the memory of the trainer's process {handle.pid} cannot be read: {error}") from error

    @property
    def version(self) -> int:
        """Number of the version whose bits these are, or ``NO_VERSION``."""
        return int(self._header[0])

    @version.setter
    def version(self, version: int) -> None:
        self._header[0] = version

    def check(self, version: int) -> None:
        """Raise ``WeightError`` unless the bits are those of ``version``."""
        if self.version != version:
            raise WeightError(f"the trainer's memory has version {self.version}; announced was {version}")

    def close(self) -> None:
        """Close the file. Idempotent. The arrays stay valid."""
        self._memory.close()


def _first_bits(table_bytes: int) -> int:
    return aligned(_TABLE_AT + table_bytes)
