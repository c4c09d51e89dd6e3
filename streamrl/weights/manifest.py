"""The manifest of one rank's part of one version (its identity, its units, its chunks), and the units it is coded in.

The digest of the encoded manifest is the identity of the part; everything else hangs on it: the manifest
names the digest of every chunk, so the bytes are checked, no matter which process serves them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import cast

import msgspec
import numpy as np
import zstandard

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.comm.decoded_size import SPARE_BYTES, takes_more
from streamrl.weights.codec.bits import BitArray, BitType, PositionArray, bit_type
from streamrl.weights.codec.codec import WeightPatch
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.requests import MANIFEST_LIMIT

FORMAT_VERSION = 8
CHECKPOINT_VERSION = -1
"""Base version of a delta that is made on the checkpoint files both sides began with: no published version."""
_UNFOLDED_AT_LEAST = 1 << 20
_UNFOLDED_TIMES = 256
"""Names of tensors are like each other: a manifest shrinks to a tenth, but not to nothing."""

MOST_SIDES = 16
"""Of a tensor."""

UNIT_ELEMENTS = 1 << 23
"""Elements that are compared, encoded and decoded in one go, at most: threads share a large model by such units."""


class ShardSpec(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of one checkpoint tensor. ``dtype``: bfloat16, float16 or float32. ``shape``: of the full tensor.
    ``offset``, ``count``: flat start and number of elements in the full tensor; a shard may be empty.

    ``run`` 0: the elements lie in a row. Else they are columns of a matrix: ``run`` elements in a row, the next ones
    ``stride`` further on, and so on from ``offset``, of which the first ``skipped`` elements are left out."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    count: int
    run: int = 0
    stride: int = 0
    skipped: int = 0

    def check(self) -> None:
        """Raise ``WeightError`` when the shard leaves its tensor, or its columns their matrix."""
        if len(self.shape) > MOST_SIDES or min(*msgspec.structs.astuple(self)[3:], *self.shape) < 0:
            raise WeightError(
                f"shard [{self.offset}, +{self.count}) of {self.name!r:.80} has {len(self.shape)} sides: none is "
                f"negative, and there are {MOST_SIDES} at most"
            )
        total = math.prod(self.shape)
        column = self.offset % self.stride if self.stride else 0
        if self.run and (not 0 < self.stride <= total or column + self.run > self.stride or total % self.stride):
            raise WeightError(
                f"shard of {self.name!r} has {self.run} columns from column {column} on, in rows of {self.stride} of "
                f"its {total} elements"
            )
        end = self.skipped + self.count
        if self.run and self.count:
            end = (end - 1) // self.run * self.stride + (end - 1) % self.run + 1
        if self.offset + end > total:
            raise WeightError(
                f"shard [{self.offset}, {self.offset + end}) of {self.name!r} leaves its {total} elements"
            )

    def piece(self, start: int, count: int) -> ShardSpec:
        """``count`` elements of the shard, from its element ``start`` on."""
        if self.run:
            return msgspec.structs.replace(self, skipped=self.skipped + start, count=count)
        return msgspec.structs.replace(self, offset=self.offset + start, count=count)

    def places(self, positions: PositionArray | None = None) -> PositionArray:
        """Flat indices in the full tensor of these elements of the shard (None: of all), int64."""
        chosen = np.arange(self.count) if positions is None else positions
        if self.run:
            chosen = chosen + self.skipped
            chosen = chosen // self.run * self.stride + chosen % self.run
        return cast("PositionArray", chosen + self.offset)

    def of(self, bits: BitArray) -> BitArray:
        """The shard's elements of the full tensor's flat ``bits``; a view where they lie in a row."""
        if not self.run:
            return bits[self.offset : self.offset + self.count]
        row, column = divmod(self.offset, self.stride)
        first = self.skipped // self.run
        last = -(-(self.skipped + self.count) // self.run)
        lines = bits.reshape(-1, self.stride)[row + first : row + last, column : column + self.run]
        return lines.reshape(-1)[self.skipped % self.run :][: self.count]

    def share_of_hash(self, bits: BitArray, positions: PositionArray | None = None) -> int:
        """Terms in the state hash of ``bits``, the elements at ``positions`` of the shard (None: all)."""
        if positions is None and not self.run:
            return hash_range(self.name, self.offset, bits)
        return hash_elements(self.name, self.places(positions), bits) if bits.size else 0


class WorkUnit(msgspec.Struct, frozen=True, array_like=True):
    """Shards of one dtype in a row, or pieces of them, up to ``UNIT_ELEMENTS``, that are compared, encoded and decoded
    in one go. A patch has tables of its own, so one of a few thousand elements costs half as much again as the same
    changes among many. Each shard stays a tensor of its own for everything else: its hash, its place on the engine."""

    shards: tuple[ShardSpec, ...]

    @property
    def dtype(self) -> str:
        """The published dtype of all."""
        return self.shards[0].dtype

    @property
    def bits(self) -> BitType:
        """Integer type that the elements are written as."""
        return bit_type(self.dtype, self.name)

    @property
    def count(self) -> int:
        """Elements of all."""
        return sum(shard.count for shard in self.shards)

    @property
    def name(self) -> str:
        """Name of the unit in error messages."""
        first, *others = (shard.name for shard in self.shards)
        return f"{first} and {len(others)} more" if others else first

    def join(self, bits_of: Callable[[ShardSpec], BitArray]) -> BitArray:
        """All elements in a row. Not copied where it is one shard."""
        parts = [bits_of(shard) for shard in self.shards]
        return parts[0] if len(parts) == 1 else cast("BitArray", np.concatenate(parts))

    def cut(self, patch: WeightPatch) -> list[WeightPatch]:
        """Cut a patch of the unit into one for each shard. ``patch``: its positions rise within ``count``."""
        if len(self.shards) == 1:
            return [patch]
        edges = list(accumulate((shard.count for shard in self.shards), initial=0))
        if patch.positions is None:
            return [WeightPatch(None, patch.values[start:stop]) for start, stop in pairwise(edges)]
        places = np.searchsorted(patch.positions, edges).tolist()
        return [
            WeightPatch(patch.positions[first:last] - edge, patch.values[first:last])
            for (first, last), edge in zip(pairwise(places), edges, strict=False)
        ]

    def check(self) -> None:
        """Raise ``WeightError`` for shards that leave their tensor, or that nobody would code together."""
        for shard in self.shards:
            shard.check()
        dtypes = {shard.dtype for shard in self.shards}
        if len(dtypes) != 1 or (len(self.shards) > 1 and self.count > UNIT_ELEMENTS):
            raise WeightError(
                f"{len(self.shards)} shards of {self.count} elements, as {', '.join(sorted(dtypes)) or 'nothing'}, are "
                f"coded together: shards of one dtype are, up to {UNIT_ELEMENTS} elements"
            )


class UnitEntry(msgspec.Struct, frozen=True, array_like=True):
    """One encoded patch: the unit that it decodes to, and its bytes in the payload."""

    unit: WorkUnit
    payload_bytes: int


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True):
    """One piece of the payload: BLAKE2b-128 digest (hexadecimal) and length in bytes."""

    digest: str
    payload_bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Manifest of one rank's part of one version. The payload is the patches of ``units``, one after another, cut into
    ``chunks``. A delta lists only units that changed; an anchor (``base_version`` None) lists all.

    ``base_part_hash`` and ``part_hash``: the rank's part of the state hash before and after. ``base_digest``: of the
    manifest of the base version (empty: there is none), for receivers that lack it too. ``shards``: all that the rank
    publishes, with a delta on the checkpoint only: its reader cannot know that from earlier versions."""

    format_version: int
    run_id: str
    rank: int
    policy_version: int
    base_version: int | None
    base_part_hash: int
    base_digest: str
    part_hash: int
    units: tuple[UnitEntry, ...]
    chunks: tuple[ChunkEntry, ...]
    shards: tuple[ShardSpec, ...] = ()

    @property
    def payload_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.payload_bytes for chunk in self.chunks)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def digest_of(payload: bytes | memoryview) -> str:
    """BLAKE2b-128, hexadecimal."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes whose digest is the identity of the part: msgpack in one zstd frame, since names are like each other.
    They would be ten times the changes of a small model otherwise."""
    return zstandard.ZstdCompressor(level=3, write_checksum=False).compress(_encoder.encode(manifest))


