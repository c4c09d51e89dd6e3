"""The manifest of one trainer rank's part of one version, and the work units in which the part is encoded.

``publish.publisher`` writes manifests in the trainer rank's process; ``pull`` reads them in vLLM's worker processes,
``relay`` in the engine's process. The digest of the encoded manifest identifies the part. The manifest has the digest
of every chunk, so that all bytes can be checked, no matter which process serves them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from math import prod
from typing import cast

import numpy as np
import zstandard
from msgspec import Struct, msgpack, structs
from msgspec.structs import replace
from zstandard import ZstdError

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.base.types import Shape
from streamrl.comm.decoded_size import SPARE_BYTES, takes_more
from streamrl.weights.codec.bits import BitArray, BitType, PositionArray, bit_type
from streamrl.weights.codec.codec import WeightPatch
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.requests import MANIFEST_LIMIT

FORMAT_VERSION = 8
CHECKPOINT_VERSION = -1
"""Base version of a delta on the checkpoint files that trainer and engines start from, which are no published
version."""
_ALWAYS_ALLOWED_BYTES = 1 << 20
_LARGEST_COMPRESSION = 256
"""A decompressed manifest may have ``_ALWAYS_ALLOWED_BYTES``, and this many times its compressed bytes in addition.
Real manifests shrink to a tenth, since tensor names are similar."""

MOST_SIDES = 16
"""Largest number of dimensions of a tensor."""

UNIT_ELEMENTS = 1 << 23
"""Largest number of elements of a work unit. Threads encode and decode different units of a large model."""


class ShardSpec(Struct, frozen=True, array_like=True):
    """One rank's part of one checkpoint tensor. ``dtype``: bfloat16, float16 or float32. ``shape``: sizes of the full
    tensor. ``offset``, ``count``: flat start and number of elements in the full tensor; a shard may be empty.

    With ``run`` 0 the elements are contiguous. Otherwise they are columns of a matrix: from ``offset`` on, ``run``
    contiguous elements every ``stride`` elements, without the first ``skipped`` of these elements."""

    name: str
    dtype: str
    shape: Shape
    offset: int
    count: int
    run: int = 0
    stride: int = 0
    skipped: int = 0

    def check(self) -> None:
        """Raise ``WeightError`` when the shard leaves its tensor, or its columns their matrix."""
        if len(self.shape) > MOST_SIDES or min(*structs.astuple(self)[3:], *self.shape) < 0:
            raise WeightError(
                f"shard [{self.offset}, +{self.count}) of {self.name!r:.80} has {len(self.shape)} sides: none is "
                f"negative, and there are {MOST_SIDES} at most"
            )
        total = prod(self.shape)
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

    def part(self, start: int, count: int) -> ShardSpec:
        """Return the spec of ``count`` elements of the shard, from its element ``start`` on."""
        if self.run:
            return replace(self, skipped=self.skipped + start, count=count)
        return replace(self, offset=self.offset + start, count=count)

    def places(self, positions: PositionArray | None = None) -> PositionArray:
        """Return where elements of the shard are in the full tensor: flat indices, int64. ``positions``: indices in the
        shard (None: all elements)."""
        indices = np.arange(self.count) if positions is None else positions
        if self.run:
            indices = indices + self.skipped
            indices = indices // self.run * self.stride + indices % self.run
        return cast("PositionArray", indices + self.offset)

    def of(self, bits: BitArray) -> BitArray:
        """Select the shard's elements from the full tensor's flat ``bits``; a view where they are contiguous."""
        if not self.run:
            return bits[self.offset : self.offset + self.count]
        row, column = divmod(self.offset, self.stride)
        first_row = row + self.skipped // self.run
        end_row = row - (-(self.skipped + self.count) // self.run)  # rounded up
        columns = bits.reshape(-1, self.stride)[first_row:end_row, column : column + self.run]
        return columns.reshape(-1)[self.skipped % self.run :][: self.count]

    def share_of_hash(self, bits: BitArray, positions: PositionArray | None = None) -> int:
        """Return the sum that elements add to the state hash. ``bits``: patterns of the elements at ``positions`` of
        the shard (None: all elements)."""
        if positions is None and not self.run:
            return hash_range(self.name, self.offset, bits)
        return hash_elements(self.name, self.places(positions), bits) if bits.size else 0


class WorkUnit(Struct, frozen=True, array_like=True):
    """Consecutive shards of one dtype, or slices of shards, with at most ``UNIT_ELEMENTS`` elements together, that are
    encoded as one patch. Each patch has tables, so the changes of a few thousand elements would take half as many bytes
    again in a patch of their own. The state hash and the routes of an engine are per tensor, not per unit."""

    shards: tuple[ShardSpec, ...]

    @property
    def dtype(self) -> str:
        """The published dtype of all shards."""
        return self.shards[0].dtype

    @property
    def bits(self) -> BitType:
        """Integer type that holds one element."""
        return bit_type(self.dtype, self.name)

    @property
    def count(self) -> int:
        """Number of elements of all shards."""
        return sum(shard.count for shard in self.shards)

    @property
    def name(self) -> str:
        """Name of the unit in error messages."""
        first = self.shards[0].name
        return f"{first} and {len(self.shards) - 1} more" if len(self.shards) > 1 else first

    def join(self, bits_of: Callable[[ShardSpec], BitArray]) -> BitArray:
        """Concatenate the bits of all shards. A single shard is not copied."""
        bits = [bits_of(shard) for shard in self.shards]
        return bits[0] if len(bits) == 1 else cast("BitArray", np.concatenate(bits))

    def split(self, patch: WeightPatch) -> list[WeightPatch]:
        """Split a patch of the unit into one patch for each shard. The positions of ``patch`` must rise and be below
        ``count``."""
        if len(self.shards) == 1:
            return [patch]
        edges = list(accumulate((shard.count for shard in self.shards), initial=0))
        if patch.positions is None:
            return [WeightPatch(None, patch.values[start:stop]) for start, stop in pairwise(edges)]
        bounds = np.searchsorted(patch.positions, edges).tolist()
        return [
            WeightPatch(patch.positions[first:last] - edge, patch.values[first:last])
            for (first, last), edge in zip(pairwise(bounds), edges, strict=False)
        ]

    def check(self) -> None:
        """Raise ``WeightError`` for a shard that leaves its tensor, and for shards that ``work_units`` would not put
        into one unit."""
        for shard in self.shards:
            shard.check()
        dtypes = {shard.dtype for shard in self.shards}
        if len(dtypes) != 1 or (len(self.shards) > 1 and self.count > UNIT_ELEMENTS):
            raise WeightError(
                f"{len(self.shards)} shards of {self.count} elements, as {', '.join(sorted(dtypes)) or 'nothing'}, are "
                f"coded together: shards of one dtype are, up to {UNIT_ELEMENTS} elements"
            )


class UnitEntry(Struct, frozen=True, array_like=True):
    """One encoded patch: the unit that it decodes to, and its size in the payload."""

    unit: WorkUnit
    payload_bytes: int


class ChunkEntry(Struct, frozen=True, array_like=True):
    """One chunk of the payload: BLAKE2b-128 digest (hexadecimal) and size."""

    digest: str
    payload_bytes: int


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """Manifest of one rank's part of one version. The payload is the concatenation of the patches of ``units``, split
    into ``chunks``. A delta lists only units that changed; an anchor (``base_version`` None) lists all units.

    ``base_part_hash`` and ``part_hash``: the rank's part of the state hash before and after the change.
    ``base_digest``: digest of the manifest of the base version (empty: no such manifest), for receivers that must fetch
    the base version too. ``shards``: all shards that the rank publishes; only in a delta on the checkpoint, whose
    receiver has no earlier version to know them from."""

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
        """Size of all chunks."""
        return sum(chunk.payload_bytes for chunk in self.chunks)


_encoder = msgpack.Encoder()
_decoder = msgpack.Decoder(Manifest)


def digest_of(payload: bytes | memoryview) -> str:
    """Return the BLAKE2b-128 digest, hexadecimal."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest to the bytes whose digest identifies the part: msgpack in one zstd frame. Uncompressed, the
    names of a small model's tensors would take ten times the bytes of its changes."""
    return zstandard.ZstdCompressor(level=3, write_checksum=False).compress(_encoder.encode(manifest))


