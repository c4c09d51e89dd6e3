"""Weights of an engine as checkpoint bits: the base of every delta, and what a failed commit is undone from. Pure
numpy. A staged version is complete and checked before anything live changes; applying it is then only a matter of
copying absolute values."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement
from streamrl.weights.codec.bits import BitArray, PositionArray, bit_type
from streamrl.weights.codec.codec import WeightPatch
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.manifest import CHECKPOINT_VERSION, ShardSpec


class TensorSpec(msgspec.Struct, frozen=True):
    """A whole checkpoint tensor: name, published dtype, full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class StagedPatch(msgspec.Struct, frozen=True, eq=False):
    """New bits of one tensor. ``positions``: int64 [n] flat in the full tensor, strictly increasing, or None for all
    elements; ``new_bits``: uint16 or uint32 [n]."""

    positions: PositionArray | None
    new_bits: BitArray


class StagedVersion(msgspec.Struct, frozen=True, eq=False):
    """A version that fits on what the replica holds, with the state hash that it was checked to have."""

    policy_version: int
    base_version: int | None
    state_hash: int
    tensors: Mapping[str, TensorSpec]
    patches: Mapping[str, StagedPatch]
    payload_bytes: int
    run_id: str = ""

    @property
    def is_anchor(self) -> bool:
        """Return whether it is complete in itself."""
        return self.base_version is None


class ShardPatch(msgspec.Struct, frozen=True, eq=False):
    """The decoded patch of one shard. Positions are relative to the shard."""

    shard: ShardSpec
    patch: WeightPatch


class FetchedVersion(msgspec.Struct, frozen=True, eq=False):
    """An announced version, checked against every digest, decoded. ``base_version``, ``base_hash``: of what it changes,
    which is what the receiver held; None and 0 for an anchor. ``run_id``: of who published it. ``checkpoint``: the
    base, where that is the checkpoint (``base_version`` is ``CHECKPOINT_VERSION``): what the receiver holds before."""

    announcement: WeightAnnouncement
    base_version: int | None
    base_hash: int
    patches: Sequence[ShardPatch]
    payload_bytes: int
    run_id: str = ""
    checkpoint: StagedVersion | None = None


class CheckpointReplica:
    """The bits of every checkpoint tensor at the committed version. Empty until the first anchor.

    ``advance`` only remembers what changed, because requests wait for it; the bits follow in ``catch_up``, which
    everybody who reads them calls first."""

    def __init__(self) -> None:
        self.run_id = ""
        self.policy_version: int | None = None
        self.state_hash = 0
        self.tensors: dict[str, TensorSpec] = {}
        self._bits: dict[str, BitArray] = {}
        self._behind: Mapping[str, StagedPatch] = {}
        self._catching_up = threading.Lock()

    @property
    def at_hand(self) -> bool:
        """Return whether ``bits`` are available."""
        return True

    @contextmanager
    def staging(self, announced: WeightAnnouncement, stop: threading.Event) -> Iterator[None]:
        """Hold the replica while ``announced`` is fetched and its changes are looked up. ``stop`` ends a wait."""
        self.catch_up()
        yield

    def stage_announced(
        self,
        announced: WeightAnnouncement,
        fetch: Callable[[CheckpointReplica], FetchedVersion],
        *,
        on_checkpoint: bool,
    ) -> StagedVersion:
        """``stage`` what ``fetch`` gets for a receiver that holds the given replica. ``on_checkpoint``: the live
        weights are what a checkpoint's files hold, as far as is known, and a delta on that will do."""
        fetched = fetch(self)
        if fetched.checkpoint is not None:
            self.advance(fetched.checkpoint)
        return self.stage(fetched)

    def close(self) -> None:
        """Do nothing: no memory is shared."""

    def show(self, whole: StagedVersion) -> None:
        """Hold a complete version whose arrays are kept elsewhere: they are not copied."""
        self.tensors = dict(whole.tensors)
        self._behind = {}
        self._bits = {name: patch.new_bits for name, patch in whole.patches.items()}
        self.policy_version = whole.policy_version
        self.state_hash = whole.state_hash
        self.run_id = whole.run_id

    def bits(self, name: str) -> BitArray:
        """All elements of a tensor, flat. Read only by convention."""
        self.catch_up()
        return self._bits[name]

    def catch_up(self) -> None:
        """Write what the last committed version changed. Values are absolute: after a failure it is done again."""
        if not self._behind:
            return
        with self._catching_up:
            for name, patch in self._behind.items():
                if patch.positions is None:
                    self._bits[name] = patch.new_bits if patch.new_bits.flags.writeable else patch.new_bits.copy()
                else:
                    self._bits[name][patch.positions] = patch.new_bits
            self._behind = {}

    def whole(self) -> StagedVersion:
        """Return the held version as a complete one."""
        assert self.policy_version is not None
        patches = {name: StagedPatch(None, self.bits(name)) for name in self.tensors}
        return StagedVersion(self.policy_version, None, self.state_hash, self.tensors, patches, 0, self.run_id)

    def clear(self) -> None:
        """Hold nothing: the next version must be an anchor."""
        self.policy_version = None
        self.state_hash = 0
        self.run_id = ""
        self.tensors = {}
        self._bits = {}
        self._behind = {}

    def stage(self, fetched: FetchedVersion) -> StagedVersion:
        """Check that a fetched version fits here and has the hash it was announced with. Changes nothing.

        Raises ``WeightError``: other base version or base hash, unknown tensor, shards that leave a gap or
        overlap, or a state hash that differs (expected and actual are named)."""
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
            known = self.tensors.get(name)
            if known != spec and not (known is None and anchor):
                raise WeightError(f"version {version} publishes {spec}; this engine holds {known}")
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
        """Take over a committed version. Idempotent."""
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
    tensors: dict[str, TensorSpec] = {}
    for part in patches:
        spec = TensorSpec(part.shard.name, part.shard.dtype, part.shard.shape)
        if tensors.setdefault(spec.name, spec) != spec:
            raise WeightError(f"two ranks publish {spec.name!r} differently: {tensors[spec.name]} and {spec}")
    return tensors


