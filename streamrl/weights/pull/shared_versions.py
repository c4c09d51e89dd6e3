"""Versions of the weights that workers of one machine share, in memory without a name, and a directory with two small
files: a lock, which the kernel gives back when its owner dies, and the state, which says what the memory holds.

A memory file descriptor leaves nothing behind once the last process that has it open ends, however that ended. The
state says which processes share it (``MemorySegment``); others open it through ``/proc`` of one of those, as long as
one lives and is of the same user."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.weights.codec.bits import BitArray, BitType, PositionArray, bit_type
from streamrl.weights.pull.replica import StagedPatch, StagedVersion, TensorSpec

_LOCK_POLL_S = 0.02
_ALIGNMENT = 64


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A process that has the memory open, and under which number."""

    pid: int
    descriptor: int


class MemorySegment(msgspec.Struct, frozen=True):
    """Shared memory and who has it open. ``inode`` tells it from another file under a number that was used again."""

    inode: int
    size: int
    holders: tuple[Holder, ...]


class SharedMemory:
    """A mapped segment of this process. Arrays on it stay valid after ``close``, which only gives its number back."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        status = os.fstat(descriptor)
        self.inode = status.st_ino
        self.size = status.st_size
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
    def attach(cls, segment: MemorySegment) -> SharedMemory | None:
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

    def held_with(self, others: Iterable[Holder] = ()) -> MemorySegment:
        """Return the segment that this process and the living ones of ``others`` share."""
        own = Holder(os.getpid(), self.descriptor)
        living = (holder for holder in others if holder.pid != own.pid and os.path.exists(f"/proc/{holder.pid}"))
        return MemorySegment(self.inode, self.size, (own, *living))

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


def _aligned(offset: int) -> int:
    """The next offset at which an array may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Piece(msgspec.Struct, frozen=True):
    """One tensor of a shared version: ``positions_at`` None: all elements. Offsets are in bytes."""

    tensor: str
    count: int
    positions_at: int | None
    bits_at: int


class SharedVersion(msgspec.Struct, frozen=True):
    """Content of a segment of memory: a version complete, or its difference from another one."""

    run_id: str
    policy_version: int
    base_version: int | None
    base_hash: int
    state_hash: int
    payload_bytes: int
    tensors: tuple[TensorSpec, ...]
    pieces: tuple[_Piece, ...]
    memory: MemorySegment

    @property
    def identity(self) -> tuple[int, int]:
        """Version and state hash."""
        return self.policy_version, self.state_hash


class SharedState(msgspec.Struct, frozen=True):
    """``bits``: the replica. ``staged``: the version that was fetched last. ``writing``: ``staged`` is being written
    into ``bits``, or was when the writer died."""

    bits: SharedVersion | None = None
    staged: SharedVersion | None = None
    writing: bool = False


