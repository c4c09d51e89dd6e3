"""Versions of the weights in memory that the vLLM workers of one machine share (``shared_replica.py``), and a directory
with two small files: a lock, which the kernel releases when its owner dies, and the state, which describes the content
of the memory.

The memory has no name (``memfd_create``), and is freed when the last process that has it open ends. The state lists
these processes (``MemorySegment``); another process of the same user opens the memory through ``/proc`` of one that
lives."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from os import getpid
from pathlib import Path
from threading import Event, Lock
from typing import cast

import numpy as np
from msgspec import Struct, msgpack
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.weights.codec.bits import BitArray, BitType, PositionArray, bit_type
from streamrl.weights.pull.replica import StagedPatch, StagedVersion, TensorSpec

_LOCK_POLL_S = 0.02
_ALIGNMENT = 64


class Holder(Struct, frozen=True, array_like=True):
    """A process that has the memory open, and its file descriptor."""

    pid: int
    descriptor: int


class MemorySegment(Struct, frozen=True):
    """Shared memory and the processes that have it open. ``inode``: identity of the memory, since a process may use the
    number of a closed descriptor for another file."""

    inode: int
    size: int
    holders: tuple[Holder, ...]


class SharedMemory:
    """A segment that this process has mapped. Arrays on it stay valid after ``close``, which closes the descriptor
    only."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        status = os.fstat(descriptor)
        self.inode = status.st_ino
        self.size = status.st_size
        self._map = mmap.mmap(descriptor, self.size)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Make a segment of ``size`` bytes. Raises ``OSError`` where the system has no memory for it."""
        descriptor = os.memfd_create("streamrl-weights")
        try:
            os.ftruncate(descriptor, max(size, 1))
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, segment: MemorySegment) -> SharedMemory | None:
        """Open a segment of other processes. Returns None when none of them lives, or the system refuses access."""
        for holder in segment.holders:
            try:
                descriptor = os.open(f"/proc/{holder.pid}/fd/{holder.descriptor}", os.O_RDWR)
            except OSError:
                continue
            status = os.fstat(descriptor)
            if (status.st_ino, status.st_size) == (segment.inode, segment.size):
                return cls(descriptor)
            os.close(descriptor)
        return None

    def held_with(self, holders: Iterable[Holder] = ()) -> MemorySegment:
        """Return the segment as shared by this process and the living ones of ``holders``."""
        holder_here = Holder(getpid(), self.descriptor)
        living = [h for h in holders if h.pid != holder_here.pid and os.path.exists(f"/proc/{h.pid}")]
        return MemorySegment(self.inode, self.size, (holder_here, *living))

    def bits(self, dtype: BitType, offset: int, count: int) -> BitArray:
        """Return ``count`` bit patterns at byte ``offset``."""
        return cast("BitArray", np.frombuffer(self._map, dtype=dtype, count=count, offset=offset))

    def positions(self, offset: int, count: int) -> PositionArray:
        """Return ``count`` positions at byte ``offset``."""
        return np.frombuffer(self._map, dtype=np.int64, count=count, offset=offset)

    def octets(self, offset: int, count: int) -> NDArray[np.uint8]:
        """Return ``count`` bytes at byte ``offset``."""
        return np.frombuffer(self._map, dtype=np.uint8, count=count, offset=offset)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def aligned(offset: int) -> int:
    """Return the next offset at which an array may start."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _SharedPatch(Struct, frozen=True):
    """The patch of one tensor in a segment. ``positions_at``, ``bits_at``: offsets of its arrays in bytes; without
    positions (None) the patch has all elements."""

    tensor: str
    count: int
    positions_at: int | None
    bits_at: int


class SharedVersion(Struct, frozen=True):
    """A version in a segment of memory: complete, or a delta on the version ``base_version``. ``base_hash``: state hash
    of the base. ``patches``: patches of the tensors. ``payload_bytes``: bytes that were fetched for it."""

    run_id: str
    policy_version: int
    base_version: int | None
    base_hash: int
    state_hash: int
    payload_bytes: int
    tensors: tuple[TensorSpec, ...]
    patches: tuple[_SharedPatch, ...]
    memory: MemorySegment

    @property
    def identity(self) -> tuple[int, int]:
        """Version and state hash."""
        return self.policy_version, self.state_hash


class SharedState(Struct, frozen=True):
    """Content of the state file. ``bits``: complete version, the shared replica. ``staged``: version that was fetched
    last. ``writing``: whether a worker writes ``staged`` to ``bits``, or died while it did."""

    bits: SharedVersion | None = None
    staged: SharedVersion | None = None
    writing: bool = False


