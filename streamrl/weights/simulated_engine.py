"""The weights of a simulated engine: fetched, checked, written and hashed as those of a real one, and used for nothing.

The same transaction, replica and fetch as in vLLM's worker (``weight_receiver``), with arrays in place of a model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import msgspec
import numpy as np

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS, OrderDone, WeightAnnouncement
from streamrl.weights.codec.bits import BitArray, PositionArray, bit_type
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.loaded_checkpoint import CheckpointBase
from streamrl.weights.pull.replica import CheckpointReplica, StagedVersion, TensorSpec
from streamrl.weights.vllm.weight_transaction import StageReport, WeightTransaction

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.002, 0.05


class SimulatedWeights:
    """What one simulated engine holds. It has loaded the checkpoint in ``model_path``, as a real one does.

    ``replica``: shared with the other engines of this machine, or its own.
    """

    def __init__(self, model_path: Path, replica: CheckpointReplica) -> None:
        self._checkpoint = CheckpointBase(model_path)
        self._live: _LiveBits | None = None
        self._transaction = WeightTransaction(lambda _live, _writes: None, checkpoint=model_path, replica=replica)

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Fetch, check and decode in a thread. Raises ``WeightError``; nothing live has changed then."""
        began, wait_s = time.monotonic(), _FIRST_WAIT_S
        self._transaction.begin_stage(announcement)
        while not self._transaction.stage_report().fetched:
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        _raise_failure(self._transaction.stage_report())
        report = self._transaction.finish_stage(self._load)
        _raise_failure(report)
        return OrderDone(order_id=0, seconds=time.monotonic() - began, payload_bytes=report.payload_bytes)

    def commit(self, policy_version: int) -> OrderDone:
        """Write the staged version, read it back, and say what state hash the live arrays have. Raises ``WeightError``;
        what was live before is live again then."""
        began = time.monotonic()
        self._transaction.apply(policy_version)
        applied = self._transaction.live_report()
        if applied.state_hash != applied.expected_hash:
            self._transaction.roll_back()
            raise WeightError(
                f"version {policy_version}: the live weights have state hash {applied.state_hash:#018x}; announced was "
                f"{applied.expected_hash:#018x}"
            )
        self._transaction.finish()
        return OrderDone(order_id=0, seconds=time.monotonic() - began, state_hash=applied.state_hash)

    def checksums(self) -> dict[str, str]:
        """SHA-256 of every live tensor; none before the first version."""
        return {} if self._live is None else self._live.checksums()

    def close(self) -> None:
        """Stop fetching, and give back what is shared. Idempotent."""
        self._transaction.close()
        self._transaction.replica.close()

    def _load(self, tensors: Mapping[str, TensorSpec]) -> _LiveBits:
        self._live = _LiveBits(tensors, self._checkpoint)
        return self._live


class _Write(msgspec.Struct, frozen=True, eq=False):
    """``positions`` and ``old_bits`` None: all elements, whatever is there. ``hash_change``: to the state hash."""

    tensor: str
    positions: PositionArray | None
    new_bits: BitArray
    old_bits: BitArray | None
    hash_change: int


class _LiveBits:
    """Arrays in place of a model's parameters: a ``LiveModel``."""

    def __init__(self, tensors: Mapping[str, TensorSpec], checkpoint: CheckpointBase) -> None:
        self.state_hash = 0
        self._bits = {name: _loaded(spec, checkpoint) for name, spec in tensors.items()}

    def prepare(self, staged: StagedVersion, replica: CheckpointReplica) -> list[_Write]:
        """What it adds to the hash is known before the engine pauses."""
        writes = []
        for name, patch in staged.patches.items():
            if patch.positions is None:
                change = hash_range(name, 0, patch.new_bits)
                writes.append(_Write(name, None, patch.new_bits, None, change))
                continue
            old = replica.bits(name)[patch.positions]
            change = hash_elements(name, patch.positions, patch.new_bits) - hash_elements(name, patch.positions, old)
            writes.append(_Write(name, patch.positions, patch.new_bits, old, change))
        return writes

    def apply(self, writes: Sequence[_Write], *, anchor: bool) -> int:
        """Compare with what should be there, write, read back. Returns the new state hash."""
        for write in writes:
            if write.old_bits is not None:
                self._compare(write, write.old_bits, "before")
            self._bits[write.tensor][_places(write)] = write.new_bits
            self._compare(write, write.new_bits, "after")
        return (sum(write.hash_change for write in writes) + (0 if anchor else self.state_hash)) % HASH_MODULUS

    def undo(self, writes: Sequence[_Write], replica: CheckpointReplica) -> None:
        """From the replica, which still holds the version before."""
        for write in writes:
            places = _places(write)
            self._bits[write.tensor][places] = replica.bits(write.tensor)[places]

    def audit(self, replica: CheckpointReplica) -> int:
        """Every element, against the replica. Returns the state hash."""
        total = 0
        for name in replica.tensors:
            whole = _Write(name, None, replica.bits(name), None, 0)
            self._compare(whole, whole.new_bits, "in an audit, long after")
            total += hash_range(name, 0, self._bits[name])
        return total % HASH_MODULUS

    def checksums(self) -> dict[str, str]:
        """By tensor."""
        return {name: hashlib.sha256(bits.tobytes()).hexdigest() for name, bits in self._bits.items()}

    def _compare(self, write: _Write, expected: BitArray, moment: str) -> None:
        wrong = int(np.count_nonzero(self._bits[write.tensor][_places(write)] != expected))
        if wrong:
            raise WeightError(
                f"live tensor {write.tensor!r}: {wrong} of {expected.size} elements differ {moment} the commit: "
                "something else than a commit wrote to it"
            )


def _places(write: _Write) -> PositionArray | slice:
    return slice(None) if write.positions is None else write.positions


def _loaded(spec: TensorSpec, checkpoint: CheckpointBase) -> BitArray:
    """The checkpoint's own bits, where it has the tensor as it is published; zeros elsewhere."""
    try:
        return checkpoint.bits_of(ShardSpec(spec.name, spec.dtype, spec.shape, 0, spec.elements)).copy()
    except WeightError:
        return np.zeros(spec.elements, dtype=bit_type(spec.dtype, spec.name))


def _raise_failure(report: StageReport) -> None:
    if report.error:
        raise WeightError(report.error)
