"""Writes checkpoint bits into live runtime parameters, and reads them back.

Everything is done on integer views. A runtime parameter holds either the published type, or float32 holding published
bfloat16: the upper half of its bits, with the lower half zero.

``prepare`` does all work that is possible before the engine pauses: where every element goes, what is there now, what
it adds to the state hash. ``apply`` then only compares, writes and reads back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS
from streamrl.weights.codec.bits import BitArray, PositionArray
from streamrl.weights.codec.state_hash import hash_elements
from streamrl.weights.pull.replica import CheckpointReplica, StagedPatch, StagedVersion, TensorSpec
from streamrl.weights.vllm.live_weights_layers import (
    UPPER_HALF,
    LayerWrite,
    LiveLayers,
    hash_rectangle,
    inside,
    integers,
    to_runtime,
)
from streamrl.weights.vllm.live_weights_scatter import scatter_checked
from streamrl.weights.vllm.load_plan import LoadPlan, Rectangle, Route

_SMALL_STORAGE = 2**32  # elements; below it they are counted in 4 bytes, which is what the scatter reads most


class RouteWrite(msgspec.Struct, frozen=True, eq=False):
    """Write through one route: its whole rectangle, or the elements listed.

    ``positions``: int64 [n] flat in the checkpoint tensor, ``elements``: uint32 or int64 [n] in the runtime storage,
    both None for the whole rectangle, in its order. ``old_bits`` is None when nothing is known of what is there.
    ``hash_change``: what it adds to this worker's part of the state hash, 0 where another route counts the elements."""

    route: Route
    tensor: TensorSpec
    positions: PositionArray | None
    elements: npt.NDArray[Any] | None
    new_bits: BitArray
    old_bits: BitArray | None
    hash_change: int


class LiveWeights:
    """The runtime parameters of one worker, seen through its load plan.

    ``counted``: the routes whose elements this worker counts, so that the parts of all workers add up.
    ``state_hash`` is this worker's part. It is the sum over bits that were found, each one, in the live parameters, or
    that a layer was rebuilt from. ``layers``: those of the plan that are rebuilt; None: as ``LiveLayers`` has it."""

    def __init__(
        self, plan: LoadPlan, counted: frozenset[tuple[str, int]], *, layers: LiveLayers | None = None
    ) -> None:
        self.plan = plan
        self.state_hash = 0
        self._counted = counted
        self._layers = layers or LiveLayers(plan, counted)
        self._storages = {name: integers(storage) for name, storage in plan.storages.items()}
        self._in_host_memory = {
            name: storage.numpy().view(f"<u{storage.element_size()}")
            for name, storage in self._storages.items()
            if storage.device.type == "cpu"
        }
        self._compile()

    def prepare(self, staged: StagedVersion, replica: CheckpointReplica) -> list[RouteWrite | LayerWrite]:
        """Locate every staged element. Reads the replica; touches nothing live."""
        writes: list[RouteWrite | LayerWrite] = [
            write
            for name, patch in staged.patches.items()
            for index, route in self._routes(name)
            if (write := self._write_of(staged.tensors[name], patch, index, route, replica)) is not None
        ]
        return writes + self._layers.prepare(staged, replica)

    def apply(self, writes: Sequence[RouteWrite | LayerWrite], *, anchor: bool) -> int:
        """Write, read back, rebuild layers, and return this worker's new part of the state hash.

        Raises ``WeightError`` naming the parameter when a live element is not what the replica says it was, or
        not what was just written: the caller must then undo."""
        direct, layers = _apart(writes)
        failed = ""
        try:
            for write in direct:
                self._write_and_check(write)
        except WeightError as error:  # raised once other workers know: they wait for this one
            failed = str(error)
        self._layers.apply(layers, failed=failed, anchor=anchor)
        return (sum(write.hash_change for write in writes) + (0 if anchor else self.state_hash)) % HASH_MODULUS

    def undo(self, writes: Sequence[RouteWrite | LayerWrite], replica: CheckpointReplica) -> None:
        """Write what was there back to every element that ``writes`` may have touched, and rebuild layers from what
        ``replica`` holds. Raises ``WeightError`` where that cannot be done."""
        direct, layers = _apart(writes)
        for write in direct:
            if write.old_bits is not None:
                self._write(write, write.old_bits)
                continue
            bits = replica.bits(write.tensor.name)
            source = write.route.checkpoint
            self._write(write, inside(source, bits))
        self._layers.undo(layers, replica)

    def audit(self, replica: CheckpointReplica) -> int:
        """Compare every live element with the replica, and hash anew: this worker's part of the state hash. Raises
        ``WeightError`` naming the first parameter and element that differ."""
        total = self._layers.audit(replica)
        for name, spec in replica.tensors.items():
            for index, route in self._routes(name):
                complete = StagedPatch(None, replica.bits(name))
                write = self._write_of(spec, complete, index, route, replica)
                assert write is not None
                _check_equal(write, self._read(write), "in an audit")
                total += write.hash_change
        return total % HASH_MODULUS

    def storages_of(self, writes: Sequence[RouteWrite | LayerWrite]) -> set[int]:
        """``data_ptr()`` of the storages that ``writes`` touch, without those of rebuilt layers."""
        direct, _ = _apart(writes)
        return {self._storages[write.route.parameter].untyped_storage().data_ptr() for write in direct}

    def _routes(self, tensor: str) -> list[tuple[int, Route]]:
        """The routes of a tensor that lead to live memory, and not into a layer that is rebuilt."""
        routes = enumerate(self.plan.routes[tensor])
        return [(index, route) for index, route in routes if route.parameter not in self.plan.layers]

    def _write_of(
        self, spec: TensorSpec, patch: StagedPatch, index: int, route: Route, replica: CheckpointReplica
    ) -> RouteWrite | None:
        """Return the write of a patch through one route; None when none of its elements lie there."""
        counted = (spec.name, index) in self._counted
        if patch.positions is None:
            bits = inside(route.checkpoint, patch.new_bits)
            change = hash_rectangle(spec.name, route.checkpoint, bits) if counted else 0
            return RouteWrite(route, spec, None, None, bits, None, change)
        chosen, elements = route.locate(patch.positions)
        if not chosen.size:
            return None
        positions = patch.positions[chosen]
        new = patch.new_bits[chosen]
        old = replica.bits(spec.name)[positions]
        change = hash_elements(spec.name, positions, new) - hash_elements(spec.name, positions, old) if counted else 0
        if self._storages[route.parameter].numel() < _SMALL_STORAGE:
            elements = elements.astype(np.uint32)
        return RouteWrite(route, spec, positions, elements, new, old, change)

    def _write_and_check(self, write: RouteWrite) -> None:
        live = self._in_host_memory.get(write.route.parameter)
        if live is not None and write.elements is not None and write.old_bits is not None:
            before, after = scatter_checked(live, write.elements, write.old_bits, write.new_bits)
            if before or after:
                raise WeightError(
                    f"runtime parameter {write.route.parameter!r}: {before or after} of {write.elements.size} elements "
                    f"differ {'before' if before else 'after'} the commit: something else than a commit wrote to it"
                )
            return
        if write.old_bits is not None:
            _check_equal(write, self._read(write), "before the commit", write.old_bits)
        self._write(write, write.new_bits)
        _check_equal(write, self._read(write), "after the commit")

    def _write(self, write: RouteWrite, bits: BitArray) -> None:
        storage = self._storages[write.route.parameter]
        values = torch.from_numpy(to_runtime(bits, storage.element_size())).to(storage.device)
        if write.elements is None:
            target = write.route.runtime
            storage.as_strided(target.sizes, target.strides, target.offset).copy_(values.view(target.sizes))
        else:
            storage[_indices(write.elements, storage)] = values

    def _read(self, write: RouteWrite) -> BitArray:
        storage = self._storages[write.route.parameter]
        if write.elements is None:
            target = write.route.runtime
            live = storage.as_strided(target.sizes, target.strides, target.offset).reshape(-1)
        else:
            live = storage[_indices(write.elements, storage)]
        return _from_runtime(live.cpu().numpy(), write)

    def _compile(self) -> None:
        """Compile the scatter for the types at hand: now, and not while the engine is paused."""
        nothing = np.zeros(0, dtype=np.uint32)
        for live in {live.dtype: live for live in self._in_host_memory.values()}.values():
            for bits in (np.zeros(0, dtype=np.uint16), np.zeros(0, dtype=live.dtype)):
                for elements in (nothing, nothing.astype(np.int64)):
                    scatter_checked(live, elements, bits, bits)


