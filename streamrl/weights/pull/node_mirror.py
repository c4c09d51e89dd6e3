"""One mirror of the checkpoint bits for all engine workers of a machine, and one fetch of each version.

Whoever is first to stage an announced version fetches it for all; the others find it decoded in shared memory. Beside
the memory (``node_memory``) there is a directory with two small files: a lock, which the kernel gives back when its
owner dies, and the state, which says what the memory holds. Nothing is fetched, written or looked up without the lock.

The shared bits advance to a version when the next one is staged, whose base it is. A worker that is not at their
version (it was late, or restarted) takes all bits of the staged one, copied from memory: none of that comes from the
trainer.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.codec.bits import BitArray, bit_type
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.manifest import CHECKPOINT_VERSION, MODULUS
from streamrl.weights.pull.decoding import HeldWeights
from streamrl.weights.pull.fetch import FetchedVersion
from streamrl.weights.pull.mirror import CheckpointMirror, StagedPatch, StagedVersion, TensorSpec
from streamrl.weights.pull.node_memory import Segment, SharedMemory, aligned

_LOCK_POLL_S = 0.02
_LONGEST_WAIT_S = 60.0  # outside of staging, where an engine stands still meanwhile


class _Piece(msgspec.Struct, frozen=True):
    """One tensor of a shared version: ``positions_at`` None: all elements. Offsets are in bytes."""

    tensor: str
    count: int
    positions_at: int | None
    bits_at: int


class _SharedVersion(msgspec.Struct, frozen=True):
    """What a segment of memory holds: a version complete, or how it differs from another one."""

    run_id: str
    policy_version: int
    base_version: int | None
    base_hash: int
    state_hash: int
    payload_bytes: int
    tensors: tuple[TensorSpec, ...]
    pieces: tuple[_Piece, ...]
    memory: Segment

    @property
    def identity(self) -> tuple[int, int]:
        """Version and state hash."""
        return self.policy_version, self.state_hash


class _NodeState(msgspec.Struct, frozen=True):
    """``bits``: the mirror. ``staged``: the version that was fetched last. ``writing``: ``staged`` is being written
    into ``bits``, or was when the writer died."""

    bits: _SharedVersion | None = None
    staged: _SharedVersion | None = None
    writing: bool = False


class NodeMirror(CheckpointMirror):
    """What one worker holds, with the bits of it shared. Made with the same ``directory``, workers share.

    ``policy_version`` and ``state_hash`` are the worker's own. Raises ``OSError`` where memory cannot be shared.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        SharedMemory.create(1).close()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._one_thread = threading.Lock()  # the file's lock is of the process
        self._locked_by: int | None = None
        self._state = _NodeState()
        self._shared = CheckpointMirror()
        self._memories: dict[int, SharedMemory] = {}

    # ---- as the mirror of one worker ---------------------------------------------------------------

    @property
    def at_hand(self) -> bool:
        """Whether the shared bits are those of this worker's version."""
        return self._own == (self._shared.policy_version, self._shared.state_hash)

    def bits(self, name: str) -> BitArray:
        """All elements of a tensor at this worker's version: shared while it stages, else a copy."""
        if self._locked_by == threading.get_ident():
            return self._own_bits(name)
        with self._holding_lock(threading.Event(), _LONGEST_WAIT_S):
            return self._own_bits(name).copy()

    def catch_up(self) -> None:
        """Done by ``staging``."""

    def advance(self, staged: StagedVersion) -> None:
        """Take over a committed version. Its bits follow when the next one is staged. Idempotent."""
        self.tensors = dict(staged.tensors)
        self.policy_version, self.state_hash, self.run_id = staged.policy_version, staged.state_hash, staged.run_id

    def clear(self) -> None:
        """This worker holds nothing (any more); what is shared stays."""
        self.policy_version, self.state_hash, self.run_id = None, 0, ""

    @contextmanager
    def staging(self, announced: WeightAnnouncement, stop: threading.Event) -> Iterator[None]:
        """The time in which ``announced`` is fetched, or found. One worker of the machine at a time."""
        with self._holding_lock(stop, None):
            self._advance_shared(announced)
            yield

    def stage_announced(
        self, announced: WeightAnnouncement, fetch: Callable[[HeldWeights], FetchedVersion], *, on_checkpoint: bool
    ) -> StagedVersion:
        """See ``CheckpointMirror``. Fetches only what nobody here has."""
        wanted = (announced.policy_version, announced.state_hash)
        bits, staged = self._state.bits, self._state.staged
        if (staged is None or staged.identity != wanted) and (bits is None or bits.identity != wanted):
            fetched = fetch(self._shared)
            if fetched.checkpoint is not None:
                self._share_checkpoint(fetched)
            staged = self._share(self._shared.stage(fetched), self._shared.state_hash)
            self._keep(_NodeState(self._state.bits, staged))
        elif staged is not None and staged.identity != wanted:
            staged = None
        if staged is not None and staged.base_version is None:
            return self._staged_version(staged)
        if staged is not None and on_checkpoint and staged.base_version == CHECKPOINT_VERSION:
            self.policy_version, self.state_hash = staged.base_version, staged.base_hash
            self.tensors = {spec.name: spec for spec in staged.tensors}
            return self._staged_version(staged)
        on_own = staged is not None and self._own == (staged.base_version, staged.base_hash)
        if staged is not None and on_own and announced.base_version is not None:
            return self._staged_version(staged)
        return self._complete(wanted, staged)

    def close(self) -> None:
        """Give back what is shared; the last one removes the directory. Idempotent."""
        if self._lock < 0:
            return
        with suppress(WeightError), self._holding_lock(threading.Event(), _LOCK_POLL_S):
            holders = [h for v in (self._state.bits, self._state.staged) if v is not None for h in v.memory.holders]
            if not any(h.pid != os.getpid() and os.path.exists(f"/proc/{h.pid}") for h in holders):
                shutil.rmtree(self._directory, ignore_errors=True)
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
        os.close(self._lock)
        self._lock = -1

    # ---- what is shared ----------------------------------------------------------------------------

    @property
    def _own(self) -> tuple[int | None, int]:
        return self.policy_version, self.state_hash

    def _own_bits(self, name: str) -> BitArray:
        if not self.at_hand:
            raise WeightError(
                f"the mirror of this machine holds version {self._shared.policy_version}, this engine "
                f"{self.policy_version}: publish an anchor"
            )
        return self._shared.bits(name)

    def _complete(self, wanted: tuple[int, int], staged: _SharedVersion | None) -> StagedVersion:
        """All bits of a version: those that are shared, with ``staged`` on them."""
        patches = {} if staged is None else self._staged_version(staged).patches
        complete, state_hash = {}, 0
        for name in self._shared.tensors:
            bits, patch = self._shared.bits(name).copy(), patches.get(name)
            if patch is not None:
                bits[patch.positions] = patch.new_bits
            complete[name] = StagedPatch(None, bits)
            state_hash += hash_range(name, 0, bits)
        if state_hash % MODULUS != wanted[1]:
            raise WeightError(
                f"version {wanted[0]} would have state hash {state_hash % MODULUS:#018x} from the mirror of this "
                f"machine; announced was {wanted[1]:#018x}"
            )
        run_id = self._shared.run_id if staged is None else staged.run_id
        return StagedVersion(wanted[0], None, wanted[1], self._shared.tensors, complete, 0, run_id)

    def _advance_shared(self, announced: WeightAnnouncement) -> None:
        """Write the staged version into the shared bits once a version is announced on it, or this worker holds it."""
        bits, staged = self._state.bits, self._state.staged
        if staged is None or not (
            self._state.writing or staged.identity == self._own or staged.policy_version == announced.base_version
        ):
            return
        if staged.base_version is None:
            self._keep(_NodeState(staged))
            return
        if bits is None or (bits.policy_version, bits.state_hash) != (staged.base_version, staged.base_hash):
            return
        self._keep(_NodeState(bits, staged, writing=True))
        for name, patch in self._staged_version(staged).patches.items():
            self._shared.bits(name)[patch.positions if patch.positions is not None else slice(None)] = patch.new_bits
        now = msgspec.structs.replace(
            bits, policy_version=staged.policy_version, state_hash=staged.state_hash, run_id=staged.run_id
        )
        self._keep(_NodeState(now))

    def _share_checkpoint(self, fetched: FetchedVersion) -> None:
        assert fetched.checkpoint is not None
        begun = CheckpointMirror()
        begun.begin(fetched.checkpoint)
        patches = {name: StagedPatch(None, begun.bits(name)) for name in begun.tensors}
        whole = StagedVersion(CHECKPOINT_VERSION, None, begun.state_hash, begun.tensors, patches, 0)
        self._keep(_NodeState(self._share(whole, 0)))

    def _share(self, version: StagedVersion, base_hash: int) -> _SharedVersion:
        """A copy of ``version`` in memory of its own."""
        pieces, size = [], 0
        for name, patch in version.patches.items():
            positions_at = None
            if patch.positions is not None:
                positions_at, size = size, aligned(size + patch.positions.nbytes)
            pieces.append(_Piece(name, patch.new_bits.size, positions_at, size))
            size = aligned(size + patch.new_bits.nbytes)
        try:
            memory = SharedMemory.create(size)
        except OSError as error:
            raise WeightError(f"{size} bytes of shared memory are not to be had: {error}") from error
        self._memories[memory.inode] = memory
        shared = _SharedVersion(
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
        for name, copy in self._staged_version(shared).patches.items():
            source = version.patches[name]
            copy.new_bits[:] = source.new_bits
            if copy.positions is not None and source.positions is not None:
                copy.positions[:] = source.positions
        return shared

    def _staged_version(self, shared: _SharedVersion) -> StagedVersion:
        """Arrays on the shared memory."""
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

    # ---- the two files -----------------------------------------------------------------------------

    @contextmanager
    def _holding_lock(self, stop: threading.Event, longest_s: float | None) -> Iterator[None]:
        waited = 0.0
        while not self._take_lock():
            if stop.wait(_LOCK_POLL_S):
                raise WeightError("waiting for another worker's fetch was stopped")
            waited += _LOCK_POLL_S
            if longest_s is not None and waited > longest_s:
                raise WeightError(f"another worker of this machine kept the mirror for {longest_s:g} s")
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
        """What is shared now, mapped. What nobody alive holds any more is gone."""
        try:
            state = decode_state((self._directory / "state").read_bytes(), str(self._directory))
        except FileNotFoundError:
            state = _NodeState()
        except OSError as error:
            raise WeightError(f"{self._directory / 'state'} cannot be read: {error}") from error
        bits, staged = self._attached(state.bits), self._attached(state.staged)
        if state.writing and staged is None:
            bits = None  # half of a version was written, and nobody has the rest
        found = _NodeState(bits, staged, state.writing and bits is not None)
        if found != state:
            self._keep(found)
        else:
            self._show(found)

    def _attached(self, version: _SharedVersion | None) -> _SharedVersion | None:
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

    def _keep(self, state: _NodeState) -> None:
        """Write the state at once or not at all."""
        new = self._directory / "state.new"
        new.write_bytes(msgspec.msgpack.encode(state))
        new.replace(self._directory / "state")
        self._show(state)

    def _show(self, state: _NodeState) -> None:
        """Bring what this process has mapped in line with the state."""
        self._state = state
        in_use = {version.memory.inode for version in (state.bits, state.staged) if version is not None}
        for inode in self._memories.keys() - in_use:
            self._memories.pop(inode).close()
        if state.bits is None:
            self._shared.clear()
            return
        whole = self._staged_version(state.bits)
        self._shared.show(whole, {name: patch.new_bits for name, patch in whole.patches.items()})


def decode_state(content: bytes, directory: str) -> _NodeState:
    """What a worker wrote down for the others. Raises ``WeightError`` for anything else."""
    try:
        return _decoder.decode(content)
    except UNDECODABLE as error:
        raise WeightError(f"the state in {directory} cannot be read: {error}") from error


def node_directory(parent: Path, key: str) -> Path:
    """Where the workers with the same ``key`` meet."""
    return parent / f"streamrl-mirror-{key}"


def shared_mirror(run: str, model: str, parent: Path) -> CheckpointMirror:
    """The mirror that everybody with the same ``run`` and ``model`` shares, whose files are in ``parent``. Where memory
    cannot be shared, one of this process's own."""
    key = hashlib.blake2b(f"{run} {model}".encode(), digest_size=8).hexdigest()
    try:
        return NodeMirror(node_directory(parent, key))
    except (OSError, AttributeError) as error:  # no memfd here
        _logger.warning("this worker keeps a mirror of its own, since memory cannot be shared: %s", error)
        return CheckpointMirror()


_logger = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(_NodeState)
