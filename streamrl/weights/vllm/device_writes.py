"""Changes from the trainer's memory on the same GPU: live parameters are compared with it there.

``live_weights.py`` makes its writes of them. All work is on integer views, part by part, so that an engine that has the
rest of the GPU needs little memory for it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS
from streamrl.weights.vllm.live_weights_layers import UPPER_HALF
from streamrl.weights.vllm.load_plan import Rectangle, Route
from streamrl.weights.vllm.tensor_hash import hash_tensor

PART_ELEMENTS = 1 << 22


class DeviceWrite(Struct, frozen=True, eq=False):
    """Write to a part of a route. ``live``: storage of the parameter, as integers. ``elements``: int64 [n], flat in
    ``live``; None for all elements of ``route``. ``new_bits``: integers like ``live``; published bits in the
    trainer's memory where all elements are written. ``old_bits``: integers like ``live`` (None: not compared).
    ``hash_change``: see ``live_weights.RouteWrite``."""

    route: Route
    live: Tensor
    elements: Tensor | None
    new_bits: Tensor
    old_bits: Tensor | None
    hash_change: int

    def commit(self) -> None:
        """Compare with the old bits, write, and compare with the new ones. Raises ``WeightError``."""
        if self.old_bits is not None:
            self._check(self.old_bits, "before")
        self.write(self.new_bits)
        self._check(self.new_bits, "after")

    def write(self, bits: Tensor) -> None:
        """Write new or old bits."""
        if self.elements is None:
            self.route.runtime.view_of(self.live).copy_(_widened(bits, self.live))
        else:
            self.live[self.elements] = bits

    def _check(self, bits: Tensor, moment: str) -> None:
        live = self.route.runtime.view_of(self.live) if self.elements is None else self.live[self.elements]
        different = int((live != _widened(bits, self.live)).sum())
        if different:
            raise WeightError(
                f"runtime parameter {self.route.parameter!r}: {different} of {live.numel()} elements differ {moment} "
                "the commit: something else than a commit wrote to it"
            )


@torch.no_grad()
def device_writes(
    name: str, route: Route, live: Tensor, bits: Tensor, *, counted: bool, complete: bool
) -> Iterator[DeviceWrite]:
    """Yield what makes ``live`` (storage of a parameter, as integers) the published ``bits`` of tensor ``name`` (int16,
    flat), through one route. ``counted``: whether this worker counts the elements in its part of the state
    hash. ``complete``: whether all elements are written, without a comparison."""
    for part in _parts(route):
        published = part.checkpoint.view_of(bits)
        if complete:
            change = 0
            if counted:
                change = _hash_of_all(name, part.checkpoint, published)
            yield DeviceWrite(part, live, None, published, None, change)
            continue
        indices = torch.nonzero(part.runtime.view_of(live) != _widened(published, live))
        if len(indices):
            positions = _places_at(part.checkpoint, indices)
            elements = _places_at(part.runtime, indices)
            new = _widened(bits[positions], live)
            old = live[elements]
            change = 0
            if counted:
                change = _hash(name, positions, new) - _hash(name, positions, old)
            yield DeviceWrite(part, live, elements, new, old, change % HASH_MODULUS)


def _widened(bits: Tensor, live: Tensor) -> Tensor:
    """Return published bits as the integers of ``live``: the same, or float32 that holds bfloat16."""
    return bits if bits.dtype == live.dtype else bits.to(live.dtype) << UPPER_HALF


def _hash(name: str, positions: Tensor, bits: Tensor) -> int:
    return hash_tensor(name, positions, bits if bits.dtype == torch.int16 else bits >> UPPER_HALF)


def _hash_of_all(name: str, rectangle: Rectangle, bits: Tensor) -> int:
    """Return the sum of the terms of all elements of a rectangle."""
    if bits.device.type == "cuda" and rectangle.strides == (1,):
        from streamrl.weights.vllm.hash_kernel import hash_run

        return hash_run(name, rectangle.offset, bits)
    return hash_tensor(name, _places(rectangle, bits.device), bits.reshape(-1))


def _parts(route: Route) -> Iterator[Route]:
    """Cut a route along its first dimension."""
    rows, *sizes = route.checkpoint.sizes
    step = max(1, PART_ELEMENTS // max(1, prod(sizes)))
    for start in range(0, rows, step):
        rectangles = [
            Rectangle(side.offset + start * side.strides[0], (min(step, rows - start), *sizes), side.strides)
            for side in (route.checkpoint, route.runtime)
        ]
        yield replace(route, checkpoint=rectangles[0], runtime=rectangles[1])


def _places(rectangle: Rectangle, device: torch.device) -> Tensor:
    """Return the flat positions of all elements, int64 [n], in row-major order."""
    places = torch.full((), rectangle.offset, dtype=torch.int64, device=device)
    for size, stride in zip(rectangle.sizes, rectangle.strides, strict=True):
        places = places[..., None] + torch.arange(size, device=device) * stride
    return places.reshape(-1)


def _places_at(rectangle: Rectangle, indices: Tensor) -> Tensor:
    """Return the flat positions of the elements at ``indices`` (int64 [n, dimensions])."""
    return (indices * torch.tensor(rectangle.strides, device=indices.device)).sum(1) + rectangle.offset
