"""What weight deltas cost on given updates: bytes against other forms and against their entropy, seconds by stage.

Updates come in slices, so that a model of any size is measured in bounded memory, and still one larger than the caches:
within a slice each stage runs over all units before the next one starts. Every unit is decoded, applied and compared
bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, TypeVar

import msgspec
import numpy as np
from update_entropy import UpdateCounts

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch, decode_patch, encode_patch
from streamrl.weights.codec.state_hash import hash_elements
from streamrl.weights.manifest import ShardSpec, work_units

SLICE_ELEMENTS = 1 << 26
"""Elements measured together, at least: more than the caches hold, and under 2 GB with all that is made of them."""

INDEX_BYTES = 4

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class UpdatedTensor(msgspec.Struct, frozen=True, eq=False):
    """Bits of one tensor before and after an update, uint16 or uint32 [n], and the dtype that they are patterns of."""

    name: str
    dtype: str
    old: BitArray
    new: BitArray


class StageCost(msgspec.Struct, frozen=True, kw_only=True):
    """One stage over all slices. ``dense_gb_per_s``: bytes of the dense weights (10^9) by wall time;
    ``dense_gb_per_core_s``: by processor time, which other work on the machine does not lengthen much."""

    wall_s: float
    processor_s: float
    dense_gb_per_s: float
    dense_gb_per_core_s: float


class DeltaSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the update in several forms. ``index_value_bytes``: int32 positions and raw values. The entropies:
    ``update_entropy``; ``conditional_by_tensor_bytes`` lets each tensor have frequencies of its own."""

    dense_bytes: int
    index_value_bytes: int
    context_free_bytes: float
    conditional_bytes: float
    conditional_by_tensor_bytes: float
    encoded_bytes: int
    encoded_bytes_a_change: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What ``streamrl bench weights`` reports. ``density``: share of elements that changed."""

    updates: str
    tensors: int
    elements: int
    changed: int
    density: float
    threads: int
    sizes: DeltaSizes
    stages: dict[str, StageCost]


def slices_of(tensors: Iterable[UpdatedTensor], elements: int = SLICE_ELEMENTS) -> Iterator[list[UpdatedTensor]]:
    """Whole tensors together, at least ``elements`` of them (fewer in the last slice)."""
    waiting: list[UpdatedTensor] = []
    held = 0
    for tensor in tensors:
        waiting.append(tensor)
        held += tensor.old.size
        if held >= elements:
            yield waiting
            waiting, held = [], 0
    if waiting:
        yield waiting


class DeltaMeter:
    """Adds up slices. ``threads``: units worked on at a time; one core with 1."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._counts: dict[str, UpdateCounts] = {}
        self._by_tensor_bits = 0.0
        self._tensors = self._elements = self._dense_bytes = self._index_value_bytes = self._encoded_bytes = 0
        self._wall: dict[str, float] = {}
        self._processor: dict[str, float] = {}

    def add(self, tensors: Sequence[UpdatedTensor]) -> None:
        """Measure one slice. Raises ``WeightError`` when decoded bits differ from the published ones."""
        units = units_of(tensors)
        self._warm_up(units)
        for tensor in tensors:
            self._count(tensor)
        replica = [unit.old.copy() for unit in units]
        with ThreadPoolExecutor(self._threads) as pool:
            self._timed("diff", pool, _find_changes, units)
            encoded = self._timed("diff + encode", pool, _encode, units)
            patches = self._timed("decode", pool, _decode, list(zip(units, encoded, strict=True)))
            self._timed("apply", pool, _apply, list(zip(replica, patches, strict=True)))
            self._timed("state hash", pool, _hash, list(zip(units, patches, strict=True)))
        self._encoded_bytes += sum(len(patch.encoded) for patch in encoded if patch is not None)
        for unit, held in zip(units, replica, strict=True):
            if not np.array_equal(held, unit.new):
                raise WeightError(f"{unit.name!r} decodes to other bits than were encoded: report this as a bug")

    @property
    def changed(self) -> int:
        """Elements that differed so far."""
        return sum(int(counts.changed.sum()) for counts in self._counts.values())

    def result(self, updates: str) -> Measurement:
        """The sums, once something changed. ``updates`` says in words what was measured."""
        changed = self.changed
        sizes = DeltaSizes(
            dense_bytes=self._dense_bytes,
            index_value_bytes=self._index_value_bytes,
            context_free_bytes=sum(counts.context_free_bits() for counts in self._counts.values()) / 8,
            conditional_bytes=sum(counts.conditional_bits() for counts in self._counts.values()) / 8,
            conditional_by_tensor_bytes=self._by_tensor_bits / 8,
            encoded_bytes=self._encoded_bytes,
            encoded_bytes_a_change=self._encoded_bytes / changed,
        )
        return Measurement(
            updates=updates,
            tensors=self._tensors,
            elements=self._elements,
            changed=changed,
            density=changed / self._elements,
            threads=self._threads,
            sizes=sizes,
            stages={stage: self._cost(stage) for stage in self._wall},
        )

    def _warm_up(self, units: Sequence[UpdatedTensor]) -> None:
        """Compiled code, and the allocator's memory, are there before the clock starts; for each dtype that is new."""
        for dtype in {unit.dtype for unit in units} - self._counts.keys():
            largest = max((unit for unit in units if unit.dtype == dtype), key=lambda unit: unit.old.size)
            _decode((largest, _encode(largest)))

    def _count(self, tensor: UpdatedTensor) -> None:
        counts = UpdateCounts.of(tensor.old, tensor.new, tensor.dtype)
        self._by_tensor_bits += counts.conditional_bits()
        self._counts.setdefault(tensor.dtype, UpdateCounts()).add(counts)
        self._tensors += 1
        self._elements += tensor.old.size
        self._dense_bytes += tensor.old.nbytes
        self._index_value_bytes += int(counts.changed.sum()) * (INDEX_BYTES + tensor.old.itemsize)

    def _timed(
        self, stage: str, pool: ThreadPoolExecutor, work: Callable[[Unit], Result], units: Sequence[Unit]
    ) -> list[Result]:
        wall, processor = time.perf_counter(), time.process_time()
        results = [work(unit) for unit in units] if self._threads == 1 else list(pool.map(work, units))
        self._wall[stage] = self._wall.get(stage, 0.0) + time.perf_counter() - wall
        self._processor[stage] = self._processor.get(stage, 0.0) + time.process_time() - processor
        return results

    def _cost(self, stage: str) -> StageCost:
        wall, processor = self._wall[stage], self._processor[stage]
        return StageCost(
            wall_s=wall,
            processor_s=processor,
            dense_gb_per_s=self._dense_bytes / 1e9 / max(wall, 1e-9),
            dense_gb_per_core_s=self._dense_bytes / 1e9 / max(processor, 1e-9),
        )


