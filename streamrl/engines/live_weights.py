"""Writes checkpoint bits into live runtime parameters, and reads them back.

Everything is done on integer views. A runtime parameter holds either the published type, or float32 holding
published bfloat16: the upper half of its bits, with the lower half zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from streamrl.comm.weights.bit_patterns import BitArray, PositionArray
from streamrl.comm.weights.mirror import CheckpointMirror, StagedVersion, TensorSpec
from streamrl.comm.weights.state_hash import MODULUS, hash_elements, hash_range
from streamrl.engines.load_plan import LoadPlan, Rectangle, Route
from streamrl.errors import WeightError

_UPPER_HALF = 16


class RouteWrite(msgspec.Struct, frozen=True, eq=False):
    """What one route writes: its whole rectangle, or the elements listed.

    ``positions``: int64 [n] flat in the checkpoint tensor, ``elements``: int64 [n] in the runtime storage, both
    None for the whole rectangle, in its order. ``old_bits`` is None when nothing is known of what is there.
    ``counted``: whether this worker counts these elements in its part of the state hash.
    """

    route: Route
    tensor: TensorSpec
    positions: PositionArray | None
    elements: PositionArray | None
    new_bits: BitArray
    old_bits: BitArray | None
    counted: bool


class LiveWeights:
    """The runtime parameters of one worker, seen through its load plan.

    ``counted``: the routes whose elements this worker counts, so that the parts of all workers add up.
    ``state_hash`` is this worker's part, always computed from bits read back from the live parameters.
    """

    def __init__(self, plan: LoadPlan, counted: frozenset[tuple[str, int]]) -> None:
        self.plan = plan
        self.state_hash = 0
        self._counted = counted
        self._storages = {name: _integer_view(storage) for name, storage in plan.storages.items()}

    def prepare(self, staged: StagedVersion, mirror: CheckpointMirror) -> list[RouteWrite]:
        """Where every staged element goes. Reads the mirror; touches nothing live."""
        return list(self._writes(staged, mirror))

    def apply(self, writes: Sequence[RouteWrite], *, anchor: bool) -> int:
        """Write, read back, and return this worker's new part of the state hash (full recomputation for an anchor).

        Raises ``WeightError`` naming the parameter when a live element is not what the mirror says it was, or
        not what was just written: the caller must then undo.
        """
        total = 0 if anchor else self.state_hash
        for write in writes:
            if write.old_bits is not None:
                before = self._read(write)
                _check_equal(write, before, write.old_bits, "before the commit")
                total -= _hash(write, before)
            self._write(write, write.new_bits)
        for write in writes:
            after = self._read(write)
            _check_equal(write, after, write.new_bits, "after the commit")
            total += _hash(write, after)
        return total % MODULUS

    def undo(self, writes: Sequence[RouteWrite], mirror: CheckpointMirror) -> None:
        """Write the mirror's bits back to every element that ``writes`` may have touched."""
        for write in writes:
            bits = mirror.bits(write.tensor.name)
            source = write.route.checkpoint
            self._write(write, _inside(source, bits) if write.positions is None else bits[write.positions])

    def storages_of(self, writes: Sequence[RouteWrite]) -> set[int]:
        """``data_ptr()`` of the storages that ``writes`` touch."""
        return {self._storages[write.route.parameter].untyped_storage().data_ptr() for write in writes}

    def _writes(self, staged: StagedVersion, mirror: CheckpointMirror) -> Iterator[RouteWrite]:
        for name, patch in staged.patches.items():
            spec = staged.tensors[name]
            for index, route in enumerate(self.plan.routes[name]):
                counted = (name, index) in self._counted
                if patch.positions is None:
                    yield RouteWrite(route, spec, None, None, _inside(route.checkpoint, patch.new_bits), None, counted)
                    continue
                chosen, elements = route.locate(patch.positions)
                if chosen.size:
                    positions = patch.positions[chosen]
                    old = mirror.bits(name)[positions]
                    yield RouteWrite(route, spec, positions, elements, patch.new_bits[chosen], old, counted)

    def _write(self, write: RouteWrite, bits: BitArray) -> None:
        storage = self._storages[write.route.parameter]
        values = torch.from_numpy(_to_runtime(bits, storage.element_size())).to(storage.device)
        if write.elements is None:
            target = write.route.runtime
            storage.as_strided(target.sizes, target.strides, target.offset).copy_(values.view(target.sizes))
        else:
            storage[torch.from_numpy(write.elements).to(storage.device)] = values

    def _read(self, write: RouteWrite) -> BitArray:
        storage = self._storages[write.route.parameter]
        if write.elements is None:
            target = write.route.runtime
            live = storage.as_strided(target.sizes, target.strides, target.offset).reshape(-1)
        else:
            live = storage[torch.from_numpy(write.elements).to(storage.device)]
        return _from_runtime(live.cpu().numpy(), write)


