"""The weights of a simulated engine: fetched, checked, written and hashed as in a real engine, but not used to sample.

``launch/roles.py`` makes one in the process of a simulated engine. Transaction, replica and fetch are those of vLLM's
worker (``weight_receiver.py``), with arrays in place of a model."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from time import monotonic

import numpy as np
from anyio import sleep

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS, OrderDone, WeightAnnouncement
from streamrl.base.types import TextsByName
from streamrl.weights.codec.bits import BitArray, bit_type
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.distance import Location, this_host
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.pull.loaded_checkpoint import CheckpointBase
from streamrl.weights.pull.replica import CheckpointReplica, StagedPatch, StagedVersion, TensorSpec, TensorSpecs
from streamrl.weights.vllm.weight_transaction import StageReport, WeightTransaction

_Write = tuple[str, StagedPatch]
_FIRST_WAIT_S = 0.002
_LONGEST_WAIT_S = 0.05


class SimulatedWeights:
    """Weights of one simulated engine, which starts with the checkpoint in ``model_path`` as a real one does.
    ``replica``: replica of this engine, or one that it shares with the other engines of this machine."""

    def __init__(self, model_path: Path, replica: CheckpointReplica) -> None:
        self._checkpoint = CheckpointBase(model_path)
        self._live: _LiveBits | None = None
        location = Location(this_host())
        self._transaction = WeightTransaction(
            lambda _live, _writes: None, checkpoint=model_path, replica=replica, location=location
        )

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Fetch, check and decode a version in a thread. Raises ``WeightError``; live weights are unchanged then."""
        started = monotonic()
        wait_s = _FIRST_WAIT_S
        self._transaction.begin_stage(announcement)
        while not self._transaction.stage_report().fetched:
            await sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        _raise_failure(self._transaction.stage_report())
        report = self._transaction.finish_stage(self._load)
        _raise_failure(report)
        seconds = monotonic() - started
        return OrderDone(order_id=0, seconds=seconds, payload_bytes=report.payload_bytes, mover=report.mover)

    def commit(self, policy_version: int) -> OrderDone:
        """Write the staged version, and return the state hash of the live arrays. Raises ``WeightError``; the version
        before is live again then."""
        started = monotonic()
        self._transaction.apply(policy_version)
        report = self._transaction.live_report()
        if report.state_hash != report.expected_hash:
            self._transaction.roll_back()
            raise WeightError(
                f"version {policy_version}: the live weights have state hash {report.state_hash:#018x}; announced was "
                f"{report.expected_hash:#018x}"
            )
        self._transaction.finish()
        return OrderDone(order_id=0, seconds=monotonic() - started, state_hash=report.state_hash)

    def checksums(self) -> TextsByName:
        """Return the SHA-256 of every live tensor, by name; empty before the first version."""
        if self._live is None:
            return {}
        return self._live.checksums()

    def close(self) -> None:
        """Stop fetching, and release the shared memory. Idempotent."""
        self._transaction.close()
        self._transaction.replica.close()

    def _load(self, tensors: TensorSpecs) -> _LiveBits:
        self._live = _LiveBits(tensors, self._checkpoint)
        return self._live


class _LiveBits:
    """Arrays in place of a model's parameters, with the methods of ``LiveModel``."""

    def __init__(self, tensors: TensorSpecs, checkpoint: CheckpointBase) -> None:
        self.state_hash = 0
        self._bits = {name: _loaded(spec, checkpoint) for name, spec in tensors.items()}

    def prepare(self, staged: StagedVersion, _: CheckpointReplica) -> list[_Write]:
        """Return the staged patches, which need no preparation."""
        return list(staged.patches.items())

    def apply(self, writes: Sequence[_Write], *, anchor: bool) -> int:
        """Write, and return the new state hash, computed from the live bits before and after the write. It differs from
        the announced one where an element had other bits than the version before, or has others than were written."""
        total = 0 if anchor else self.state_hash
        for name, patch in writes:
            live = self._bits[name]
            if patch.positions is None:
                live[:] = patch.new_bits
                total += hash_range(name, 0, live)
                continue
            total -= hash_elements(name, patch.positions, live[patch.positions])
            live[patch.positions] = patch.new_bits
            total += hash_elements(name, patch.positions, live[patch.positions])
        return total % HASH_MODULUS

    def undo(self, writes: Sequence[_Write], replica: CheckpointReplica) -> None:
        """Copy the bits from the replica, which still holds the version before."""
        for name, _ in writes:
            self._bits[name][:] = replica.bits(name)

    def audit(self, replica: CheckpointReplica) -> int:
        """Compare every element with the replica, and return the state hash. Raises ``WeightError``."""
        for name in replica.tensors:
            wrong = int(np.count_nonzero(self._bits[name] != replica.bits(name)))
            if wrong:
                raise WeightError(
                    f"live tensor {name!r}: {wrong} of {self._bits[name].size} elements differ in an audit, long after "
                    "the commit: something else than a commit wrote to it"
                )
        return sum(hash_range(name, 0, self._bits[name]) for name in replica.tensors) % HASH_MODULUS

    def checksums(self) -> TextsByName:
        """Return the SHA-256 of every tensor, by name."""
        return {name: sha256(bits.tobytes()).hexdigest() for name, bits in self._bits.items()}


def _loaded(spec: TensorSpec, checkpoint: CheckpointBase) -> BitArray:
    """Return the bits of the checkpoint, or zeros where it does not have the tensor in its published form."""
    try:
        return checkpoint.bits_of(ShardSpec(spec.name, spec.dtype, spec.shape, 0, spec.elements)).copy()
    except WeightError:
        return np.zeros(spec.elements, dtype=bit_type(spec.dtype, spec.name))


def _raise_failure(report: StageReport) -> None:
    if report.error:
        raise WeightError(report.error)
