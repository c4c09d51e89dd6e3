"""The trainer's side of a push: what changed in this rank's shards, encoded and served.

Each version is a delta on the one published before it, whose bits are the *baseline*. An engine that missed versions
takes the links of the chain that it lacks, and commits them as one. The first link is made on the checkpoint that the
engines load, where that is known; else the first version is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS, WeightSource
from streamrl.base.messages import Published as Published
from streamrl.base.run_process import usable_cores
from streamrl.comm.object_store import in_store
from streamrl.weights.codec.bits import BitArray, bit_type
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch, encode_complete
from streamrl.weights.manifest import (
    CHECKPOINT_VERSION,
    FORMAT_VERSION,
    ChunkEntry,
    Manifest,
    ShardSpec,
    UnitEntry,
    WorkUnit,
    digest_of,
    encode_manifest,
    work_units,
)
from streamrl.weights.publish.chain import Chain
from streamrl.weights.publish.server import PublisherServer, ServedPart
from streamrl.weights.publish.tensor_source import HostTensors
from streamrl.weights.pull.loaded_checkpoint import CheckpointBase
from streamrl.weights.requests import CHUNK_BYTES
from streamrl.weights.store.stored_parts import StoredParts

_Made = TypeVar("_Made")
_ELEMENTS_WORTH_THREADS = 1 << 22
_CHAIN_SHARE = 4  # a quarter of the baseline's bytes: some 70 versions that change 1 % each


class _Base(msgspec.Struct, frozen=True):
    """The base of a version: its number (None: nothing), its part of the state hash, its manifest's digest, and
    ``Manifest.shards``."""

    policy_version: int | None = None
    part_hash: int = 0
    digest: str = ""
    shards: tuple[ShardSpec, ...] = ()


class WeightPublisher:
    """Publishes one rank's shards. Synchronous; all methods are called from one thread.

    ``endpoint``: where to bind (``ipc://path``, ``tcp://host:port``, ``tcp://host:*``), or a place in an object store
    of this rank only (``s3://bucket/prefix``): ``publish`` returns then when the version is there.

    ``threads``: how many encode a large model at once, none of them holding the interpreter for long; by default half
    of the cores, at most 8. ``checkpoint``: the file or directory that the engines load: the first version is a delta
    on it. ``chain_bytes``: what encoded versions may take that every engine has, for engines that miss some (None: a
    quarter of the weights' bytes). ``source``: reads what ``publish`` is given, where that is not in host memory.

    Memory: the bits of the last published version, 2 bytes an element (bfloat16); the encoded bytes of the chain. An
    anchor is a whole copy, until a newer version is acknowledged."""

    def __init__(
        self,
        endpoint: str,
        *,
        run_id: str,
        rank: int,
        shards: Sequence[ShardSpec],
        threads: int | None = None,
        checkpoint: Path | None = None,
        chain_bytes: int | None = None,
        source: HostTensors | None = None,
    ) -> None:
        for shard in shards:
            shard.check()
            bit_type(shard.dtype, shard.name)
        self._run_id = run_id
        self._rank = rank
        self._shards = {shard.name: shard for shard in shards}
        if len(self._shards) != len(shards):
            raise WeightError(f"rank {rank} was given {len(shards)} shards with {len(self._shards)} different names")
        self._units = work_units(shards)
        self._source = source or HostTensors()
        self._threads = threads or max(1, min(8, usable_cores() // 2))
        dense = sum(shard.count * bit_type(shard.dtype, shard.name).itemsize for shard in shards)
        self._chain = Chain(dense // _CHAIN_SHARE if chain_bytes is None else chain_bytes)
        self._checkpoint = None if checkpoint is None else CheckpointBase(checkpoint)
        server = StoredParts(endpoint) if in_store(endpoint) else PublisherServer(endpoint, f"weight publisher {rank}")
        self._server: StoredParts | PublisherServer = server
        self._baseline: list[BitArray] = []
        self._version: int | None = None
        self._part_hash = 0

    @property
    def endpoint(self) -> str:
        """Endpoint from which engines pull (known after ``start``)."""
        return self._server.endpoint

    def start(self) -> None:
        """Bind the endpoint and serve from a thread of its own. Raises ``WeightError`` when it cannot bind."""
        self._server.start()

    def close(self) -> None:
        self._server.close()

    def publish(self, policy_version: int, bits: Mapping[str, Any]) -> Published:
        """Publish a version, newer than all before: a delta on the last one; the first on the checkpoint, or complete.

        ``bits``: by tensor name, flat integer views (numpy uint16 for bfloat16/float16, uint32 for float32) of
        this rank's shard, or what the publisher's ``source`` reads. They are not kept: what is needed is copied.
        Raises ``WeightError`` for a version that is not newer, a missing tensor, a wrong size or type."""
        self._server.check()
        if self._version is not None and policy_version <= self._version:
            raise WeightError(f"version {policy_version} cannot be published: {self._version} was published already")
        if bits.keys() != self._shards.keys():
            wrong = sorted(bits.keys() ^ self._shards.keys())[:5]
            raise WeightError(f"published tensors differ from the shards of rank {self._rank}: {', '.join(wrong)}")
        checked = {name: self._source.checked(bits[name], shard) for name, shard in self._shards.items()}
        if self._version is None:
            self._take_checkpoint()
        if self._version is None:
            return self._publish_first(policy_version, checked)

        def encode(unit: int) -> tuple[EncodedPatch | None, int]:
            spec = self._units[unit]
            baseline = self._baseline[unit]
            delta = self._source.changes(unit, self._parts_of(unit, checked), baseline, spec.dtype)
            return delta, _hash_change(spec, delta, baseline)

        with self._mapped(encode) as units:
            made = list(units)
        shards = tuple(self._shards.values()) if self._version == CHECKPOINT_VERSION else ()
        base = _Base(self._version, self._part_hash, self._chain.newest_digest, shards)
        patches = {unit: delta.patch for unit, (delta, _) in enumerate(made) if delta is not None}
        self._version = policy_version
        self._part_hash = (base.part_hash + sum(change for _, change in made)) % HASH_MODULUS
        for unit, patch in patches.items():
            self._baseline[unit][patch.positions] = patch.values
        self._source.advance(patches)
        part = self._part(base, (None if delta is None else delta.encoded for delta, _ in made))
        self._chain.add(part)
        return self._served(part, base.policy_version, sum(patch.values.size for patch in patches.values()))

    def publish_anchor(self, policy_version: int) -> Published:
        self._server.check()
        if policy_version != self._version:
            raise WeightError(f"version {policy_version} cannot be anchored: the newest is {self._version}")
        with self._mapped(lambda unit: encode_complete(self._baseline[unit])) as units:
            part = self._part(_Base(), units)
        self._chain.add_anchor(part)
        return self._served(part, None, sum(shard.count for shard in self._shards.values()))

    def acknowledge(self, policy_version: int) -> None:
        if self._version is None or policy_version > self._version:
            raise WeightError(f"version {policy_version} was acknowledged; the newest is {self._version}")
        self._chain.acknowledge(policy_version)
        self._server.serve(self._chain)

    def _take_checkpoint(self) -> None:
        """Take the checkpoint that the engines load as the baseline, where it is known and is what is published."""
        if self._checkpoint is None:
            return
        try:
            part_hash = self._checkpoint.part_hash(self._shards.values())
        except WeightError:  # other tensors than are published, or none: the first version is complete
            return
        self._baseline = [unit.join(self._checkpoint.bits_of).copy() for unit in self._units]
        self._version = CHECKPOINT_VERSION
        self._part_hash = part_hash

    def _publish_first(self, policy_version: int, given: Mapping[str, Any]) -> Published:
        """Publish the first version, which has no base."""

        def take(unit: int) -> tuple[BitArray, int]:
            spec = self._units[unit]
            bits = self._source.complete(self._parts_of(unit, given), spec.dtype).copy()
            return bits, _hash_of(spec, WeightPatch(None, bits))

        with self._mapped(take) as units:
            taken = list(units)
        self._baseline = [bits for bits, _ in taken]
        self._version = policy_version
        self._part_hash = sum(part for _, part in taken) % HASH_MODULUS
        return self.publish_anchor(policy_version)

    def _parts_of(self, unit: int, given: Mapping[str, Any]) -> list[Any]:
        """A unit's part of what was given for each of its shards."""
        pairs = [(spec, self._shards[spec.name]) for spec in self._units[unit].shards]
        starts = [spec.offset - whole.offset + spec.skipped - whole.skipped for spec, whole in pairs]
        return [given[s.name][start : start + s.count] for (s, _), start in zip(pairs, starts, strict=True)]

    @contextmanager
    def _mapped(self, encode: Callable[[int], _Made]) -> Iterator[Iterator[_Made]]:
        """``encode`` of every work unit, in order; in threads where there is enough to share."""
        units = range(len(self._units))
        if self._threads == 1 or sum(unit.count for unit in self._units) < _ELEMENTS_WORTH_THREADS:
            yield map(encode, units)
            return
        with ThreadPoolExecutor(self._threads, thread_name_prefix="weight encoding") as pool:
            yield pool.map(encode, units)

    def _part(self, base: _Base, encoded: Iterable[bytes | None]) -> ServedPart:
        """The newest version. ``encoded``: the patch of each unit; None where nothing changed."""
        assert self._version is not None
        entries: list[UnitEntry] = []

        def payload() -> Iterator[bytes]:
            for unit, patch in zip(self._units, encoded, strict=True):
                if patch is not None:
                    entries.append(UnitEntry(unit, len(patch)))
                    yield patch

        chunks = list(_cut(payload()))
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            run_id=self._run_id,
            rank=self._rank,
            policy_version=self._version,
            base_version=base.policy_version,
            base_part_hash=base.part_hash,
            base_digest=base.digest,
            part_hash=self._part_hash,
            units=tuple(entries),
            chunks=tuple(ChunkEntry(digest_of(chunk), len(chunk)) for chunk in chunks),
            shards=base.shards,
        )
        signed = encode_manifest(manifest)
        return ServedPart(self._version, digest_of(signed), signed, chunks)

    def _served(self, part: ServedPart, base_version: int | None, changed: int) -> Published:
        self._server.serve(self._chain)
        source = WeightSource(
            rank=self._rank,
            endpoint=self.endpoint,
            manifest_digest=part.manifest_digest,
            payload_bytes=sum(len(chunk) for chunk in part.chunks),
            changed_elements=changed,
            total_elements=sum(shard.count for shard in self._shards.values()),
        )
        return Published(source, base_version, self._part_hash)


def _hash_change(unit: WorkUnit, delta: EncodedPatch | None, old: BitArray) -> int:
    if delta is None:
        return 0
    assert delta.patch.positions is not None
    return _hash_of(unit, delta.patch) - _hash_of(unit, WeightPatch(delta.patch.positions, old[delta.patch.positions]))


def _hash_of(unit: WorkUnit, patch: WeightPatch) -> int:
    """Share of these elements in the state hash."""
    total = 0
    for shard, part in zip(unit.shards, unit.cut(patch), strict=True):
        total += shard.share_of_hash(part.values, part.positions)
    return total


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
