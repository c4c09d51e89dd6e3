"""The part of ``LiveWeights`` for layers that are rebuilt (``rebuilt_layers.py``), in vLLM's worker processes.

While the engine samples, ``prepare`` makes the loading-time parameters of a layer at the new version, in CPU memory;
the commit rebuilds the layer from them. Elements of a packed tensor cannot be compared with those of a checkpoint. So
the state hash counts the bits from which a layer was rebuilt, and is right as long as the layer is the result of this
rebuild. A rebuild is compared with the loaded layer once, when the first delta is made on the checkpoint that vLLM
loaded. After that, every commit that changes a layer, and every audit, checks that its tensors are those of its last
rebuild."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.pull.replica import CheckpointReplica, StagedPatch, StagedVersion, TensorSpec
from streamrl.weights.vllm.load_plan import LoadPlan, Rectangle, Route
from streamrl.weights.vllm.rebuilt_layers import RebuiltLayer

UPPER_HALF = 16
"""Position of a bfloat16 in the bits of a float32 that holds it; the bits below are zeros."""


class LayerWrite(Struct, frozen=True, eq=False):
    """A layer that a version changes. ``loaded``: loading-time parameters of the layer at this version, by attribute,
    in CPU memory. ``hash_change``: change of this worker's part of the state hash by the tensors of the layer."""

    layer: RebuiltLayer
    loaded: Mapping[str, Tensor]
    hash_change: int


class LiveLayers:
    """The rebuilt layers of a load plan.

    ``counted``: see ``LiveWeights``. ``loading_context``: makes a context manager around every rebuild, with the
    settings that vLLM has while it loads. ``agree``: collective call of several workers before they rebuild layers
    together (a quantisation method may need the largest element over all workers); it sends the failure of this worker
    (empty: none) to the others, and raises ``WeightError`` when a worker failed. None for a single worker."""

    def __init__(
        self,
        plan: LoadPlan,
        counted: frozenset[tuple[str, int]],
        *,
        loading_context: Callable[[], AbstractContextManager[None]] = nullcontext,
        agree: Callable[[str], None] | None = None,
    ) -> None:
        self._plan = plan
        self._counted = counted
        self._loading_context = loading_context
        self._agree = agree
        self._layers = {layer.name: layer for layer in plan.layers.values()}
        self._tensors: dict[str, set[str]] = {name: set() for name in self._layers}
        for tensor, routes in plan.routes.items():
            for route in routes:
                owner = route.parameter.rpartition(".")[0]
                if owner in self._tensors:  # also by a bias: a kernel may hold a copy of it
                    self._tensors[owner].add(tensor)

    def prepare(self, staged: StagedVersion, replica: CheckpointReplica) -> list[LayerWrite]:
        """Compute the writes of the layers that ``staged`` changes on any worker: all workers rebuild the same layers,
        in the same order."""
        return [
            self._write_of(layer, staged.patches, replica)
            for name, layer in self._layers.items()
            if any(_changes(staged.patches.get(tensor)) for tensor in self._tensors[name])
        ]

    def apply(self, writes: Sequence[LayerWrite], *, failure: str, anchor: bool) -> None:
        """Rebuild the layers. ``failure``: error of this worker in the same commit (empty: none); with one, no worker
        rebuilds a layer. ``anchor``: whether the layers need not be those of their last rebuild. Raises ``WeightError``
        naming the layer, or with the failure."""
        if self._agree is not None and self._layers:
            self._agree(failure)
        elif failure:
            raise WeightError(failure)
        with self._loading_context():
            for write in writes:
                if not anchor:
                    write.layer.check_untouched("before the commit")
                write.layer.rebuild(write.loaded)

    def undo(self, writes: Sequence[LayerWrite], replica: CheckpointReplica) -> None:
        """Rebuild the layers from ``replica``. Raises ``WeightError`` where several workers would have to rebuild
        together."""
        if writes and self._agree is not None:
            raise WeightError(f"layer {writes[0].layer.name!r} is rebuilt by all workers together, not by one")
        with self._loading_context():
            for write in writes:
                write.layer.rebuild(self._write_of(write.layer, {}, replica).loaded)

    def audit(self, replica: CheckpointReplica) -> int:
        """Check the layers, and return the part of the state hash that this worker counts for them. A layer must have
        the tensors of its last rebuild. A layer that was never rebuilt is compared with a rebuild, which must not
        happen while the engine samples. Raises ``WeightError`` naming the layer."""
        total = 0
        for layer in self._layers.values():
            layer.check_untouched("in an audit")
            if not layer.is_verified:
                with self._loading_context():
                    layer.compare(self._write_of(layer, {}, replica).loaded)
        for tensor, index, route in self._routes(self._plan.routes):
            if (tensor, index) in self._counted:
                total += hash_rectangle(tensor, route.checkpoint, inside(route.checkpoint, replica.bits(tensor)))
        return total % HASH_MODULUS

    def _routes(self, tensors: Iterable[str]) -> list[tuple[str, int, Route]]:
        """Return the routes of ``tensors`` to rebuilt layers, each with its tensor and index."""
        return [
            (tensor, index, route)
            for tensor in tensors
            for index, route in enumerate(self._plan.routes[tensor])
            if route.parameter in self._plan.layers
        ]

    def _write_of(
        self, layer: RebuiltLayer, patches: Mapping[str, StagedPatch], replica: CheckpointReplica
    ) -> LayerWrite:
        """Make the loading-time parameters of a layer from the replica's bits with ``patches``."""
        loaded = {
            attribute: torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
            for attribute, parameter in layer.loading_parameters.items()
        }
        change = 0
        for tensor in sorted(self._tensors[layer.name]):
            patch = patches.get(tensor)
            bits = _patched(tensor, patch, replica)
            for name, index, route in self._routes([tensor]):
                if self._plan.layers[route.parameter] is not layer:
                    continue
                storage = integers(loaded[route.parameter.rpartition(".")[2]])
                target = route.runtime
                values = torch.from_numpy(to_runtime(inside(route.checkpoint, bits), storage.element_size()))
                target.view_of(storage).copy_(values.view(target.sizes))
                _check_arrived(self._plan.tensors[name], layer, route, patch, storage)
                if (name, index) in self._counted:
                    change += _hash_change(name, route, patch, replica)
        return LayerWrite(layer, loaded, change)