def _apart(writes: Sequence[RouteWrite | LayerWrite]) -> tuple[list[RouteWrite], list[LayerWrite]]:
    return [w for w in writes if isinstance(w, RouteWrite)], [w for w in writes if isinstance(w, LayerWrite)]


def _indices(elements: npt.NDArray[Any], storage: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(elements.astype(np.int64, copy=False)).to(storage.device)


def count_routes(
    plans: Sequence[Mapping[str, Sequence[Rectangle]]], worker: int, tensors: Mapping[str, TensorSpec]
) -> frozenset[tuple[str, int]]:
    """Choose the routes that ``worker`` counts: each checkpoint element is counted once over all workers. ``plans``:
    for every worker, by tensor, the checkpoint rectangles of its routes. Equal rectangles (replicated parameters) are
    counted by the first. Raises ``WeightError`` when a tensor is not covered exactly once."""
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


def _from_runtime(live: npt.NDArray[np.generic], write: RouteWrite) -> BitArray:
    if live.dtype.itemsize == write.new_bits.dtype.itemsize:
        return cast("BitArray", live.view(write.new_bits.dtype))
    unsigned = live.view(np.uint32)
    if np.any(unsigned & np.uint32(0xFFFF)):
        raise WeightError(
            f"runtime parameter {write.route.parameter!r} holds float32 values that are no {write.tensor.dtype}: "
            "something else than a commit wrote to it"
        )
    return (unsigned >> np.uint32(UPPER_HALF)).astype(np.uint16)


def _check_equal(write: RouteWrite, live: BitArray, moment: str, expected: BitArray | None = None) -> None:
    """``expected`` None: the new bits."""
    wanted = write.new_bits if expected is None else expected
    wrong = np.flatnonzero(live != wanted)
    if wrong.size:
        first = int(wrong[0])
        positions = write.route.checkpoint.positions() if write.positions is None else write.positions
        raise WeightError(
            f"runtime parameter {write.route.parameter!r}: {wrong.size} of {live.size} elements differ {moment}; "
            f"element {int(positions[first])} of {write.tensor.name!r} is {int(live[first]):#x}, expected "
            f"{int(wanted[first]):#x}"
        )
