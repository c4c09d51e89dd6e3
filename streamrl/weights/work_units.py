"""What is compared, encoded and decoded in one go: a piece of a large shard, or small shards one after the other.

A patch has a start of its own to learn from, so one of a few thousand elements costs half as much again as the same
changes among many. Small shards of one dtype are therefore coded as if they were one; what is large passes by between
them. Each stays a tensor of its own for everything else: its hash, its entry in the manifest, its place on the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import cast

import msgspec
import numpy as np

from streamrl.weights.bit_patterns import BitArray, BitType, bit_type
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch
from streamrl.weights.manifest import ShardSpec, TensorEntry

JOINED_ELEMENTS = 1 << 19
"""What has fewer elements is joined with others, until there are so many."""


class WorkUnit(msgspec.Struct, frozen=True):
    """Shards of one dtype whose elements are coded one after the other; most often it is one."""

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
    """All that a rank publishes. Every shard is in one unit, or has several of its own; empty ones are joined too."""
    units: list[WorkUnit] = []
    waiting: dict[str, list[ShardSpec]] = {}
    held: Counter[str] = Counter()
    for shard in shards:
        if shard.count >= JOINED_ELEMENTS:
            units.extend(WorkUnit((piece,)) for piece in shard.work_units())
            continue
        waiting.setdefault(shard.dtype, []).append(shard)
        held[shard.dtype] += shard.count
        if held[shard.dtype] >= JOINED_ELEMENTS:
            units.append(WorkUnit(tuple(waiting.pop(shard.dtype))))
            del held[shard.dtype]
    return [*units, *(WorkUnit(tuple(together)) for together in waiting.values())]


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
