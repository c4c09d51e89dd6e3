"""The trainer's side of a push: what changed in this rank's shards, encoded and served.

The shadow holds the bits of the last *acknowledged* version. A delta is always made against it, so every
published version can be applied by every engine that acknowledged, whatever was published in between.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import msgspec
import numpy as np

from streamrl.comm.weights.bit_patterns import BitArray, PositionArray, as_bits, bit_type
from streamrl.comm.weights.codec import EncodedPatch, WeightPatch, encode_complete, encode_patch
from streamrl.comm.weights.manifest import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    ChunkEntry,
    Manifest,
    ShardSpec,
    TensorEntry,
    digest_of,
    encode_manifest,
)
from streamrl.comm.weights.serving import ServedPart, ServingThread
from streamrl.comm.weights.state_hash import MODULUS, hash_elements, hash_range
from streamrl.errors import WeightError
from streamrl.messages import WeightSource

_Encoded = TypeVar("_Encoded")
_ELEMENTS_WORTH_THREADS = 1 << 22
MAXIMUM_PENDING = 4  # versions published and not acknowledged; the oldest is dropped, a newer delta replaces it


class Published(msgspec.Struct, frozen=True):
    """One rank's part of a published version. ``base_version`` None: an anchor. ``state_hash``: the rank's part."""

    source: WeightSource
    base_version: int | None
    state_hash: int


class _Pending(msgspec.Struct, frozen=True, eq=False):
    """A published version that is not acknowledged: how it differs from the shadow, by work unit."""

    policy_version: int
    patches: dict[int, WeightPatch]
    part_hash: int


class _EncodedUnit(msgspec.Struct, frozen=True, eq=False):
    """What became of one work unit. ``hash_change``: what it adds to the rank's part of the state hash."""

    unit: int
    patch: EncodedPatch
    hash_change: int


