"""The trainer's side of a push: what changed in this rank's shards, encoded and served.

The shadow holds the bits of the last *acknowledged* version. A delta is always made against it, so every
published version can be applied by every engine that acknowledged, whatever was published in between. An engine that
holds something older, or nothing but the checkpoint, asks for one delta of its own (``folding``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightSource
from streamrl.weights.codec.bits import BitArray, bit_type
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch, encode_complete, encode_patch
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.manifest import (
    CHECKPOINT_VERSION,
    CHUNK_BYTES,
    FORMAT_VERSION,
    MODULUS,
    ChunkEntry,
    Manifest,
    ShardSpec,
    TensorEntry,
    digest_of,
    encode_manifest,
)
from streamrl.weights.publish.bit_reader import BitReader, HostReader
from streamrl.weights.publish.folding import FoldMaker
from streamrl.weights.publish.loaded_checkpoint import CheckpointBase
from streamrl.weights.publish.published_versions import PendingVersion, PublishedVersions
from streamrl.weights.publish.serving import ServedPart, ServingThread
from streamrl.weights.requests import GetFold
from streamrl.weights.work_units import WorkUnit, work_units

_Encoded = TypeVar("_Encoded")
_ELEMENTS_WORTH_THREADS = 1 << 22
_HISTORY_SHARE = 4  # a quarter of the shadow's bytes: some eight versions that change 1 % each


class Published(msgspec.Struct, frozen=True):
    """One rank's part of a published version. ``base_version`` None: an anchor. ``state_hash``: the rank's part."""

    source: WeightSource
    base_version: int | None
    state_hash: int


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
    of the cores, at most 8. ``checkpoint``: the file or directory that the
    engines load, so that one which holds nothing else is brought up to date by a delta on it instead of an anchor.
    ``history_bytes``: what is kept of earlier versions for engines that missed some (None: a quarter of the shadow).
    ``reader``: reads what ``publish`` is given, where that is not in host memory.

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
        checkpoint: Path | None = None,
        history_bytes: int | None = None,
        reader: BitReader | None = None,
    ) -> None:
        for shard in shards:
            shard.check()
            bit_type(shard.dtype, shard.name)
        self._run_id, self._rank = run_id, rank
        self._shards = {shard.name: shard for shard in shards}
        if len(self._shards) != len(shards):
            raise WeightError(f"rank {rank} was given {len(shards)} shards with {len(self._shards)} different names")
        self._units = work_units(shards)
        self._reader = reader or HostReader()
        self._threads = threads or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._advertise = advertise
        dense = sum(shard.count * bit_type(shard.dtype, shard.name).itemsize for shard in shards)
        self._versions = PublishedVersions(
            len(self._units), dense // _HISTORY_SHARE if history_bytes is None else history_bytes
        )
        self._checkpoint = None if checkpoint is None else CheckpointBase(checkpoint)
        self._folds = FoldMaker(self._fold)
        self._thread = ServingThread(endpoint, f"weight publisher {rank}", self._folds)
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
        self._folds.close()
        self._thread.close()

    def publish(self, policy_version: int, bits: Mapping[str, Any]) -> Published:
        """Publish a version: a delta against the last acknowledged one, an anchor while there is none.

        ``bits``: by tensor name, flat integer views (numpy uint16 for bfloat16/float16, uint32 for float32) of
        this rank's shard, or what the publisher's ``reader`` reads. They are not kept: what is needed is copied.
        Raises ``WeightError`` for a version that is not newer, a missing tensor, a wrong size or type.
        """
        self._thread.check()
        newest = self._versions.newest
        if newest is not None and policy_version <= newest:
            raise WeightError(f"version {policy_version} cannot be published: {newest} was published already")
        if bits.keys() != self._shards.keys():
            wrong = sorted(bits.keys() ^ self._shards.keys())[:5]
            raise WeightError(f"published tensors differ from the shards of rank {self._rank}: {', '.join(wrong)}")
        checked = {name: self._reader.checked(bits[name], shard) for name, shard in self._shards.items()}
        shadow = self._versions.shadow

        def encode(unit: int) -> _EncodedUnit | None:
            return self._encode_unit(unit, self._parts_of(unit, checked), None if shadow is None else shadow[unit])

        part = _Part(0 if shadow is None else self._versions.acknowledged_hash)
        with self._mapped(encode) as units:
            chunks = list(_cut(part.take(unit, self._units[unit.unit]) for unit in units if unit is not None))
        pending = PendingVersion(policy_version, part.patches, part.hash % MODULUS)
        self._versions.add(pending)
        changed = sum(patch.values.size for patch in part.patches.values())
        return self._serve(policy_version, part.entries, chunks, changed=None if shadow is None else changed)

    def publish_anchor(self, policy_version: int) -> Published:
        """Publish a version again, complete in itself. It must be the acknowledged or a pending one."""
        self._thread.check()
        versions = self._versions
        if policy_version not in versions.pending and policy_version != versions.acknowledged:
            raise WeightError(
                f"version {policy_version} cannot be anchored: acknowledged is {versions.acknowledged}, "
                f"pending are {sorted(versions.pending)}"
            )

        def encode(unit: int) -> tuple[Iterable[TensorEntry], bytes]:
            encoded = encode_complete(versions.bits_at(unit, policy_version))
            return self._units[unit].complete_entries(len(encoded)), encoded

        entries, chunks = self._encoded(encode)
        return self._serve(policy_version, entries, chunks, changed=None)

    def acknowledge(self, policy_version: int) -> None:
        """Every engine holds ``policy_version``: the shadow advances to it, older versions are forgotten."""
        if policy_version == self._versions.acknowledged:
            return
        held = self._versions.pending.get(policy_version)
        self._versions.acknowledge(policy_version)
        if held is not None:
            self._reader.advance(held.patches)
        # An engine that is behind may still be fetching what the others acknowledged.
        self._keep_served(self._served)

    def _fold(self, asked: GetFold) -> ServedPart:
        """A served version as a delta on an earlier one, or on the checkpoint. In the thread of ``FoldMaker``."""
        target = next((part for part in self._served if part.manifest_digest == asked.manifest_digest), None)
        if target is None:
            raise WeightError("this manifest is not served (any more): ask for a newer version")
        version, base_version = target.policy_version, asked.base_version
        shards = tuple(self._shards.values()) if base_version == CHECKPOINT_VERSION else ()
        checkpoint = self._checkpoint if shards else None
        if checkpoint is None and shards:
            raise WeightError("this publisher was not told which checkpoint the engines load")
        base_hash = checkpoint.part_hash(shards) if checkpoint else self._versions.part_hash(base_version)

        def encode(unit: int) -> tuple[Iterable[TensorEntry], bytes] | None:
            if self._folds.closing.is_set():
                raise WeightError("the publisher is closing")
            spec, bits = self._units[unit], self._versions.copy_at(unit, version)
            base = spec.join(checkpoint.bits_of) if checkpoint else self._versions.copy_at(unit, base_version)
            encoded = encode_patch(bits, base, spec.dtype)
            if encoded is None:
                return None
            return spec.entries(encoded), encoded.encoded

        entries, chunks = self._encoded(encode)
        return self._part(version, (base_version, base_hash), entries, chunks, shards)

    def _encoded(
        self, encode: Callable[[int], tuple[Iterable[TensorEntry], bytes] | None]
    ) -> tuple[list[TensorEntry], list[memoryview]]:
        """Entries and payload of all units that have one."""
        entries: list[TensorEntry] = []

        def taken(units: Iterable[tuple[Iterable[TensorEntry], bytes] | None]) -> Iterator[bytes]:
            for unit in units:
                if unit is not None:
                    entries.extend(unit[0])
                    yield unit[1]

        with self._mapped(encode) as units:
            chunks = list(_cut(taken(units)))
        return entries, chunks

    def _mapped(self, encode: Callable[[int], _Encoded]) -> AbstractContextManager[Iterator[_Encoded]]:
        """``encode`` of every work unit, in order; in threads where there is enough to share."""
        large = sum(unit.count for unit in self._units) >= _ELEMENTS_WORTH_THREADS
        return _map_in_threads(encode, range(len(self._units)), self._threads if large else 1)

    def _encode_unit(self, unit: int, parts: Sequence[Any], base: BitArray | None) -> _EncodedUnit | None:
        """How one unit differs from the shadow, and what that does to the hash; None where nothing changed."""
        spec = self._units[unit]
        if base is None:
            encoded = encode_patch(self._reader.complete(parts, spec.dtype), None, spec.dtype)
        else:
            encoded = self._reader.changes(unit, parts, base, spec.dtype)
        if encoded is None:
            return None
        change = _hash_of(spec, encoded.patch)
        if base is not None and encoded.patch.positions is not None:
            positions = encoded.patch.positions
            change -= _hash_of(spec, WeightPatch(positions, base[positions]))
        return _EncodedUnit(unit, encoded, change)

    def _parts_of(self, unit: int, given: Mapping[str, Any]) -> list[Any]:
        """A unit's part of what was given for each of its shards."""
        starts = [(spec, spec.offset - self._shards[spec.name].offset) for spec in self._units[unit].shards]
        return [given[spec.name][start : start + spec.count] for spec, start in starts]

    def _serve(
        self, policy_version: int, entries: Sequence[TensorEntry], chunks: list[memoryview], *, changed: int | None
    ) -> Published:
        """``changed``: elements that a delta changes; None for an anchor."""
        anchor, versions = changed is None, self._versions
        base = None if anchor or versions.acknowledged is None else (versions.acknowledged, versions.acknowledged_hash)
        part = self._part(policy_version, base, entries, chunks)
        self._keep_served([*(p for p in self._served if p.manifest_digest != part.manifest_digest), part])
        total = sum(shard.count for shard in self._shards.values())
        source = WeightSource(
            rank=self._rank,
            endpoint=self.endpoint,
            manifest_digest=part.manifest_digest,
            payload_bytes=sum(len(chunk) for chunk in chunks),
            changed_elements=total if changed is None else changed,
            total_elements=total,
        )
        return Published(source, None if base is None else base[0], versions.part_hash(policy_version))

    def _part(
        self,
        policy_version: int,
        base: tuple[int, int] | None,
        entries: Sequence[TensorEntry],
        chunks: list[memoryview],
        shards: tuple[ShardSpec, ...] = (),
    ) -> ServedPart:
        """``base``: version and part of the state hash; None for an anchor."""
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            run_id=self._run_id,
            rank=self._rank,
            policy_version=policy_version,
            base_version=None if base is None else base[0],
            base_part_hash=0 if base is None else base[1],
            part_hash=self._versions.part_hash(policy_version),
            tensors=tuple(entries),
            chunks=tuple(ChunkEntry(digest_of(chunk), len(chunk)) for chunk in chunks),
            shards=shards,
        )
        encoded = encode_manifest(manifest)
        return ServedPart(policy_version, digest_of(encoded), encoded, chunks)

    def _keep_served(self, parts: list[ServedPart]) -> None:
        """Serve the parts of versions that may still be asked for."""
        wanted = {*self._versions.pending, self._versions.acknowledged}
        self._served = [part for part in parts if part.policy_version in wanted]
        self._thread.serve(self._served)


class _Part:
    """What a version's units add up to, in their order."""

    def __init__(self, part_hash: int) -> None:
        self.hash = part_hash
        self.patches: dict[int, WeightPatch] = {}
        self.entries: list[TensorEntry] = []

    def take(self, encoded: _EncodedUnit, spec: WorkUnit) -> bytes:
        """Add a unit; returns its bytes."""
        self.hash += encoded.hash_change
        self.patches[encoded.unit] = encoded.patch.patch
        self.entries.extend(spec.entries(encoded.patch))
        return encoded.patch.encoded


def _hash_of(unit: WorkUnit, patch: WeightPatch) -> int:
    """What these elements have in the state hash."""
    total = 0
    for shard, part in zip(unit.shards, unit.cut(patch), strict=True):
        if part.positions is None:
            total += hash_range(shard.name, shard.offset, part.values)
        elif part.values.size:
            total += hash_elements(shard.name, part.positions + shard.offset, part.values)
    return total


@contextmanager
def _map_in_threads(
    encode: Callable[[int], _Encoded], units: Iterable[int], threads: int
) -> Iterator[Iterator[_Encoded]]:
    if threads == 1:
        yield map(encode, units)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="weight encoding") as pool:
        yield pool.map(encode, units)


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