def _changes(patch: StagedPatch | None) -> bool:
    return patch is not None and (patch.positions is None or bool(patch.positions.size))


def _patched(tensor: str, patch: StagedPatch | None, replica: CheckpointReplica) -> BitArray:
    """Return all bits of ``tensor`` at the version of ``patch``."""
    if patch is None:
        return replica.bits(tensor)
    if patch.positions is None:
        return patch.new_bits
    bits = replica.bits(tensor).copy()
    bits[patch.positions] = patch.new_bits
    return bits


def _hash_change(tensor: str, route: Route, patch: StagedPatch | None, replica: CheckpointReplica) -> int:
    """Return the change of the state hash by the elements of ``patch`` on one route. A complete patch counts with all
    its elements."""
    if patch is None:
        return 0
    if patch.positions is None:
        return hash_rectangle(tensor, route.checkpoint, inside(route.checkpoint, patch.new_bits))
    indices, _ = route.locate(patch.positions)
    positions = patch.positions[indices]
    new = patch.new_bits[indices]
    return hash_elements(tensor, positions, new) - hash_elements(tensor, positions, replica.bits(tensor)[positions])


def _check_arrived(
    spec: TensorSpec, layer: RebuiltLayer, route: Route, patch: StagedPatch | None, storage: Tensor
) -> None:
    """Check that ``storage`` has each changed element at the place that ``route.locate`` computes for it. Raises
    ``WeightError``."""
    if patch is None or patch.positions is None:
        return
    indices, elements = route.locate(patch.positions)
    expected = to_runtime(patch.new_bits[indices], storage.element_size())
    stored: NDArray[Any] = storage.numpy()[elements]
    if not np.array_equal(stored, expected):
        raise WeightError(f"layer {layer.name!r}: changed elements of {spec.name!r} did not arrive where they belong")


def integers(tensor: Tensor) -> Tensor:
    """Return all elements of a contiguous tensor, flat, as integers of the same width."""
    return tensor.view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def inside(rectangle: Rectangle, bits: BitArray) -> BitArray:
    """Return the elements of ``bits`` inside the rectangle, flat: a view where they are contiguous, otherwise a
    copy."""
    if rectangle.strides == (1,):
        return bits[rectangle.offset : rectangle.offset + rectangle.elements]
    strides = tuple(stride * bits.itemsize for stride in rectangle.strides)
    view = np.lib.stride_tricks.as_strided(bits[rectangle.offset :], rectangle.sizes, strides, writeable=False)
    return cast("BitArray", view.reshape(-1))


def hash_rectangle(name: str, rectangle: Rectangle, bits: BitArray) -> int:
    """Return the sum that ``bits`` [n] at the positions of ``rectangle`` in tensor ``name`` add to the state hash."""
    if rectangle.strides == (1,):
        return hash_range(name, rectangle.offset, bits)
    return hash_elements(name, rectangle.positions(), bits)


def as_held(bits: BitArray, element_size: int) -> BitArray:
    """Return the bits that a runtime parameter with elements of ``element_size`` bytes holds of published ones: float32
    in a bfloat16 parameter is rounded, as vLLM's loader does. Other bits are returned as they are."""
    if element_size == bits.dtype.itemsize or element_size > 2:
        return bits
    values = torch.from_numpy(np.ascontiguousarray(bits).view(np.float32))
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def to_runtime(bits: BitArray, element_size: int) -> NDArray[np.int16] | NDArray[np.int32]:
    """Return published bits as integers of ``element_size`` bytes: the published dtype, bfloat16 that is rounded from
    float32, or float32 that holds bfloat16."""
    bits = as_held(bits, element_size)
    if bits.dtype.itemsize == element_size:
        flat = np.ascontiguousarray(bits)
        return flat.view(np.int16) if element_size == 2 else flat.view(np.int32)
    return (bits.astype(np.uint32) << np.uint32(UPPER_HALF)).view(np.int32)
