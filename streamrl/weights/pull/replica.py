"""The replica: the weights of an engine as checkpoint bits, the base of deltas and the source to undo a failed commit.

``vllm/weight_transaction.py`` keeps one in each vLLM worker's process, or shares one between the workers of a machine
(``shared_replica.py``). Pure numpy. A staged version is complete and checked before live weights change, so that a
commit only copies absolute values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from threading import Event, Lock
from typing import Any

import numpy as np
from msgspec import Struct

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement
from streamrl.base.types import Shape
from streamrl.weights.codec.bits import BitArray, PositionArray, bit_type
from streamrl.weights.codec.codec import WeightPatch
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.manifest import CHECKPOINT_VERSION, ShardSpec


class TensorSpec(Struct, frozen=True):
    """A checkpoint tensor: name, published dtype, full shape."""

    name: str
    dtype: str
    shape: Shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


TensorSpecs = Mapping[str, TensorSpec]
"""Tensors of a checkpoint by name."""


class StagedPatch(Struct, frozen=True, eq=False):
    """New bits of one tensor. ``positions``: int64 [n], flat in the full tensor, strictly increasing, or None for all
    elements. ``new_bits``: uint16 or uint32 [n]."""

    positions: PositionArray | None
    new_bits: BitArray


class StagedVersion(Struct, frozen=True, eq=False):
    """A version that was checked to fit on the version of the replica. ``base_version``: version that it changes; None
    for an anchor. ``state_hash``: hash of all weights, computed from the bits. ``tensors``: all published tensors.
    ``patches``: changes by tensor. ``payload_bytes``: fetched bytes. ``run_id``: run that published it. ``device``:
    the trainer's memory on the GPU of this worker, with all bits of each tensor (int16, flat), in place of patches."""

    policy_version: int
    base_version: int | None
    state_hash: int
    tensors: TensorSpecs
    patches: Mapping[str, StagedPatch]
    payload_bytes: int
    run_id: str = ""
    device: Mapping[str, Any] | None = None

    @property
    def is_anchor(self) -> bool:
        """Return whether the version is complete, not a delta."""
        return self.base_version is None


class ShardPatch(Struct, frozen=True, eq=False):
    """The decoded patch of one shard, with positions relative to the shard."""

    shard: ShardSpec
    patch: WeightPatch


class FetchedVersion(Struct, frozen=True, eq=False):
    """An announced version, decoded, with all digests checked. ``base_version``, ``base_hash``: version and state hash
    of its base, which the receiver held; None and 0 for an anchor. ``run_id``: run that published it. ``checkpoint``:
    the checkpoint as a complete version, where it is the base (``base_version`` is ``CHECKPOINT_VERSION``)."""

    announcement: WeightAnnouncement
    base_version: int | None
    base_hash: int
    patches: Sequence[ShardPatch]
    payload_bytes: int
    run_id: str = ""
    checkpoint: StagedVersion | None = None