def _unfold(encoded: bytes | memoryview) -> bytes:
    """The inverse. Memory is taken only once the frame has said that it fits in ``MANIFEST_LIMIT``."""
    claimed = zstandard.get_frame_parameters(encoded).content_size
    most = min(MANIFEST_LIMIT, _UNFOLDED_AT_LEAST + _UNFOLDED_TIMES * len(encoded))
    if claimed > most:
        raise zstandard.ZstdError(f"its frame of {len(encoded)} bytes claims {claimed}; {most} are the most")
    unfolded = zstandard.ZstdDecompressor().decompress(encoded, allow_extra_data=False)
    if takes_more(unfolded, 8 * len(unfolded) + SPARE_BYTES):
        raise zstandard.ZstdError(f"its {len(unfolded)} bytes are very many small values")
    return unfolded


def decode_manifest(encoded: bytes | memoryview, expected_digest: str, endpoint: str) -> Manifest:
    """Check the digest, then decode and check the tables against each other."""
    actual = digest_of(encoded)
    if actual != expected_digest:
        raise WeightError(f"manifest from {endpoint} has digest {actual}; announced was {expected_digest}")
    try:
        manifest = _decoder.decode(_unfold(encoded))
    except (zstandard.ZstdError, *UNDECODABLE) as error:
        raise WeightError(f"manifest {expected_digest} from {endpoint} cannot be decoded: {error}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise WeightError(
            f"manifest from {endpoint} has format {manifest.format_version}; this build reads {FORMAT_VERSION}: "
            "run the same streamrl version on both sides"
        )
    in_units = sum(entry.payload_bytes for entry in manifest.units)
    if in_units != manifest.payload_bytes:
        raise WeightError(
            f"manifest {expected_digest} from {endpoint}: units take {in_units} bytes, chunks {manifest.payload_bytes}"
        )
    for entry in manifest.units:
        entry.unit.check()
    for shard in manifest.shards:
        shard.check()
    return manifest


def work_units(shards: Iterable[ShardSpec]) -> list[WorkUnit]:
    """All that a rank publishes, dtype by dtype, cut where a unit is full. Empty shards are part of one too."""
    shards = list(shards)
    units = []
    for dtype in dict.fromkeys(shard.dtype for shard in shards):
        together: list[ShardSpec] = []
        room = UNIT_ELEMENTS
        for shard in (shard for shard in shards if shard.dtype == dtype):
            start = 0
            count = min(room, shard.count)
            while True:
                together.append(shard.piece(start, count))
                start = start + count
                room = room - count
                if not room:
                    units.append(WorkUnit(tuple(together)))
                    together = []
                    room = UNIT_ELEMENTS
                count = min(room, shard.count - start)
                if not count:
                    break
        if together:
            units.append(WorkUnit(tuple(together)))
    return units
