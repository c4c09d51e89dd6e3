"""Float32 masters of one rank: their storage, and how an optimizer step reads and writes them.

``published_weights`` and ``lora`` make them in each trainer rank. Split masters take 2 bytes an element besides the
values that the forward runs on. The forward has the float32 values of the published bfloat16 bits (``P``, the low half
of each is 0). A master is the bit pattern of ``P`` plus a signed 16-bit remainder, as integers. Rounding to bfloat16
moves a pattern by at most half of 2**16, so the remainder fits, with one exception: a master in the very middle of two
bfloat16 values that rounds down has the remainder +2**15, which int16 does not have. It is written with 2**15 - 1: the
next float32 towards zero, which rounds to the same ``P``. This changes one element in 131,072 by less than one part in
8 million, the same way on every number of ranks. Values that are written once are read back exactly. (Splitting a
float32 into a bfloat16 and 16 more bits: Split-SGD-BF16 of Kalamkar et al., "Optimizing Deep Learning Recommender
Systems Training On CPU Cluster Architectures" (2020), which truncates; published bits are rounded to nearest.)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from streamrl.learning.rank_memory import STEP_ELEMENTS

Tensors = dict[str, Tensor]
"""Tensors by name."""


class Masters(ABC):
    """Float32 masters of ``size`` elements, read and written in parts. ``step_elements``: largest part."""

    size: int
    step_elements: int

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the optimizer step; the CPU while the rank's state is away from it (``host_memory``)."""

    @abstractmethod
    def read(self, place: slice) -> Tensor:
        """Return the masters in ``place``, float32. They are valid until the next read; changes count once written."""

    @abstractmethod
    def write(self, place: slice, values: Tensor) -> None:
        """Store ``values`` in ``place``: the changed result of ``read(place)``, or other values."""

    def chunks(self) -> Iterator[slice]:
        """Yield places that cover all elements, in order; one place at least."""
        for start in range(0, max(1, self.size), self.step_elements):
            yield slice(start, min(start + self.step_elements, self.size))

    def full(self) -> Tensor:
        """Return all masters, float32 [L]: a copy where they are split."""
        values_L = torch.empty(self.size, dtype=torch.float32, device=self.device)
        for place in self.chunks():
            values_L[place] = self.read(place)
        return values_L

    @torch.no_grad()
    def load(self, values_L: Tensor) -> None:
        """Store all masters, float32 [L] on their device."""
        for place in self.chunks():
            self.write(place, values_L[place])


class WholeMasters(Masters):
    """One float32 vector, stepped in place: adapters, and masters in CPU memory while the forward runs on a GPU."""

    def __init__(self, values_L: Tensor) -> None:
        self.values_L = values_L.detach()
        self.size = values_L.numel()
        self.step_elements = STEP_ELEMENTS[values_L.device.type]

    @property
    def device(self) -> torch.device:
        return self.values_L.device

    def read(self, place: slice) -> Tensor:
        return self.values_L[place]

    def write(self, place: slice, values: Tensor) -> None:
        if values.data_ptr() != self.values_L[place].data_ptr():
            self.values_L[place] = values

    def full(self) -> Tensor:
        return self.values_L


class SplitMasters(Masters):
    """The forward's float32 values with a 16-bit remainder of each: 2 bytes an element besides the forward's values.

    ``forward``: functions that return the flat float32 vectors of the forward, one after the other in the masters.
    They are functions because FSDP2 may replace the tensor of a parameter. The current values become the masters, and
    the vectors are rounded.
    ``sizes``: number of elements of each vector.
    ``in_float32``: places that are published in float32: the forward has the masters there, and remainders are 0."""

    @torch.no_grad()
    def __init__(
        self,
        forward: Sequence[Callable[[], Tensor]],
        sizes: Sequence[int],
        device: torch.device,
        in_float32: Sequence[slice] = (),
    ) -> None:
        self._in_float32 = in_float32
        self._forward = list(forward)
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._stops = [start + size for start, size in zip(self._starts, sizes, strict=True)]
        self.size = sum(sizes)
        self.step_elements = STEP_ELEMENTS[device.type]
        self._remainders_L = torch.empty(self.size, dtype=torch.int16, device=device)
        scratch = min(self.size, self.step_elements)
        self._values_C = torch.empty(scratch, dtype=torch.float32, device=device)
        self._patterns_C = torch.empty(scratch, dtype=torch.int32, device=device)
        for place in self.chunks():
            self.write(place, self._published(place))

    @property
    def device(self) -> torch.device:
        return self._remainders_L.device

    def _parts(self, place: slice) -> Iterator[tuple[Tensor, slice]]:
        """Yield the parts of the forward's vectors that are in ``place``, each with its slice of ``place``."""
        index = max(0, bisect_right(self._starts, place.start) - 1)
        while index < len(self._starts) and self._starts[index] < place.stop:
            start = max(self._starts[index], place.start)
            stop = min(self._stops[index], place.stop)
            if start < stop:
                part = self._forward[index]()[start - self._starts[index] : stop - self._starts[index]]
                yield part, slice(start - place.start, stop - place.start)
            index += 1

    def _published(self, place: slice) -> Tensor:
        """Return the forward's values of ``place``, in float32."""
        values_C = self._values_C[: place.stop - place.start]
        for part, inside in self._parts(place):
            values_C[inside] = part
        return values_C

    @torch.no_grad()
    def read(self, place: slice) -> Tensor:
        values_C = self._published(place)
        values_C.view(torch.int32).add_(self._remainders_L[place])
        return values_C

    @torch.no_grad()
    def write(self, place: slice, values: Tensor) -> None:
        patterns_C = self._patterns_C[: place.stop - place.start]
        published_C = patterns_C.view(torch.float32)
        published_C.copy_(values.to(torch.bfloat16))
        for other in self._in_float32:
            inside = slice(max(0, other.start - place.start), max(0, min(other.stop, place.stop) - place.start))
            published_C[inside] = values[inside]
        for part, inside in self._parts(place):
            part.copy_(published_C[inside])
        torch.sub(values.view(torch.int32), patterns_C, out=patterns_C)
        self._remainders_L[place] = patterns_C.clamp_(max=(1 << 15) - 1)
