"""Encodes and serves the changes of one trainer rank's shards, version by version.

A trainer rank's process makes one ``WeightPublisher`` (``torch_tensors.start_publisher``), and publishes after each
optimizer step; an outside training loop makes its own. Each version is a delta on the version published before it,
whose bits are the *baseline*. An engine that missed versions fetches the links of the chain that it lacks, and commits
them as one. The first link is made on the checkpoint that the engines load, where the publisher has its path; otherwise
the first version is complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS, WeightSource
from streamrl.base.messages import Published as Published
from streamrl.base.run_process import usable_cores
from streamrl.comm.object_store import in_store
from streamrl.weights.codec.bits import BitArray, bit_type
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch, encode_complete
from streamrl.weights.distance import Mover
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
from streamrl.weights.publish.tensor_source import CpuTensors
from streamrl.weights.pull.loaded_checkpoint import CheckpointBase
from streamrl.weights.pull.trainer_memory import NO_VERSION, TrainerMemory
from streamrl.weights.requests import CHUNK_BYTES
from streamrl.weights.store.stored_parts import StoredParts

_logger = getLogger(__name__)
_Result = TypeVar("_Result")
_ELEMENTS_WORTH_THREADS = 1 << 22
_CHAIN_SHARE = 4  # a quarter of the baseline's bytes: some 70 versions that change 1 % each


class _Base(Struct, frozen=True):
    """The base of a version. ``policy_version``: number of the version (None: no base). ``part_hash``: the rank's part
    of its state hash. ``digest``: digest of its manifest. ``shards``: value of ``Manifest.shards`` for a delta on
    it."""

    policy_version: int | None = None
    part_hash: int = 0
    digest: str = ""
    shards: tuple[ShardSpec, ...] = ()


class WeightPublisher:
    """Publishes one rank's shards. Synchronous; all methods are called from one thread.

    ``endpoint``: address to bind (``ipc://path``, ``tcp://host:port``, ``tcp://host:*``), or a prefix in an object
    store for this rank alone (``s3://bucket/prefix``); then ``publish`` returns when the version is in the store.

    ``threads``: number of threads that encode a large model, without the GIL for most of the time; by default half of
    the cores, at most 8. ``checkpoint``: file or directory that the engines load; the first version is a delta on it.
    ``chain_bytes``: size limit of the encoded versions that are kept after every engine has them, for engines that
    restart (None: a quarter of the weights' bytes). ``source``: reader of the tensors given to ``publish``, where
    they are not numpy arrays.

    Memory: the bits of the last published version, 2 bytes an element (bfloat16), and the encoded bytes of the chain.
    An anchor takes the size of all weights until a newer version is acknowledged."""

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
        source: CpuTensors | None = None,
        movers: Collection[Mover] = (Mover.ENCODED,),
    ) -> None:
        for shard in shards:
            shard.check()
            bit_type(shard.dtype, shard.name)
        self._run_id = run_id
        self._rank = rank
        self._shards = {shard.name: shard for shard in shards}
        self._elements = sum(shard.count for shard in shards)
        if len(self._shards) != len(shards):
            raise WeightError(f"rank {rank} was given {len(shards)} shards with {len(self._shards)} different names")
        self._units = work_units(shards)
        self._source = source or CpuTensors()
        self._threads = threads or max(1, min(8, usable_cores() // 2))
        dense = sum(shard.count * bit_type(shard.dtype, shard.name).itemsize for shard in shards)
        self._chain = Chain(dense // _CHAIN_SHARE if chain_bytes is None else chain_bytes)
        self._checkpoint = None if checkpoint is None else CheckpointBase(checkpoint)
        server = StoredParts(endpoint) if in_store(endpoint) else PublisherServer(endpoint, f"weight publisher {rank}")
        self._server: StoredParts | PublisherServer = server
        self._memory: TrainerMemory | None = None
        if set(movers) - {Mover.ENCODED}:
            device = self._source.share(self._units) if Mover.DEVICE in movers else ("", b"")
            self._memory = _open_memory(run_id, self._units, device)
        self._encodes = Mover.ENCODED in movers or self._memory is None
        self._baseline: list[BitArray] = []
        self._version: int | None = None
        self._part_hash = 0

    @property
    def endpoint(self) -> str:
        """Endpoint from which engines fetch; complete after ``start``, which chooses the port of ``tcp://host:*``."""
        return self._server.endpoint

    def start(self) -> None:
        """Bind the endpoint and serve from a thread of its own. Raises ``WeightError`` when it cannot bind."""
        self._server.start()

    def close(self) -> None:
        self._server.close()
        if self._memory is not None:
            self._memory.close()

    def publish(self, policy_version: int, bits: Mapping[str, Any]) -> Published:
        """Publish a version, newer than all before, as a delta on the last one. The first version is a delta on the
        checkpoint, or complete.

        ``bits``: flat integer views of this rank's shards (numpy uint16 for bfloat16/float16, uint32 for float32) by
        tensor name, or tensors that the publisher's ``source`` reads. They are not used after the call. Raises
        ``WeightError`` for a version that is not newer, a missing tensor, a wrong size or type."""
        self._server.check()
        if self._version is not None and policy_version <= self._version:
            raise WeightError(f"version {policy_version} cannot be published: {self._version} was published already")
        if bits.keys() != self._shards.keys():
            wrong = sorted(bits.keys() ^ self._shards.keys())[:5]
            raise WeightError(f"published tensors differ from the shards of rank {self._rank}: {', '.join(wrong)}")
        tensors = {name: self._source.checked(bits[name], shard) for name, shard in self._shards.items()}
        if self._version is None:
            self._take_checkpoint()
        with self._writing(policy_version):
            if self._version is None:
                return self._publish_first(policy_version, tensors)
            return self._publish_changes(policy_version, tensors)

    def _publish_changes(self, policy_version: int, tensors: Mapping[str, Any]) -> Published:
        """Publish a version as a delta on the last one."""

        def encode(unit: int) -> tuple[EncodedPatch | None, int]:
            spec = self._units[unit]
            baseline = self._baseline[unit]
            changes = self._source.changes if self._encodes else self._source.patch
            delta = changes(unit, self._slices_of(unit, tensors), baseline, spec.dtype)
            return delta, _hash_change(spec, delta, baseline)

        with self._mapped(encode) as results:
            deltas = list(results)
        base = _Base(self._version, self._part_hash, self._chain.newest_digest)
        if self._version == CHECKPOINT_VERSION:
            base = replace(base, shards=tuple(self._shards.values()))
        patches = {unit: delta.patch for unit, (delta, _) in enumerate(deltas) if delta is not None}
        self._version = policy_version
        self._part_hash = (base.part_hash + sum(hash_change for _, hash_change in deltas)) % HASH_MODULUS
        for unit, patch in patches.items():
            self._baseline[unit][patch.positions] = patch.values
        self._source.advance(patches)
        part = None
        if self._encodes:
            part = self._part(base, (None if delta is None else delta.encoded for delta, _ in deltas))
            self._chain.add(part)
        return self._serve(part, base.policy_version, sum(patch.values.size for patch in patches.values()))

    def publish_anchor(self, policy_version: int) -> Published:
        self._server.check()
        if policy_version != self._version:
            raise WeightError(f"version {policy_version} cannot be anchored: the newest is {self._version}")
        self._encodes = True
        with self._mapped(lambda unit: encode_complete(self._baseline[unit])) as patches:
            part = self._part(_Base(), patches)
        self._chain.add_anchor(part)
        return self._serve(part, None, self._elements)

    def acknowledge(self, policy_version: int) -> None:
        if self._version is None or policy_version > self._version:
            raise WeightError(f"version {policy_version} was acknowledged; the newest is {self._version}")
        self._chain.acknowledge(policy_version)
        self._server.serve(self._chain)

    def _take_checkpoint(self) -> None:
        """Make the checkpoint that the engines load the baseline, where its path is known and it has the published
        tensors."""
        if self._checkpoint is None:
            return
        try:
            part_hash = self._checkpoint.part_hash(self._shards.values())
        except WeightError:  # the files have other tensors, or are missing: the first version is complete
            return
        self._set_baseline(unit.join(self._checkpoint.bits_of) for unit in self._units)
        self._version = CHECKPOINT_VERSION
        self._part_hash = part_hash

    def _publish_first(self, policy_version: int, tensors: Mapping[str, Any]) -> Published:
        """Publish the first version, which has no base."""

        def read(unit: int) -> tuple[BitArray, int]:
            spec = self._units[unit]
            bits = self._source.complete(self._slices_of(unit, tensors), spec.dtype)
            return bits, _hash_of(spec, WeightPatch(None, bits))

        with self._mapped(read) as results:
            units = list(results)
        self._set_baseline(bits for bits, _ in units)
        self._version = policy_version
        self._part_hash = sum(unit_hash for _, unit_hash in units) % HASH_MODULUS
        if not self._encodes:
            return self._serve(None, None, self._elements)
        return self.publish_anchor(policy_version)

    def _set_baseline(self, units: Iterable[BitArray]) -> None:
        """Copy the bits of all units: to the memory that engines read, where there is one."""
        if self._memory is None:
            self._baseline = [bits.copy() for bits in units]
            return
        self._baseline = self._memory.bits
        for target, bits in zip(self._baseline, units, strict=True):
            target[:] = bits
        self._source.hold(self._baseline)

    @contextmanager
    def _writing(self, policy_version: int) -> Iterator[None]:
        """Mark the memory as being written meanwhile, and then as ``policy_version``."""
        if self._memory is None:
            yield
            return
        self._memory.version = NO_VERSION
        yield
        self._memory.version = policy_version

    def _slices_of(self, unit: int, tensors: Mapping[str, Any]) -> list[Any]:
        """Slice from ``tensors``, which hold a rank's shards, the elements of each shard of a unit."""
        slices = []
        for spec in self._units[unit].shards:
            shard = self._shards[spec.name]
            start = spec.offset - shard.offset + spec.skipped - shard.skipped
            slices.append(tensors[spec.name][start : start + spec.count])
        return slices

    @contextmanager
    def _mapped(self, function: Callable[[int], _Result]) -> Iterator[Iterator[_Result]]:
        """Call ``function`` with the number of every work unit, and yield the results in order. A large model is shared
        among threads."""
        units = range(len(self._units))
        if self._threads == 1 or sum(unit.count for unit in self._units) < _ELEMENTS_WORTH_THREADS:
            yield map(function, units)
            return
        with ThreadPoolExecutor(self._threads, thread_name_prefix="weight encoding") as pool:
            yield pool.map(function, units)

    def _part(self, base: _Base, encoded: Iterable[bytes | None]) -> ServedPart:
        """Make the part of the newest version. ``encoded``: patch of each unit; None where nothing changed."""
        assert self._version is not None
        entries: list[UnitEntry] = []

        def payload() -> Iterator[bytes]:
            for unit, patch in zip(self._units, encoded, strict=True):
                if patch is not None:
                    entries.append(UnitEntry(unit, len(patch)))
                    yield patch

        chunks = list(_chunks_of(payload()))
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
        encoded_manifest = encode_manifest(manifest)
        return ServedPart(self._version, digest_of(encoded_manifest), encoded_manifest, chunks)

    def _serve(self, part: ServedPart | None, base_version: int | None, changed: int) -> Published:
        """Serve all parts of the chain, and return the description of ``part`` for the announcement. None: the version
        is in memory only."""
        self._server.serve(self._chain)
        digest = ""
        payload_bytes = 0
        if part is not None:
            digest = part.manifest_digest
            payload_bytes = sum(len(chunk) for chunk in part.chunks)
        source = WeightSource(
            rank=self._rank,
            endpoint=self.endpoint,
            manifest_digest=digest,
            payload_bytes=payload_bytes,
            changed_elements=changed,
            total_elements=self._elements,
            memory=None if self._memory is None else self._memory.handle,
        )
        return Published(source, base_version, self._part_hash)


def _open_memory(run_id: str, units: Sequence[WorkUnit], device: tuple[str, bytes]) -> TrainerMemory | None:
    """Return memory for engines of this host; None, with a warning, where the system has none."""
    try:
        return TrainerMemory.create(run_id, units, device)
    except (OSError, AttributeError) as error:  # AttributeError: this system has no memfd
        _logger.warning("versions are encoded for all engines, since memory cannot be shared: %s", error)
        return None


def _hash_change(unit: WorkUnit, delta: EncodedPatch | None, baseline: BitArray) -> int:
    """Return the change of the state hash by a delta on ``baseline``."""
    if delta is None:
        return 0
    assert delta.patch.positions is not None
    old = WeightPatch(delta.patch.positions, baseline[delta.patch.positions])
    return _hash_of(unit, delta.patch) - _hash_of(unit, old)


def _hash_of(unit: WorkUnit, patch: WeightPatch) -> int:
    """Return the sum that the elements of a patch add to the state hash."""
    total = 0
    for shard, shard_patch in zip(unit.shards, unit.split(patch), strict=True):
        total += shard.share_of_hash(shard_patch.values, shard_patch.positions)
    return total


def _chunks_of(patches: Iterable[bytes]) -> Iterator[memoryview]:
    """Split the payload into chunks. The payload is never in memory as one array."""
    chunk = bytearray()
    for patch in patches:
        start = 0
        while start < len(patch):
            addition = patch[start : start + CHUNK_BYTES - len(chunk)]
            chunk += addition
            start += len(addition)
            if len(chunk) == CHUNK_BYTES:
                yield memoryview(chunk).toreadonly()
                chunk = bytearray()
    if chunk:
        yield memoryview(chunk).toreadonly()