class CheckpointReplica:
    """The bits of every checkpoint tensor at the committed version. Empty until the first version.

    ``advance`` only keeps the patches, because requests of a paused engine wait for it. ``catch_up`` writes them to the
    bits; every method that reads bits calls it first."""

    def __init__(self) -> None:
        self.run_id = ""
        self.policy_version: int | None = None
        self.state_hash = 0
        self.tensors: dict[str, TensorSpec] = {}
        self._bits: dict[str, BitArray] = {}
        self._behind: Mapping[str, StagedPatch] = {}
        self._catching_up = Lock()

    @property
    def at_hand(self) -> bool:
        """Return whether ``bits`` are available: not of a version that was never in CPU memory."""
        return self._bits.keys() == self.tensors.keys()

    @contextmanager
    def staging(self, announced: WeightAnnouncement, stop: Event) -> Iterator[None]:
        """Hold the replica while ``announced`` is fetched and staged. ``stop``: event that ends a wait for other
        workers."""
        self.catch_up()
        yield

    def stage_announced(
        self,
        announced: WeightAnnouncement,
        fetch: Callable[[CheckpointReplica], FetchedVersion],
        *,
        on_checkpoint: bool,
    ) -> StagedVersion:
        """Fetch the announced version and stage it. ``fetch``: called with the replica that the receiver holds.
        ``on_checkpoint``: whether a delta on the checkpoint can be applied, because the worker has loaded it and
        committed nothing yet."""
        fetched = fetch(self)
        if fetched.checkpoint is not None:
            self.advance(fetched.checkpoint)
        return self.stage(fetched)

    def close(self) -> None:
        """Do nothing: no memory is shared."""

    def show(self, complete: StagedVersion) -> None:
        """Hold a complete version by its arrays, without a copy."""
        self.tensors = dict(complete.tensors)
        self._behind = {}
        self._bits = {name: patch.new_bits for name, patch in complete.patches.items()}
        self.policy_version = complete.policy_version
        self.state_hash = complete.state_hash
        self.run_id = complete.run_id

    def bits(self, name: str) -> BitArray:
        """Return all elements of a tensor, flat. Callers do not write to them. Raises ``WeightError`` where they are on
        a GPU only."""
        self.catch_up()
        if name not in self._bits:
            raise WeightError(f"the bits of {name!r} are on the GPU only: publish an anchor")
        return self._bits[name]

    def bits_of(self, shard: ShardSpec) -> BitArray:
        """Return the bits of a shard, flat. Raises ``WeightError`` where the replica has another tensor."""
        spec = self.tensors.get(shard.name)
        if spec is None or (spec.dtype, spec.shape) != (shard.dtype, shard.shape):
            raise WeightError(f"{shard.name!r} is published as {shard.dtype} {shard.shape}; this engine holds {spec}")
        return shard.of(self.bits(shard.name))

    def catch_up(self) -> None:
        """Write the changes of the last committed version to the bits. Values are absolute, so that the next call can
        repeat one that failed halfway."""
        if not self._behind:
            return
        with self._catching_up:
            for name, patch in self._behind.items():
                if patch.positions is None:
                    self._bits[name] = patch.new_bits if patch.new_bits.flags.writeable else patch.new_bits.copy()
                else:
                    self._bits[name][patch.positions] = patch.new_bits
            self._behind = {}

    def complete_version(self) -> StagedVersion:
        """Return the held version as an anchor."""
        assert self.policy_version is not None
        patches = {name: StagedPatch(None, self.bits(name)) for name in self.tensors}
        return StagedVersion(self.policy_version, None, self.state_hash, self.tensors, patches, 0, self.run_id)

    def clear(self) -> None:
        """Drop the version: the next one must be an anchor, or a delta on the checkpoint."""
        self.policy_version = None
        self.state_hash = 0
        self.run_id = ""
        self.tensors = {}
        self._bits = {}
        self._behind = {}

    def stage(self, fetched: FetchedVersion) -> StagedVersion:
        """Check that a fetched version fits on the held one and has the announced state hash. The replica stays as it
        is.

        Raises ``WeightError``: other base version or base hash, unknown tensor, shards that leave a gap or overlap, or
        a state hash that differs (expected and actual are named)."""
        self.catch_up()
        announced = fetched.announcement
        version = announced.policy_version
        anchor = fetched.base_version is None
        if not anchor and (fetched.base_version, fetched.base_hash) != (self.policy_version, self.state_hash):
            raise WeightError(
                f"version {version} was fetched as a delta on version {fetched.base_version} with state hash "
                f"{fetched.base_hash:#018x}; this engine holds version {self.policy_version} with "
                f"{self.state_hash:#018x}: publish an anchor"
            )
        if fetched.base_version not in (None, CHECKPOINT_VERSION) and fetched.run_id != self.run_id:
            raise WeightError(
                f"version {version} is a delta of run {fetched.run_id!r}; this engine holds version "
                f"{self.policy_version} of run {self.run_id!r}: publish an anchor"
            )
        tensors = _tensor_table(fetched.patches)
        for name, spec in tensors.items():
            held_spec = self.tensors.get(name)
            if held_spec != spec and not (held_spec is None and anchor):
                raise WeightError(f"version {version} publishes {spec}; this engine holds {held_spec}")
        if anchor and self.tensors and tensors.keys() != self.tensors.keys():
            wrong = sorted(tensors.keys() ^ self.tensors.keys())[:5]
            raise WeightError(f"anchor {version} has other tensors than this engine holds: {', '.join(wrong)}")
        shards: dict[str, list[ShardPatch]] = {name: [] for name in tensors}
        for part in sorted(fetched.patches, key=lambda part: part.shard.offset):
            if part.shard.count:
                shards[part.shard.name].append(part)
        join = _join_complete if anchor else _join_changes
        patches = {name: join(tensors[name], parts) for name, parts in shards.items()}
        state_hash = self._hash_after(patches, anchor)
        if state_hash != announced.state_hash:
            raise WeightError(
                f"version {version} would have state hash {state_hash:#018x} here; "
                f"announced was {announced.state_hash:#018x}"
            )
        table = tensors if anchor else self.tensors
        size = fetched.payload_bytes
        return StagedVersion(version, fetched.base_version, state_hash, table, patches, size, fetched.run_id)

    def advance(self, staged: StagedVersion) -> None:
        """Hold a committed version. Idempotent."""
        self.catch_up()
        self._behind = staged.patches
        self.tensors = dict(staged.tensors)
        self.policy_version = staged.policy_version
        self.state_hash = staged.state_hash
        self.run_id = staged.run_id

    def _hash_after(self, patches: Mapping[str, StagedPatch], anchor: bool) -> int:
        total = 0 if anchor else self.state_hash
        for name, patch in patches.items():
            if patch.positions is None:
                total += hash_range(name, 0, patch.new_bits)
            else:
                total += hash_elements(name, patch.positions, patch.new_bits)
                total -= hash_elements(name, patch.positions, self._bits[name][patch.positions])
        return total % HASH_MODULUS


