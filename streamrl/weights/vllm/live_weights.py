"""Writes checkpoint bits to live runtime parameters, and reads them back. ``weight_receiver.py`` makes one
``LiveWeights`` in each vLLM worker's process; ``weight_transaction.py`` calls it.

All work is on integer views. A runtime parameter has either the published dtype, or it is float32 and holds published
bfloat16 (in the upper half of its bits, with zeros in the lower half), or it is bfloat16 and holds published float32,
rounded. Of the last, the state hash counts the published bits, and the parameter is compared with the rounded ones.

``prepare`` does all work that is possible before the engine pauses: it computes the place of every element, its old and
new bits, and the change of the state hash. ``apply`` then only compares, writes and reads back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS
from streamrl.weights.codec.bits import BitArray, PositionArray
from streamrl.weights.codec.state_hash import hash_elements
from streamrl.weights.pull.replica import CheckpointReplica, StagedPatch, StagedVersion, TensorSpec, TensorSpecs
from streamrl.weights.vllm.device_writes import DeviceWrite, device_writes
from streamrl.weights.vllm.live_weights_layers import (
    UPPER_HALF,
    LayerWrite,
    LiveLayers,
    as_held,
    hash_rectangle,
    inside,
    integers,
    to_runtime,
)
from streamrl.weights.vllm.live_weights_scatter import scatter_checked
from streamrl.weights.vllm.load_plan import LoadPlan, Rectangle, Route

_SMALL_STORAGE = 2**32  # elements; indices into smaller storages take 4 bytes: most of what the scatter reads


class RouteWrite(Struct, frozen=True, eq=False):
    """A write through one route: all elements of its rectangle, or listed ones.

    ``positions``: int64 [n], flat in the checkpoint tensor. ``elements``: uint32 or int64 [n], flat in the runtime
    storage. Both are None for all elements, in the order of the rectangle. ``new_bits``: published bits, or the rounded
    ones that the parameter holds of them. ``old_bits``: the same of the replica; None where all elements are written,
    without a comparison. ``hash_change``: change of this worker's part of the state
    hash; 0 where another route counts the elements."""

    route: Route
    tensor: TensorSpec
    positions: PositionArray | None
    elements: NDArray[Any] | None
    new_bits: BitArray
    old_bits: BitArray | None
    hash_change: int


Write = RouteWrite | DeviceWrite | LayerWrite


class LiveWeights:
    """The runtime parameters of one worker, and the load plan that leads to them.

    ``counted``: routes, by tensor and index, whose elements this worker counts in its part of the state hash
    (``count_routes``). ``layers``: rebuilt layers of the plan; None: layers that are rebuilt without other workers.
    ``state_hash``: part of the state hash that this worker counts, summed over bits that were read back from live
    parameters, and bits from which layers were rebuilt."""

    def __init__(
        self, plan: LoadPlan, counted: frozenset[tuple[str, int]], *, layers: LiveLayers | None = None
    ) -> None:
        self.plan = plan
        self.state_hash = 0
        self._counted = counted
        self._layers = layers or LiveLayers(plan, counted)
        self._storages = {name: integers(storage) for name, storage in plan.storages.items()}
        self._in_cpu_memory = {
            name: storage.numpy().view(f"<u{storage.element_size()}")
            for name, storage in self._storages.items()
            if storage.device.type == "cpu"
        }
        self._compile()

    def prepare(self, staged: StagedVersion, replica: CheckpointReplica) -> list[Write]:
        """Compute the writes of a staged version. Reads the replica, and neither reads nor writes live weights."""
        writes: list[Write] = []
        for name, bits in (staged.device or {}).items():
            for index, route in self._routes(name):
                counted = (name, index) in self._counted
                live = self._storages[route.parameter]
                writes += device_writes(name, route, live, bits, counted=counted, complete=staged.is_anchor)
                if live.device.type == "cuda":
                    torch.cuda.synchronize(live.device)  # the commit may use another stream than this thread
        for name, patch in staged.patches.items():
            for index, route in self._routes(name):
                route_write = self._write_of(staged.tensors[name], patch, index, route, replica)
                if route_write is not None:
                    writes.append(route_write)
        return writes + self._layers.prepare(staged, replica)

    def apply(self, writes: Sequence[Write], *, anchor: bool) -> int:
        """Write, read back, rebuild layers, and return this worker's new part of the state hash. ``anchor``: whether
        the writes are a complete version: then layers are rebuilt without a check of their tensors.

        Raises ``WeightError`` naming the parameter when a live element has other bits than the replica before the
        write, or than the new ones after it. The caller must then call ``undo``."""
        route_writes, layer_writes = _split(writes)
        failure = ""
        try:
            for write in route_writes:
                self._write_and_check(write)
        except WeightError as error:  # raised in ``LiveLayers.apply``, after other workers, which wait, have got it
            failure = str(error)
        self._layers.apply(layer_writes, failure=failure, anchor=anchor)
        return (sum(write.hash_change for write in writes) + (0 if anchor else self.state_hash)) % HASH_MODULUS

    def undo(self, writes: Sequence[Write], replica: CheckpointReplica) -> None:
        """Restore every element that ``writes`` may have changed, and rebuild layers, from ``replica``. Raises
        ``WeightError`` where this is impossible."""
        route_writes, layer_writes = _split(writes)
        for write in route_writes:
            if isinstance(write, DeviceWrite):
                if write.old_bits is None:
                    raise WeightError("all elements were written from the trainer's memory: the old ones are nowhere")
                write.write(write.old_bits)
                continue
            if write.old_bits is not None:
                self._write(write, write.old_bits)
                continue
            bits = replica.bits(write.tensor.name)
            self._write(write, inside(write.route.checkpoint, bits))
        self._layers.undo(layer_writes, replica)

    def audit(self, replica: CheckpointReplica) -> int:
        """Compare every live element with the replica, and return this worker's part of the state hash, computed from
        all elements. Raises ``WeightError`` naming the first parameter and element that differ."""
        total = self._layers.audit(replica)
        for name, spec in replica.tensors.items():
            for index, route in self._routes(name):
                complete = StagedPatch(None, replica.bits(name))
                write = self._write_of(spec, complete, index, route, replica)
                assert write is not None
                _check_equal(write, self._read(write), "in an audit")
                total += write.hash_change
        return total % HASH_MODULUS

    def storages_of(self, writes: Sequence[Write]) -> set[int]:
        """Return ``data_ptr()`` of the storages that ``writes`` change, without those of rebuilt layers."""
        route_writes, _ = _split(writes)
        return {self._storages[write.route.parameter].untyped_storage().data_ptr() for write in route_writes}

    def _routes(self, tensor: str) -> list[tuple[int, Route]]:
        """Return the routes of a tensor to live memory, with their indices, without routes to rebuilt layers."""
        routes = enumerate(self.plan.routes[tensor])
        return [(index, route) for index, route in routes if route.parameter not in self.plan.layers]

    def _write_of(
        self, spec: TensorSpec, patch: StagedPatch, index: int, route: Route, replica: CheckpointReplica
    ) -> RouteWrite | None:
        """Return the write of a patch through one route; None when the patch has no elements on this route."""
        counted = (spec.name, index) in self._counted
        element_size = self._storages[route.parameter].element_size()
        if patch.positions is None:
            bits = inside(route.checkpoint, patch.new_bits)
            change = hash_rectangle(spec.name, route.checkpoint, bits) if counted else 0
            return RouteWrite(route, spec, None, None, as_held(bits, element_size), None, change)
        indices, elements = route.locate(patch.positions)
        if not indices.size:
            return None
        positions = patch.positions[indices]
        new = patch.new_bits[indices]
        old = replica.bits(spec.name)[positions]
        change = 0
        if counted:
            change = hash_elements(spec.name, positions, new) - hash_elements(spec.name, positions, old)
        if self._storages[route.parameter].numel() < _SMALL_STORAGE:
            elements = elements.astype(np.uint32)
        return RouteWrite(
            route, spec, positions, elements, as_held(new, element_size), as_held(old, element_size), change
        )

    def _write_and_check(self, write: RouteWrite | DeviceWrite) -> None:
        """Compare the live elements with the old bits, write, and compare them with the new bits. Raises
        ``WeightError``."""
        if isinstance(write, DeviceWrite):
            write.commit()
            return
        live = self._in_cpu_memory.get(write.route.parameter)
        if live is not None and write.elements is not None and write.old_bits is not None:
            before, after = scatter_checked(live, write.elements, write.old_bits, write.new_bits)
            if before or after:
                moment = "before" if before else "after"
                raise WeightError(
                    f"runtime parameter {write.route.parameter!r}: {before or after} of {write.elements.size} elements "
                    f"differ {moment} the commit: something else than a commit wrote to it"
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
            target.view_of(storage).copy_(values.view(target.sizes))
        else:
            storage[_indices(write.elements, storage)] = values

    def _read(self, write: RouteWrite) -> BitArray:
        storage = self._storages[write.route.parameter]
        if write.elements is None:
            target = write.route.runtime
            live = target.view_of(storage).reshape(-1)
        else:
            live = storage[_indices(write.elements, storage)]
        return _from_runtime(live.cpu().numpy(), write)

    def _compile(self) -> None:
        """Compile the scatter for the dtypes of this model, so that numba does not do it while the engine is paused."""
        no_elements = np.zeros(0, dtype=np.uint32)
        for live in {live.dtype: live for live in self._in_cpu_memory.values()}.values():
            for bits in (np.zeros(0, dtype=np.uint16), np.zeros(0, dtype=live.dtype)):
                for elements in (no_elements, no_elements.astype(np.int64)):
                    scatter_checked(live, elements, bits, bits)


def _split(writes: Sequence[Write]) -> tuple[list[RouteWrite | DeviceWrite], list[LayerWrite]]:
    return [w for w in writes if not isinstance(w, LayerWrite)], [w for w in writes if isinstance(w, LayerWrite)]


def _indices(elements: NDArray[Any], storage: Tensor) -> Tensor:
    return torch.from_numpy(elements.astype(np.int64, copy=False)).to(storage.device)


def count_routes(
    plans: Sequence[Mapping[str, Sequence[Rectangle]]], worker: int, tensors: TensorSpecs
) -> frozenset[tuple[str, int]]:
    """Choose the routes that ``worker`` counts, by tensor and index, so that each checkpoint element is counted once
    over all workers. ``plans``: checkpoint rectangles of the routes of every worker, by tensor. The first of several
    equal rectangles (replicated parameters) is counted. Raises ``WeightError`` when a tensor is not covered exactly
    once."""
    rectangles_seen: set[tuple[str, Rectangle]] = set()
    elements = dict.fromkeys(tensors, 0)
    counted: set[tuple[str, int]] = set()
    for index, plan in enumerate(plans):
        for name, rectangles in plan.items():
            for number, rectangle in enumerate(rectangles):
                if (name, rectangle) in rectangles_seen:
                    continue
                rectangles_seen.add((name, rectangle))
                elements[name] += rectangle.elements
                if index == worker:
                    counted.add((name, number))
    for name, mapped in elements.items():
        if mapped != tensors[name].elements:
            raise WeightError(
                f"{mapped} of {tensors[name].elements} elements of published tensor {name!r} map to runtime parameters "
                "of this engine: publish exactly what the model loads (for tied weights, one name)"
            )
    return frozenset(counted)


def _from_runtime(live: NDArray[np.generic], write: RouteWrite) -> BitArray:
    """Return live elements as published bits. Raises ``WeightError`` for float32 values that are no bfloat16 ones."""
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
    """Raise ``WeightError`` unless ``live`` equals ``expected`` (None: the new bits)."""
    expected_bits = write.new_bits if expected is None else expected
    wrong = np.flatnonzero(live != expected_bits)
    if wrong.size:
        first = int(wrong[0])
        positions = write.route.checkpoint.positions() if write.positions is None else write.positions
        raise WeightError(
            f"runtime parameter {write.route.parameter!r}: {wrong.size} of {live.size} elements differ {moment}; "
            f"element {int(positions[first])} of {write.tensor.name!r} is {int(live[first]):#x}, expected "
            f"{int(expected_bits[first]):#x}"
        )