class SharedVersions:
    """The lock, the state file, and the memory that this process has mapped. ``state``: content of the state file,
    valid while the lock is held. ``changed``: called with each new state, when this process has mapped its memory.
    Raises ``OSError`` where memory cannot be shared."""

    def __init__(self, directory: Path, changed: Callable[[SharedState], None]) -> None:
        SharedMemory.create(1).close()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.state = SharedState()
        self._changed = changed
        self._directory = directory
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._one_thread = Lock()  # the lock of the file excludes other processes only
        self._locked_by: int | None = None
        self._memories: dict[int, SharedMemory] = {}

    @property
    def locked_here(self) -> bool:
        """Return whether this thread holds the lock."""
        return self._locked_by == threading.get_ident()

    def close(self) -> None:
        """Release the shared memory. The last process removes the directory. Idempotent."""
        if self._lock < 0:
            return
        with suppress(WeightError), self.locked(Event(), _LOCK_POLL_S):
            segments = [version.memory for version in (self.state.bits, self.state.staged) if version is not None]
            pids = {holder.pid for segment in segments for holder in segment.holders}
            if not any(pid != getpid() and os.path.exists(f"/proc/{pid}") for pid in pids):
                shutil.rmtree(self._directory, ignore_errors=True)
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
        os.close(self._lock)
        self._lock = -1

    def share(self, version: StagedVersion, base_hash: int) -> SharedVersion:
        """Copy ``version`` to a new segment. ``base_hash``: state hash of its base. Raises ``WeightError`` where there
        is no memory for it."""
        patches = []
        size = 0
        for name, patch in version.patches.items():
            positions_at = None
            if patch.positions is not None:
                positions_at = size
                size = aligned(size + patch.positions.nbytes)
            patches.append(_SharedPatch(name, patch.new_bits.size, positions_at, size))
            size = aligned(size + patch.new_bits.nbytes)
        try:
            memory = SharedMemory.create(size)
        except OSError as error:
            raise WeightError(f"{size} bytes of shared memory are not to be had: {error}") from error
        self._memories[memory.inode] = memory
        shared = SharedVersion(
            version.run_id,
            version.policy_version,
            version.base_version,
            0 if version.base_version is None else base_hash,
            version.state_hash,
            version.payload_bytes,
            tuple(version.tensors.values()),
            tuple(patches),
            memory.held_with(),
        )
        for name, copy in self.view(shared).patches.items():
            source = version.patches[name]
            copy.new_bits[:] = source.new_bits
            if copy.positions is not None and source.positions is not None:
                copy.positions[:] = source.positions
        return shared

    def view(self, shared: SharedVersion) -> StagedVersion:
        """Return a shared version with arrays on the shared memory."""
        memory = self._memories[shared.memory.inode]
        tensors = {spec.name: spec for spec in shared.tensors}
        patches = {}
        for patch in shared.patches:
            dtype = bit_type(tensors[patch.tensor].dtype, patch.tensor)
            positions = None if patch.positions_at is None else memory.positions(patch.positions_at, patch.count)
            patches[patch.tensor] = StagedPatch(positions, memory.bits(dtype, patch.bits_at, patch.count))
        return StagedVersion(
            shared.policy_version,
            shared.base_version,
            shared.state_hash,
            tensors,
            patches,
            shared.payload_bytes,
            shared.run_id,
        )

    @contextmanager
    def locked(self, stop: Event, longest_s: float | None) -> Iterator[None]:
        """Hold the lock of the machine, with the state read. Raises ``WeightError`` once ``stop`` is set or
        ``longest_s`` have passed."""
        waited_s = 0.0
        while not self._take_lock():
            if stop.wait(_LOCK_POLL_S):
                raise WeightError("waiting for another worker's fetch was stopped")
            waited_s += _LOCK_POLL_S
            if longest_s is not None and waited_s > longest_s:
                raise WeightError(f"another worker of this machine kept the replica for {longest_s:g} s")
        try:
            self._locked_by = threading.get_ident()
            self._read_state()
            yield
        finally:
            self._locked_by = None
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._one_thread.release()

    def _take_lock(self) -> bool:
        if not self._one_thread.acquire(blocking=False):
            return False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._one_thread.release()
            return False
        return True

    def _read_state(self) -> None:
        """Read the state file and map its memory. Versions that no living process has open are removed from the
        state."""
        try:
            state = decode_state((self._directory / "state").read_bytes(), str(self._directory))
        except FileNotFoundError:
            state = SharedState()
        except OSError as error:
            raise WeightError(f"{self._directory / 'state'} cannot be read: {error}") from error
        bits = self._attached(state.bits)
        staged = self._attached(state.staged)
        if state.writing and staged is None:
            bits = None  # the staged version was half written, and is lost
        attached = SharedState(bits, staged, state.writing and bits is not None)
        if attached != state:
            self.keep(attached)
        else:
            self._show(attached)

    def _attached(self, version: SharedVersion | None) -> SharedVersion | None:
        """Map the memory of a version, and add this process to its holders. Returns None where the memory is gone."""
        if version is None:
            return None
        memory = self._memories.get(version.memory.inode)
        if memory is None:
            memory = SharedMemory.attach(version.memory)
            if memory is None:
                return None
            self._memories[memory.inode] = memory
        if any(holder.pid == getpid() for holder in version.memory.holders):
            return version
        return replace(version, memory=memory.held_with(version.memory.holders))

    def keep(self, state: SharedState) -> None:
        """Write the state file, atomically."""
        new_file = self._directory / "state.new"
        new_file.write_bytes(msgpack.encode(state))
        new_file.replace(self._directory / "state")
        self._show(state)

    def _show(self, state: SharedState) -> None:
        """Use ``state`` in this process, and close memory that is not in it."""
        self.state = state
        in_use = {version.memory.inode for version in (state.bits, state.staged) if version is not None}
        for inode in self._memories.keys() - in_use:
            self._memories.pop(inode).close()
        self._changed(state)


def decode_state(content: bytes, directory: str) -> SharedState:
    """Decode the state file that a worker wrote for the others. Raises ``WeightError`` for other bytes."""
    try:
        return _decoder.decode(content)
    except UNDECODABLE as error:
        raise WeightError(f"the state in {directory} cannot be read: {error}") from error


_decoder = msgpack.Decoder(SharedState)