class WeightPublisher:
    """Publishes one rank's shards. Synchronous; all methods are called from one thread.

    ``endpoint``: where to bind (``ipc://path``, ``tcp://host:port``, ``tcp://host:*``). ``advertise``: the
    address that engines connect to, where it differs from the bound one (``tcp://0.0.0.0:...``).

    ``threads``: how many encode a large model at once, none of them holding the interpreter for long; by default half
    of the cores, at most 8. ``bandwidth_mbit``: see ``ServingThread``.

    Memory: 2 bytes an element (bfloat16) for the shadow; the changed elements of at most four pending
    versions; the encoded bytes of the same versions, which go when a version is acknowledged: every engine has it then.
    An anchor is a whole copy, until the next acknowledgement.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        run_id: str,
        rank: int,
        shards: Sequence[ShardSpec],
        advertise: str | None = None,
        threads: int | None = None,
        bandwidth_mbit: float = 0.0,
    ) -> None:
        for shard in shards:
            shard.check()
            bit_type(shard.dtype, shard.name)
        self._run_id, self._rank = run_id, rank
        self._shards = {shard.name: shard for shard in shards}
        if len(self._shards) != len(shards):
            raise WeightError(f"rank {rank} was given {len(shards)} shards with {len(self._shards)} different names")
        self._units = [unit for shard in shards for unit in shard.work_units()]
        self._threads = threads or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._advertise = advertise
        self._thread = ServingThread(endpoint, f"weight publisher {rank}", bandwidth_mbit)
        self._shadow: list[BitArray] | None = None
        self._acknowledged: int | None = None
        self._acknowledged_hash = 0
        self._pending: dict[int, _Pending] = {}
        self._served: list[ServedPart] = []

    @property
    def endpoint(self) -> str:
        """Where engines pull from (known after ``start``)."""
        return self._advertise or self._thread.endpoint

    def start(self) -> None:
        """Bind the endpoint and serve from a thread of its own. Raises ``WeightError`` when it cannot bind."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._thread.close()

    def publish(self, policy_version: int, bits: Mapping[str, np.ndarray]) -> Published:
        """Publish a version: a delta against the last acknowledged one, an anchor while there is none.

        ``bits``: by tensor name, flat integer views (uint16 for bfloat16/float16, uint32 for float32) of
        this rank's shard. They are not kept: what is needed is copied.
        Raises ``WeightError`` for a version that is not newer, a missing tensor, a wrong size or type.
        """
        self._thread.check()
        newest = max(self._pending, default=self._acknowledged)
        if newest is not None and policy_version <= newest:
            raise WeightError(f"version {policy_version} cannot be published: {newest} was published already")
        if bits.keys() != self._shards.keys():
            wrong = sorted(bits.keys() ^ self._shards.keys())[:5]
            raise WeightError(f"published tensors differ from the shards of rank {self._rank}: {', '.join(wrong)}")
        checked = {name: as_bits(bits[name], s.dtype, s.count, name) for name, s in self._shards.items()}
        shadow = self._shadow

        def encode(unit: int) -> _EncodedUnit | None:
            return self._encode_unit(unit, self._bits_of(unit, checked), None if shadow is None else shadow[unit])

        part = _Part(0 if shadow is None else self._acknowledged_hash)
        with self._mapped(encode) as units:
            chunks = list(_cut(part.take(unit, self._units[unit.unit]) for unit in units if unit is not None))
        pending = _Pending(policy_version, part.patches, part.hash % MODULUS)
        self._pending[policy_version] = pending
        while len(self._pending) > MAXIMUM_PENDING:
            del self._pending[min(self._pending)]
        return self._serve(pending, part.entries, chunks, anchor=shadow is None)

    def publish_anchor(self, policy_version: int) -> Published:
        """Publish a version again, complete in itself. It must be the acknowledged or a pending one."""
        self._thread.check()
        pending = self._pending.get(policy_version)
        if pending is None:
            if self._shadow is None or policy_version != self._acknowledged:
                raise WeightError(
                    f"version {policy_version} cannot be anchored: acknowledged is {self._acknowledged}, "
                    f"pending are {sorted(self._pending)}"
                )
            pending = _Pending(policy_version, {}, self._acknowledged_hash)

        def encode(unit: int) -> tuple[TensorEntry, bytes]:
            encoded = encode_complete(self._bits_at(unit, pending))
            return TensorEntry(self._units[unit], self._units[unit].count, len(encoded)), encoded

        entries: list[TensorEntry] = []

        def taken(encoded: Iterable[tuple[TensorEntry, bytes]]) -> Iterator[bytes]:
            for entry, patch in encoded:
                entries.append(entry)
                yield patch

        with self._mapped(encode) as units:
            chunks = list(_cut(taken(units)))
        return self._serve(pending, entries, chunks, anchor=True)

    def acknowledge(self, policy_version: int) -> None:
        """Every engine holds ``policy_version``: the shadow advances to it, older versions are forgotten."""
        if policy_version == self._acknowledged:
            return
        held = self._pending.get(policy_version)
        if held is None:
            raise WeightError(
                f"version {policy_version} was acknowledged; pending are {sorted(self._pending)}, "
                f"the shadow is at {self._acknowledged}"
            )
        newer = [pending for version, pending in sorted(self._pending.items()) if version > policy_version]
        self._pending = {pending.policy_version: self._rebased(pending, held) for pending in newer}
        if self._shadow is None:
            self._shadow = [held.patches[unit].values for unit in range(len(self._units))]
        else:
            for unit, patch in held.patches.items():
                self._shadow[unit][patch.positions] = patch.values
        self._acknowledged, self._acknowledged_hash = policy_version, held.part_hash
        # An engine that is behind may still be fetching what the others acknowledged.
        self._keep_served(self._served, {*self._pending, policy_version})

    def _mapped(self, encode: Callable[[int], _Encoded]) -> AbstractContextManager[Iterator[_Encoded]]:
        """``encode`` of every work unit, in order; in threads where there is enough to share."""
        large = sum(unit.count for unit in self._units) >= _ELEMENTS_WORTH_THREADS
        return _map_in_threads(encode, range(len(self._units)), self._threads if large else 1)

    def _encode_unit(self, unit: int, bits: BitArray, base: BitArray | None) -> _EncodedUnit | None:
        """How one unit differs from the shadow, and what that does to the hash; None where nothing changed."""
        spec = self._units[unit]
        encoded = encode_patch(bits, base, spec.dtype)
        if encoded is None:
            return None
        if base is None or encoded.patch.positions is None:
            return _EncodedUnit(unit, encoded, hash_range(spec.name, spec.offset, encoded.patch.values))
        positions = encoded.patch.positions
        places = positions + spec.offset
        change = hash_elements(spec.name, places, encoded.patch.values)
        return _EncodedUnit(unit, encoded, change - hash_elements(spec.name, places, base[positions]))

    def _bits_of(self, unit: int, bits: Mapping[str, BitArray]) -> BitArray:
        """A unit's part of what was given for its shard."""
        spec = self._units[unit]
        start = spec.offset - self._shards[spec.name].offset
        return bits[spec.name][start : start + spec.count]

    def _bits_at(self, unit: int, pending: _Pending) -> BitArray:
        """A unit's bits at a pending version. Read only: they may be the shadow."""
        patch = pending.patches.get(unit)
        if patch is not None and patch.positions is None:
            return patch.values
        assert self._shadow is not None
        if patch is None:
            return self._shadow[unit]
        bits = self._shadow[unit].copy()
        bits[patch.positions] = patch.values
        return bits

    def _rebased(self, newer: _Pending, held: _Pending) -> _Pending:
        """How ``newer`` differs from ``held``, which becomes the shadow. In proportion to what changed."""
        patches = {}
        for unit in sorted(newer.patches.keys() | held.patches.keys()):
            base = None if self._shadow is None else self._shadow[unit]
            patch = _difference(newer.patches.get(unit), held.patches.get(unit), base)
            if patch.values.size:
                patches[unit] = patch
        return _Pending(newer.policy_version, patches, newer.part_hash)

    def _serve(
        self, pending: _Pending, entries: Sequence[TensorEntry], chunks: list[memoryview], *, anchor: bool
    ) -> Published:
        base_version = None if anchor else self._acknowledged
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            run_id=self._run_id,
            rank=self._rank,
            policy_version=pending.policy_version,
            base_version=base_version,
            base_part_hash=0 if anchor else self._acknowledged_hash,
            part_hash=pending.part_hash,
            tensors=tuple(entries),
            chunks=tuple(ChunkEntry(digest_of(chunk), len(chunk)) for chunk in chunks),
        )
        encoded = encode_manifest(manifest)
        part = ServedPart(pending.policy_version, digest_of(encoded), encoded, chunks)
        others = (p for p in self._served if p.manifest_digest != part.manifest_digest)
        self._keep_served([*others, part], {*self._pending, self._acknowledged})
        total = sum(shard.count for shard in self._shards.values())
        source = WeightSource(
            rank=self._rank,
            endpoint=self.endpoint,
            manifest_digest=part.manifest_digest,
            payload_bytes=manifest.payload_bytes,
            changed_elements=total if anchor else sum(patch.values.size for patch in pending.patches.values()),
            total_elements=total,
        )
        return Published(source, base_version, pending.part_hash)

    def _keep_served(self, parts: list[ServedPart], wanted: set[int | None]) -> None:
        """Serve the parts of versions that may still be asked for."""
        self._served = [part for part in parts if part.policy_version in wanted]
        self._thread.serve(self._served)