def _decompressed(encoded: bytes | memoryview) -> bytes:
    """Decompress the zstd frame of a manifest, after the size in the frame's header was checked against the limits.
    Raises ``ZstdError``."""
    claimed = zstandard.get_frame_parameters(encoded).content_size
    limit = min(MANIFEST_LIMIT, _ALWAYS_ALLOWED_BYTES + _LARGEST_COMPRESSION * len(encoded))
    if claimed > limit:
        raise ZstdError(f"its frame of {len(encoded)} bytes claims {claimed}; {limit} are the most")
    content = zstandard.ZstdDecompressor().decompress(encoded, allow_extra_data=False)
    if takes_more(content, 8 * len(content) + SPARE_BYTES):
        raise ZstdError(f"its {len(content)} bytes are very many small values")
    return content


def decode_manifest(encoded: bytes | memoryview, expected_digest: str, endpoint: str) -> Manifest:
    """Check the digest, decode the manifest, and check its tables against each other. ``endpoint``: source of the
    bytes, for errors. Raises ``WeightError``."""
    actual = digest_of(encoded)
    if actual != expected_digest:
        raise WeightError(f"manifest from {endpoint} has digest {actual}; announced was {expected_digest}")
    try:
        manifest = _decoder.decode(_decompressed(encoded))
    except (ZstdError, *UNDECODABLE) as error:
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
    """Group a rank's shards into work units, dtype by dtype. A shard that does not fit into a unit goes on in the next
    one. An empty shard is part of a unit too."""
    shards = list(shards)
    units = []
    for dtype in dict.fromkeys(shard.dtype for shard in shards):
        slices: list[ShardSpec] = []
        free_elements = UNIT_ELEMENTS
        for shard in (shard for shard in shards if shard.dtype == dtype):
            start = 0
            count = min(free_elements, shard.count)
            while True:
                slices.append(shard.part(start, count))
                start = start + count
                free_elements = free_elements - count
                if not free_elements:
                    units.append(WorkUnit(tuple(slices)))
                    slices = []
                    free_elements = UNIT_ELEMENTS
                count = min(free_elements, shard.count - start)
                if not count:
                    break
        if slices:
            units.append(WorkUnit(tuple(slices)))
    return units