def _join_complete(spec: TensorSpec, parts: Sequence[ShardPatch]) -> StagedPatch:
    """Join the shards of an anchor; they must cover the tensor exactly once."""
    joined = np.empty(spec.elements, dtype=bit_type(spec.dtype, spec.name))
    missing = np.ones(spec.elements if any(part.shard.run for part in parts) else 0, dtype=np.bool_)
    reached = 0
    for part in parts:
        if part.patch.positions is not None:
            raise WeightError(f"the anchor of {spec.name!r} lists changes instead of all elements")
        if missing.size:  # columns of several ranks lie between each other
            places = part.shard.places()
            if not missing[places].all():
                raise WeightError(f"two ranks publish elements of {spec.name!r} from element {part.shard.offset} on")
            joined[places] = part.patch.values
            missing[places] = False
        else:
            _check_follows(spec, part.shard, reached)
            joined[reached : reached + part.shard.count] = part.patch.values
        reached += part.shard.count
    if reached != spec.elements:
        raise WeightError(
            f"the anchor of {spec.name!r} ends at element {reached} of {spec.elements}: a rank is missing"
        )
    return StagedPatch(None, joined)


def _join_changes(spec: TensorSpec, parts: Sequence[ShardPatch]) -> StagedPatch:
    if any(part.shard.run for part in parts):
        return _join_columns(spec, parts)
    reached = 0
    positions: list[PositionArray] = []
    for part in parts:
        if part.shard.offset < reached:
            raise WeightError(f"two ranks publish element {part.shard.offset} of {spec.name!r}")
        reached = part.shard.offset + part.shard.count
        local = part.patch.positions
        positions.append((np.arange(part.shard.count) if local is None else local) + part.shard.offset)
    return StagedPatch(np.concatenate(positions), np.concatenate([part.patch.values for part in parts]))


def _join_columns(spec: TensorSpec, parts: Sequence[ShardPatch]) -> StagedPatch:
    """Join shards whose elements lie between each other's, in the order of the full tensor."""
    positions = np.concatenate([part.shard.places(part.patch.positions) for part in parts])
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    if (twice := positions[1:][positions[1:] == positions[:-1]]).size:
        raise WeightError(f"two ranks publish element {twice[0]} of {spec.name!r}")
    return StagedPatch(positions, np.concatenate([part.patch.values for part in parts])[order])


def _check_follows(spec: TensorSpec, shard: ShardSpec, reached: int) -> None:
    if shard.offset != reached:
        raise WeightError(
            f"the anchor of {spec.name!r} has a shard at element {shard.offset}; the one before ends at {reached}: "
            "a rank is missing or two overlap"
        )
