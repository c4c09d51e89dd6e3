"""The part of a commit that goes through layers which must be rebuilt: see ``load_plan_reload``.

The inputs of a layer are made ready while the engine samples: its loading-time parameters, at the new version, in host
memory. The commit rebuilds from them. No element of a packed tensor can be compared with a checkpoint's, so the state
hash counts the bits that the layers were loaded from, and is right as long as a layer is what comes of those. That is
compared once, when the first delta is made on the files of the checkpoint that vLLM loaded; from then on each layer's
served tensors must be those of its last rebuild, in every commit that touches it and in audits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.pull.replica import CheckpointReplica, StagedPatch, StagedVersion, TensorSpec
from streamrl.weights.vllm.load_plan import LoadPlan, Rectangle, Route
from streamrl.weights.vllm.load_plan_reload import ReloadedLayer

UPPER_HALF = 16
"""Bits: a float32 that holds a bfloat16 has it there, and zeros below."""


class LayerWrite(msgspec.Struct, frozen=True, eq=False):
    """A layer that a version touches, and all that it is loaded from at that version, by attribute, in host memory.
    ``hash_change``: what the version adds to this worker's part of the state hash by way of the layer."""

    layer: ReloadedLayer
    loaded: Mapping[str, torch.Tensor]
    hash_change: int


