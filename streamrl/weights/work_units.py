"""What is compared, encoded and decoded in one go: shards of one dtype in a row, filled up to ``UNIT_ELEMENTS``.

A patch has tables of its own, so one of a few thousand elements costs half as much again as the same changes among
many. Each shard (or each piece of one that is cut where a unit is full) stays a tensor of its own for everything else:
its hash, its entry in the manifest, its place on the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import cast

import msgspec
import numpy as np

from streamrl.weights import manifest
from streamrl.weights.codec.bits import BitArray, BitType, bit_type
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch
from streamrl.weights.manifest import ShardSpec, TensorEntry


class WorkUnit(msgspec.Struct, frozen=True):
    """Shards of one dtype, or pieces of them, whose elements are coded one after the other."""

    shards: tuple[ShardSpec, ...]

    @property
    def dtype(self) -> str:
        """The published dtype of all."""
        return self.shards[0].dtype

    @property
    def bits(self) -> BitType:
        """What their elements are written as."""
        return bit_type(self.dtype, self.name)

    @property
    def count(self) -> int:
        """Elements of all."""
        return sum(shard.count for shard in self.shards)

    @property
    def name(self) -> str:
        """For error messages."""
        first, *others = (shard.name for shard in self.shards)
        return f"{first} and {len(others)} more" if others else first

    def join(self, bits_of: Callable[[ShardSpec], BitArray]) -> BitArray:
        """All elements in a row. Not copied where it is one shard."""
        parts = [bits_of(shard) for shard in self.shards]
        return parts[0] if len(parts) == 1 else cast("BitArray", np.concatenate(parts))

    def cut(self, patch: WeightPatch) -> list[WeightPatch]:
        """What a patch of all of them makes of each. ``patch``: its positions rise within ``count``."""
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

    def entries(self, encoded: EncodedPatch) -> Iterator[TensorEntry]:
        """Its lines in the manifest."""
        if encoded.listed_elements == self.count:
            yield from self.complete_entries(len(encoded.encoded))
            return
        for index, (shard, part) in enumerate(zip(self.shards, self.cut(encoded.patch), strict=True)):
            yield TensorEntry(shard, part.values.size, 0 if index else len(encoded.encoded), joined=index > 0)

    def complete_entries(self, payload_bytes: int) -> Iterator[TensorEntry]:
        """The same, where so many bytes decode to all elements."""
        for index, shard in enumerate(self.shards):
            yield TensorEntry(shard, shard.count, 0 if index else payload_bytes, joined=index > 0)


def work_units(shards: Iterable[ShardSpec]) -> list[WorkUnit]:
    """All that a rank publishes, dtype by dtype, cut where a unit is full. Empty shards are part of one too."""
    shards, units = list(shards), []
    for dtype in dict.fromkeys(shard.dtype for shard in shards):
        together: list[ShardSpec] = []
        room = manifest.UNIT_ELEMENTS
        for shard in (shard for shard in shards if shard.dtype == dtype):
            start, count = 0, min(room, shard.count)
            while True:
                together.append(shard.piece(start, count))
                start, room = start + count, room - count
                if not room:
                    units.append(WorkUnit(tuple(together)))
                    together, room = [], manifest.UNIT_ELEMENTS
                count = min(room, shard.count - start)
                if not count:
                    break
        if together:
            units.append(WorkUnit(tuple(together)))
    return units


def listed_units(entries: Iterable[TensorEntry]) -> Iterator[tuple[WorkUnit, tuple[TensorEntry, ...]]]:
    """The units of a manifest's tensors, each with its entries."""
    together: list[TensorEntry] = []
    for entry in entries:
        if together and not entry.joined:
            yield WorkUnit(tuple(one.shard for one in together)), tuple(together)
            together = []
        together.append(entry)
    if together:
        yield WorkUnit(tuple(one.shard for one in together)), tuple(together)