def units_of(tensors: Sequence[UpdatedTensor]) -> list[UpdatedTensor]:
    """The units that a publisher makes of them."""
    by_name = {tensor.name: tensor for tensor in tensors}
    shards = [ShardSpec(t.name, t.dtype, (t.old.size,), 0, t.old.size) for t in tensors]

    def bits_of(shard: ShardSpec, which: Literal["old", "new"]) -> BitArray:
        bits: BitArray = getattr(by_name[shard.name], which)
        return bits[shard.offset : shard.offset + shard.count]

    return [
        UpdatedTensor(unit.name, unit.dtype, *(unit.join(partial(bits_of, which=w)) for w in ("old", "new")))
        for unit in work_units(shards)
    ]


def _find_changes(unit: UpdatedTensor) -> int:
    return int(np.flatnonzero(unit.old != unit.new).size)


def _encode(unit: UpdatedTensor) -> EncodedPatch | None:
    return encode_patch(unit.new, unit.old, unit.dtype)


def _decode(pair: tuple[UpdatedTensor, EncodedPatch | None]) -> WeightPatch | None:
    unit, patch = pair
    if patch is None:
        return None
    return decode_patch(patch.encoded, unit.dtype, unit.old.size, unit.name, unit.old)


def _apply(pair: tuple[BitArray, WeightPatch | None]) -> None:
    replica, patch = pair
    if patch is not None and patch.positions is not None:
        replica[patch.positions] = patch.values
    elif patch is not None:
        replica[:] = patch.values


def _hash(pair: tuple[UpdatedTensor, WeightPatch | None]) -> int:
    """Terms of the changed elements, before and after: what a commit adds to the state hash."""
    unit, patch = pair
    if patch is None:
        return 0
    positions = np.arange(unit.old.size) if patch.positions is None else patch.positions
    return hash_elements(unit.name, positions, patch.values) - hash_elements(unit.name, positions, unit.old[positions])
