"""The trainer's side of a push: what changed in this rank's shards, encoded and served.

The shadow holds the bits of the last *acknowledged* version. A delta is always made against it, so every
published version can be applied by every engine that acknowledged, whatever was published in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from streamrl.comm.weights.bit_patterns import BitArray, PositionArray, as_bits, bit_type
from streamrl.comm.weights.codec import encode_patch
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

MAXIMUM_PENDING = 4  # versions published and not acknowledged; the oldest is dropped, a newer delta replaces it


class Published(msgspec.Struct, frozen=True):
    """One rank's part of a published version. ``base_version`` None: an anchor. ``state_hash``: the rank's part."""

    source: WeightSource
    base_version: int | None
    state_hash: int


class _Pending(msgspec.Struct, frozen=True, eq=False):
    """A published version that is not acknowledged: how it differs from the shadow.

    ``patches``: by tensor, positions relative to the shard (None: every element) and their new bits.
    """

    policy_version: int
    patches: dict[str, tuple[PositionArray | None, BitArray]]
    part_hash: int


class WeightPublisher:
    """Publishes one rank's shards. Synchronous; all methods are called from one thread.

    ``endpoint``: where to bind (``ipc://path``, ``tcp://host:port``, ``tcp://host:*``). ``advertise``: the
    address that engines connect to, where it differs from the bound one (``tcp://0.0.0.0:...``).

    Memory: 2 bytes an element (bfloat16) for the shadow; the changed elements of at most four pending
    versions; the encoded bytes of the same versions, which go when a version is acknowledged: every engine has it then.
    An anchor is a whole copy, until the next acknowledgement.
    """

    def __init__(
        self, endpoint: str, *, run_id: str, rank: int, shards: Sequence[ShardSpec], advertise: str | None = None
    ) -> None:
        for shard in shards:
            shard.check()
            bit_type(shard.dtype, shard.name)
        self._run_id, self._rank = run_id, rank
        self._shards = {shard.name: shard for shard in shards}
        if len(self._shards) != len(shards):
            raise WeightError(f"rank {rank} was given {len(shards)} shards with {len(self._shards)} different names")
        self._advertise = advertise
        self._thread = ServingThread(endpoint, f"weight publisher {rank}")
        self._shadow: dict[str, BitArray] | None = None
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
        pending = self._difference(policy_version, checked)
        self._pending[policy_version] = pending
        while len(self._pending) > MAXIMUM_PENDING:
            del self._pending[min(self._pending)]
        return self._encode(pending, checked, anchor=self._shadow is None)

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
        return self._encode(pending, self._materialise(pending), anchor=True)

    def acknowledge(self, policy_version: int) -> None:
        """Every engine holds ``policy_version``: the shadow advances to it, older versions are forgotten."""
        if policy_version == self._acknowledged:
            return
        pending = self._pending.get(policy_version)
        if pending is None:
            raise WeightError(
                f"version {policy_version} was acknowledged; pending are {sorted(self._pending)}, "
                f"the shadow is at {self._acknowledged}"
            )
        newer = [self._pending[v] for v in sorted(self._pending) if v > policy_version]
        complete = {p.policy_version: self._materialise(p) for p in newer}
        self._shadow = self._materialise(pending, in_place=True)
        self._acknowledged, self._acknowledged_hash = policy_version, pending.part_hash
        self._pending = {version: self._difference(version, bits) for version, bits in complete.items()}
        self._keep_served(self._served, set(self._pending))

    def _difference(self, policy_version: int, bits: Mapping[str, BitArray]) -> _Pending:
        """How ``bits`` differ from the shadow, and their hash."""
        if self._shadow is None:
            part_hash = sum(hash_range(name, self._shards[name].offset, values) for name, values in bits.items())
            return _Pending(policy_version, {n: (None, v.copy()) for n, v in bits.items()}, part_hash % MODULUS)
        part_hash = self._acknowledged_hash
        patches: dict[str, tuple[PositionArray | None, BitArray]] = {}
        for name, values in bits.items():
            old = self._shadow[name]
            positions = np.flatnonzero(values != old).astype(np.int64, copy=False)
            if positions.size:
                changed, places = values[positions], positions + self._shards[name].offset
                part_hash += hash_elements(name, places, changed) - hash_elements(name, places, old[positions])
                patches[name] = (positions, changed)
        return _Pending(policy_version, patches, part_hash % MODULUS)

    def _materialise(self, pending: _Pending, *, in_place: bool = False) -> dict[str, BitArray]:
        """All bits of a pending version. ``in_place``: the shadow's memory becomes the result."""
        complete: dict[str, BitArray] = {}
        for name in self._shards:
            positions, values = pending.patches.get(name, (_NOTHING, None))
            if positions is None and values is not None:
                complete[name] = values
                continue
            assert self._shadow is not None
            complete[name] = self._shadow[name] if in_place else self._shadow[name].copy()
            if values is not None:
                complete[name][positions] = values
        return complete

    def _encode(self, pending: _Pending, bits: Mapping[str, BitArray], *, anchor: bool) -> Published:
        entries: list[TensorEntry] = []

        def patches() -> Iterator[bytes]:
            for name, shard in self._shards.items():
                if not anchor and name not in pending.patches:
                    continue
                positions = None if anchor else pending.patches[name][0]
                patch = encode_patch(bits[name], positions)
                entries.append(TensorEntry(shard, shard.count if positions is None else positions.size, len(patch)))
                yield patch

        chunks = list(_cut(patches()))
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
        source = WeightSource(
            rank=self._rank,
            endpoint=self.endpoint,
            manifest_digest=part.manifest_digest,
            payload_bytes=manifest.payload_bytes,
            changed_elements=sum(entry.changed_elements for entry in entries),
            total_elements=sum(shard.count for shard in self._shards.values()),
        )
        return Published(source, base_version, pending.part_hash)

    def _keep_served(self, parts: list[ServedPart], wanted: set[int | None]) -> None:
        """Serve the parts of versions that may still be asked for."""
        self._served = [part for part in parts if part.policy_version in wanted]
        self._thread.serve(self._served)


_NOTHING = np.zeros(0, dtype=np.int64)


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