class SharedVersions:
    """``state`` is what is shared, while the lock is held. ``changed`` is called with a new one, once this process has
    mapped what it names. Raises ``OSError`` where memory cannot be shared."""

    def __init__(self, directory: Path, changed: Callable[[SharedState], None]) -> None:
        SharedMemory.create(1).close()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.state = SharedState()
        self._changed = changed
        self._directory = directory
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._one_thread = threading.Lock()  # the file's lock is of the process
        self._locked_by: int | None = None
        self._memories: dict[int, SharedMemory] = {}

    @property
    def locked_here(self) -> bool:
        """Return whether this thread holds the lock."""
        return self._locked_by == threading.get_ident()

    def close(self) -> None:
        """Give back what is shared; the last one removes the directory. Idempotent."""
        if self._lock < 0:
            return
        with suppress(WeightError), self.locked(threading.Event(), _LOCK_POLL_S):
            holders = [h for v in (self.state.bits, self.state.staged) if v is not None for h in v.memory.holders]
            if not any(h.pid != os.getpid() and os.path.exists(f"/proc/{h.pid}") for h in holders):
                shutil.rmtree(self._directory, ignore_errors=True)
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
        os.close(self._lock)
        self._lock = -1

    def share(self, version: StagedVersion, base_hash: int) -> SharedVersion:
        """A copy of ``version`` in memory of its own."""
        pieces = []
        size = 0
        for name, patch in version.patches.items():
            positions_at = None
            if patch.positions is not None:
                positions_at = size
                size = _aligned(size + patch.positions.nbytes)
            pieces.append(_Piece(name, patch.new_bits.size, positions_at, size))
            size = _aligned(size + patch.new_bits.nbytes)
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
            tuple(pieces),
            memory.held_with(),
        )
        for name, copy in self.view(shared).patches.items():
            source = version.patches[name]
            copy.new_bits[:] = source.new_bits
            if copy.positions is not None and source.positions is not None:
                copy.positions[:] = source.positions
        return shared

    def view(self, shared: SharedVersion) -> StagedVersion:
        """A shared version, as arrays on the shared memory."""
        memory = self._memories[shared.memory.inode]
        tensors = {spec.name: spec for spec in shared.tensors}
        patches = {}
        for piece in shared.pieces:
            kind = bit_type(tensors[piece.tensor].dtype, piece.tensor)
            positions = None if piece.positions_at is None else memory.positions(piece.positions_at, piece.count)
            patches[piece.tensor] = StagedPatch(positions, memory.bits(kind, piece.bits_at, piece.count))
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
    def locked(self, stop: threading.Event, longest_s: float | None) -> Iterator[None]:
        """Hold the lock of the machine. Raises ``WeightError`` once ``stop`` is set or ``longest_s`` have passed."""
        waited = 0.0
        while not self._take_lock():
            if stop.wait(_LOCK_POLL_S):
                raise WeightError("waiting for another worker's fetch was stopped")
            waited += _LOCK_POLL_S
            if longest_s is not None and waited > longest_s:
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
        """Read and map what is shared now. Versions that no living process holds are gone."""
        try:
            state = decode_state((self._directory / "state").read_bytes(), str(self._directory))
        except FileNotFoundError:
            state = SharedState()
        except OSError as error:
            raise WeightError(f"{self._directory / 'state'} cannot be read: {error}") from error
        bits = self._attached(state.bits)
        staged = self._attached(state.staged)
        if state.writing and staged is None:
            bits = None  # half of a version was written, and nobody has the rest
        found = SharedState(bits, staged, state.writing and bits is not None)
        if found != state:
            self.keep(found)
        else:
            self._show(found)

    def _attached(self, version: SharedVersion | None) -> SharedVersion | None:
        if version is None:
            return None
        memory = self._memories.get(version.memory.inode)
        if memory is None:
            memory = SharedMemory.attach(version.memory)
            if memory is None:
                return None
            self._memories[memory.inode] = memory
        if any(h.pid == os.getpid() for h in version.memory.holders):
            return version
        return msgspec.structs.replace(version, memory=memory.held_with(version.memory.holders))

    def keep(self, state: SharedState) -> None:
        """Write the state at once or not at all."""
        new = self._directory / "state.new"
        new.write_bytes(msgspec.msgpack.encode(state))
        new.replace(self._directory / "state")
        self._show(state)

    def _show(self, state: SharedState) -> None:
        """Bring what this process has mapped in line with the state."""
        self.state = state
        in_use = {version.memory.inode for version in (state.bits, state.staged) if version is not None}
        for inode in self._memories.keys() - in_use:
            self._memories.pop(inode).close()
        self._changed(state)


def decode_state(content: bytes, directory: str) -> SharedState:
    """Decode the state that a worker wrote for the others. Raises ``WeightError`` for anything else."""
    try:
        return _decoder.decode(content)
    except UNDECODABLE as error:
        raise WeightError(f"the state in {directory} cannot be read: {error}") from error


_decoder = msgspec.msgpack.Decoder(SharedState)