class LiveLayers:
    """The layers of a load plan that are rebuilt.

    ``counted``: see ``LiveWeights``. ``as_when_loading``: around every rebuild; what vLLM sets up for its loaders.
    ``agreed``: of several workers that rebuild together (a method of quantisation may ask all of them for the largest
    element), tells the others that this one is ready or why it is not, and raises ``WeightError`` when one is not."""

    def __init__(
        self,
        plan: LoadPlan,
        counted: frozenset[tuple[str, int]],
        *,
        as_when_loading: Callable[[], AbstractContextManager[None]] = nullcontext,
        agreed: Callable[[str], None] | None = None,
    ) -> None:
        self._plan = plan
        self._counted = counted
        self._as_when_loading = as_when_loading
        self._agreed = agreed
        self._layers = {layer.name: layer for layer in plan.layers.values()}
        self._tensors: dict[str, set[str]] = {name: set() for name in self._layers}
        for tensor, routes in plan.routes.items():
            for route in routes:
                owner = route.parameter.rpartition(".")[0]
                if owner in self._tensors:  # biases, too: a kernel may hold a copy
                    self._tensors[owner].add(tensor)

    def prepare(self, staged: StagedVersion, replica: CheckpointReplica) -> list[LayerWrite]:
        """The layers that ``staged`` touches, on any worker: all rebuild the same ones, in one order."""
        return [
            self._write_of(layer, staged.patches, replica)
            for name, layer in self._layers.items()
            if any(_changes(staged.patches.get(tensor)) for tensor in self._tensors[name])
        ]

    def apply(self, writes: Sequence[LayerWrite], *, failed: str, anchor: bool) -> None:
        """Rebuild the layers. ``failed``: why this worker has failed before, if it has: then none is rebuilt anywhere.
        ``anchor``: what they serve with now is not looked at. Raises ``WeightError`` naming the layer, or with what
        failed."""
        if self._agreed is not None and self._layers:
            self._agreed(failed)
        elif failed:
            raise WeightError(failed)
        with self._as_when_loading():
            for write in writes:
                if not anchor:
                    write.layer.check_untouched("before the commit")
                write.layer.rebuild(write.loaded)

    def undo(self, writes: Sequence[LayerWrite], replica: CheckpointReplica) -> None:
        """Rebuild the layers from what ``replica`` holds. Raises ``WeightError`` where that takes other workers."""
        if writes and self._agreed is not None:
            raise WeightError(f"layer {writes[0].layer.name!r} is rebuilt by all workers together, not by one")
        with self._as_when_loading():
            for write in writes:
                write.layer.rebuild(self._write_of(write.layer, {}, replica).loaded)

    def audit(self, replica: CheckpointReplica) -> int:
        """Return this worker's part of the state hash by way of the layers. Each must be as its last rebuild left it;
        one that was never rebuilt must be what a rebuild gives (only then are layers rebuilt, which must not be while
        the engine samples). Raises ``WeightError`` naming the layer."""
        total = 0
        for layer in self._layers.values():
            layer.check_untouched("in an audit")
            if not layer.known:
                with self._as_when_loading():
                    layer.compare(self._write_of(layer, {}, replica).loaded)
        for tensor, index, route in self._routes(self._plan.routes):
            if (tensor, index) in self._counted:
                total += hash_rectangle(tensor, route.checkpoint, inside(route.checkpoint, replica.bits(tensor)))
        return total % HASH_MODULUS

    def _routes(self, tensors: Iterable[str]) -> list[tuple[str, int, Route]]:
        """The routes of ``tensors`` that lead into a layer."""
        return [
            (tensor, index, route)
            for tensor in tensors
            for index, route in enumerate(self._plan.routes[tensor])
            if route.parameter in self._plan.layers
        ]

    def _write_of(
        self, layer: ReloadedLayer, patches: Mapping[str, StagedPatch], replica: CheckpointReplica
    ) -> LayerWrite:
        loaded = {
            attribute: torch.zeros(noted.shape, dtype=noted.dtype, device="cpu")
            for attribute, noted in layer.loading.items()
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
                storage.as_strided(target.sizes, target.strides, target.offset).copy_(values.view(target.sizes))
                _check_arrived(self._plan.tensors[name], layer, route, patch, storage)
                if (name, index) in self._counted:
                    change += _hash_change(name, route, patch, replica)
        return LayerWrite(layer, loaded, change)


def _changes(patch: StagedPatch | None) -> bool:
    return patch is not None and (patch.positions is None or bool(patch.positions.size))


def _patched(tensor: str, patch: StagedPatch | None, replica: CheckpointReplica) -> BitArray:
    """All bits of ``tensor`` at the version of ``patch``."""
    if patch is None:
        return replica.bits(tensor)
    if patch.positions is None:
        return patch.new_bits
    bits = replica.bits(tensor).copy()
    bits[patch.positions] = patch.new_bits
    return bits


def _hash_change(tensor: str, route: Route, patch: StagedPatch | None, replica: CheckpointReplica) -> int:
    if patch is None:
        return 0
    if patch.positions is None:
        return hash_rectangle(tensor, route.checkpoint, inside(route.checkpoint, patch.new_bits))
    chosen, _ = route.locate(patch.positions)
    positions = patch.positions[chosen]
    new = patch.new_bits[chosen]
    return hash_elements(tensor, positions, new) - hash_elements(tensor, positions, replica.bits(tensor)[positions])


def _check_arrived(
    spec: TensorSpec, layer: ReloadedLayer, route: Route, patch: StagedPatch | None, storage: torch.Tensor
) -> None:
    """Check that changed elements are where the route locates them, one element at a time."""
    if patch is None or patch.positions is None:
        return
    chosen, elements = route.locate(patch.positions)
    wanted = to_runtime(patch.new_bits[chosen], storage.element_size())
    found: npt.NDArray[Any] = storage.numpy()[elements]
    if not np.array_equal(found, wanted):
        raise WeightError(f"layer {layer.name!r}: changed elements of {spec.name!r} did not arrive where they belong")


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a contiguous tensor, flat, as integers of their width."""
    return tensor.view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def inside(rectangle: Rectangle, bits: BitArray) -> BitArray:
    """The elements of ``bits`` inside the rectangle, flat: a view where they are contiguous, else a copy."""
    if rectangle.strides == (1,):
        return bits[rectangle.offset : rectangle.offset + rectangle.elements]
    strides = tuple(stride * bits.itemsize for stride in rectangle.strides)
    view = np.lib.stride_tricks.as_strided(bits[rectangle.offset :], rectangle.sizes, strides, writeable=False)
    return cast("BitArray", view.reshape(-1))


def hash_rectangle(name: str, rectangle: Rectangle, bits: BitArray) -> int:
    """Return what ``bits`` [n], at the places of ``rectangle`` in tensor ``name``, add to the state hash."""
    if rectangle.strides == (1,):
        return hash_range(name, rectangle.offset, bits)
    return hash_elements(name, rectangle.positions(), bits)


def to_runtime(bits: BitArray, element_size: int) -> npt.NDArray[np.int16] | npt.NDArray[np.int32]:
    """Published bits as integers of ``element_size`` bytes: the published type, or float32 that holds bfloat16."""
    if bits.dtype.itemsize == element_size:
        flat = np.ascontiguousarray(bits)
        return flat.view(np.int16) if element_size == 2 else flat.view(np.int32)
    return (bits.astype(np.uint32) << np.uint32(UPPER_HALF)).view(np.int32)