def rectangle_positions(rectangle: Rectangle) -> PositionArray:
    """Flat positions of a rectangle's elements, int64 [n], in the order of its dimensions."""
    positions = np.full((), rectangle.offset, dtype=np.int64)
    for size, stride in zip(rectangle.sizes, rectangle.strides, strict=True):
        positions = positions[..., None] + np.arange(size, dtype=np.int64) * stride
    return positions.reshape(-1)


def _inside(rectangle: Rectangle, bits: BitArray) -> BitArray:
    """The elements of ``bits`` inside the rectangle, flat: a view where they are contiguous, else a copy."""
    if rectangle.strides == (1,):
        return bits[rectangle.offset : rectangle.offset + rectangle.elements]
    return bits[rectangle_positions(rectangle)]


def count_routes(
    plans: Sequence[Mapping[str, Sequence[Rectangle]]], worker: int, tensors: Mapping[str, TensorSpec]
) -> frozenset[tuple[str, int]]:
    """Which routes ``worker`` counts: each checkpoint element is counted once over all workers.

    ``plans``: for every worker, by tensor, the checkpoint rectangles of its routes. Equal rectangles (replicated
    parameters) are counted by the first. Raises ``WeightError`` when a tensor is not covered exactly once.
    """
    taken: set[tuple[str, Rectangle]] = set()
    elements = dict.fromkeys(tensors, 0)
    mine: set[tuple[str, int]] = set()
    for index, plan in enumerate(plans):
        for name, rectangles in plan.items():
            for number, rectangle in enumerate(rectangles):
                if (name, rectangle) in taken:
                    continue
                taken.add((name, rectangle))
                elements[name] += rectangle.elements
                if index == worker:
                    mine.add((name, number))
    for name, found in elements.items():
        if found != tensors[name].elements:
            raise WeightError(
                f"{found} of {tensors[name].elements} elements of published tensor {name!r} map to runtime parameters "
                "of this engine: publish exactly what the model loads (for tied weights, one name)"
            )
    return frozenset(mine)


def _integer_view(storage: torch.Tensor) -> torch.Tensor:
    return storage.view(torch.int16 if storage.element_size() == 2 else torch.int32)


def _to_runtime(bits: BitArray, element_size: int) -> npt.NDArray[np.int16] | npt.NDArray[np.int32]:
    if bits.dtype.itemsize == element_size:
        flat = np.ascontiguousarray(bits)
        return flat.view(np.int16) if element_size == 2 else flat.view(np.int32)
    return (bits.astype(np.uint32) << np.uint32(_UPPER_HALF)).view(np.int32)


def _from_runtime(live: npt.NDArray[np.generic], write: RouteWrite) -> BitArray:
    if live.dtype.itemsize == write.new_bits.dtype.itemsize:
        return cast("BitArray", live.view(write.new_bits.dtype))
    unsigned = live.view(np.uint32)
    if np.any(unsigned & np.uint32(0xFFFF)):
        raise WeightError(
            f"runtime parameter {write.route.parameter!r} holds float32 values that are no {write.tensor.dtype}: "
            "something else than a commit wrote to it"
        )
    return (unsigned >> np.uint32(_UPPER_HALF)).astype(np.uint16)


def _check_equal(write: RouteWrite, live: BitArray, expected: BitArray, moment: str) -> None:
    wrong = np.flatnonzero(live != expected)
    if wrong.size:
        first = int(wrong[0])
        positions = rectangle_positions(write.route.checkpoint) if write.positions is None else write.positions
        raise WeightError(
            f"runtime parameter {write.route.parameter!r}: {wrong.size} of {live.size} elements differ {moment}; "
            f"element {int(positions[first])} of {write.tensor.name!r} is {int(live[first]):#x}, expected "
            f"{int(expected[first]):#x}"
        )


def _hash(write: RouteWrite, bits: BitArray) -> int:
    if not write.counted:
        return 0
    source = write.route.checkpoint
    if write.positions is None and source.strides == (1,):
        return hash_range(write.tensor.name, source.offset, bits)
    positions = rectangle_positions(source) if write.positions is None else write.positions
    return hash_elements(write.tensor.name, positions, bits)