class _Part:
    """What a version's units add up to, in their order."""

    def __init__(self, part_hash: int) -> None:
        self.hash = part_hash
        self.patches: dict[int, WeightPatch] = {}
        self.entries: list[TensorEntry] = []

    def take(self, encoded: _EncodedUnit, spec: ShardSpec) -> bytes:
        """Add a unit; returns its bytes."""
        self.hash += encoded.hash_change
        self.patches[encoded.unit] = encoded.patch.patch
        self.entries.append(TensorEntry(spec, encoded.patch.listed_elements, len(encoded.patch.encoded)))
        return encoded.patch.encoded


@contextmanager
def _map_in_threads(
    encode: Callable[[int], _Encoded], units: Iterable[int], threads: int
) -> Iterator[Iterator[_Encoded]]:
    if threads == 1:
        yield map(encode, units)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="weight encoding") as pool:
        yield pool.map(encode, units)


def _difference(newer: WeightPatch | None, held: WeightPatch | None, base: BitArray | None) -> WeightPatch:
    """How ``newer`` differs from ``held``, both given by how they differ from ``base`` (None: both are complete)."""
    if base is None:
        assert newer is not None
        assert held is not None
        positions = np.flatnonzero(newer.values != held.values).astype(np.int64, copy=False)
        return WeightPatch(positions, newer.values[positions])
    places = [_positions_of(newer), _positions_of(held)]
    positions = np.union1d(*places)
    bits = [base[positions], base[positions]]
    for side, own, patch in zip(bits, places, (newer, held), strict=True):
        if patch is not None:
            side[np.searchsorted(positions, own)] = patch.values
    differs = bits[0] != bits[1]
    return WeightPatch(positions[differs], bits[0][differs])


def _positions_of(patch: WeightPatch | None) -> PositionArray:
    if patch is None or patch.positions is None:  # a complete patch of an empty unit
        return np.zeros(0, dtype=np.int64)
    return patch.positions


def _cut(patches: Iterable[bytes]) -> Iterator[memoryview]:
    """The payload in chunks; it never exists as one piece."""
    chunk = bytearray()
    for patch in patches:
        start = 0
        while start < len(patch):
            part = patch[start : start + CHUNK_BYTES - len(chunk)]
            chunk += part
            start += len(part)
            if len(chunk) == CHUNK_BYTES:
                yield memoryview(chunk).toreadonly()
                chunk = bytearray()
    if chunk:
        yield memoryview(chunk).toreadonly()