def _tensor_table(patches: Sequence[ShardPatch]) -> dict[str, TensorSpec]:
    """Return the tensors of all shards, by name. Raises ``WeightError`` where ranks differ about one."""
    tensors: dict[str, TensorSpec] = {}
    for part in patches:
        spec = TensorSpec(part.shard.name, part.shard.dtype, part.shard.shape)
        if tensors.setdefault(spec.name, spec) != spec:
            raise WeightError(f"two ranks publish {spec.name!r} differently: {tensors[spec.name]} and {spec}")
    return tensors


def _join_complete(spec: TensorSpec, parts: Sequence[ShardPatch]) -> StagedPatch:
    """Join the shards of an anchor. Raises ``WeightError`` unless they cover the tensor exactly once."""
    joined = np.empty(spec.elements, dtype=bit_type(spec.dtype, spec.name))
    missing = np.ones(spec.elements if any(part.shard.run for part in parts) else 0, dtype=np.bool_)
    end = 0
    for part in parts:
        if part.patch.positions is not None:
            raise WeightError(f"the anchor of {spec.name!r} lists changes instead of all elements")
        if missing.size:  # the columns of different ranks alternate in the flat tensor
            places = part.shard.places()
            if not missing[places].all():
                raise WeightError(f"two ranks publish elements of {spec.name!r} from element {part.shard.offset} on")
            joined[places] = part.patch.values
            missing[places] = False
        else:
            _check_follows(spec, part.shard, end)
            joined[end : end + part.shard.count] = part.patch.values
        end += part.shard.count
    if end != spec.elements:
        raise WeightError(f"the anchor of {spec.name!r} ends at element {end} of {spec.elements}: a rank is missing")
    return StagedPatch(None, joined)


def _join_changes(spec: TensorSpec, parts: Sequence[ShardPatch]) -> StagedPatch:
    """Join the changes of all shards of a tensor. Raises ``WeightError`` where shards overlap."""
    if any(part.shard.run for part in parts):
        return _join_columns(spec, parts)
    end = 0
    positions: list[PositionArray] = []
    for part in parts:
        if part.shard.offset < end:
            raise WeightError(f"two ranks publish element {part.shard.offset} of {spec.name!r}")
        end = part.shard.offset + part.shard.count
        local = part.patch.positions
        positions.append((np.arange(part.shard.count) if local is None else local) + part.shard.offset)
    return StagedPatch(np.concatenate(positions), np.concatenate([part.patch.values for part in parts]))


def _join_columns(spec: TensorSpec, parts: Sequence[ShardPatch]) -> StagedPatch:
    """Join the changes of columns, which alternate in the flat tensor, in the order of the tensor."""
    positions = np.concatenate([part.shard.places(part.patch.positions) for part in parts])
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    duplicates = positions[1:][positions[1:] == positions[:-1]]
    if duplicates.size:
        raise WeightError(f"two ranks publish element {duplicates[0]} of {spec.name!r}")
    return StagedPatch(positions, np.concatenate([part.patch.values for part in parts])[order])


def _check_follows(spec: TensorSpec, shard: ShardSpec, end: int) -> None:
    """Raise ``WeightError`` unless the shard starts at ``end``, the end of the shards before it."""
    if shard.offset != end:
        raise WeightError(
            f"the anchor of {spec.name!r} has a shard at element {shard.offset}; the one before ends at {end}: "
            "a rank is missing or two overlap"
        )
