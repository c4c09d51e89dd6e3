"""Float32 masters of one rank: where they are, and how a step reads and writes them.

Split masters take 2 bytes an element beside what the forward runs on. The forward has the float32 values of the
published bfloat16 bits (``P``, the low half of each is 0); a master is ``P``'s bit pattern plus a signed 16-bit
remainder, as integers. Rounding to bfloat16 moves a pattern by at most half of 2**16, so the remainder fits, but for
one case: a master in the very middle of two bfloat16 values that rounds down has the remainder +2**15, which int16 does
not have. It is written with 2**15 - 1: the next float32 towards zero, which rounds to the same ``P``. That is one
element in 131,072, moved by less than one part in 8 million, the same way on every number of ranks; what is once
written is read back exactly. (Splitting a float32 into a bfloat16 and 16 more bits: Split-SGD-BF16 of Kalamkar et al.,
"Optimizing Deep Learning Recommender Systems Training On CPU Cluster Architectures" (2020), which truncates; published
bits are rounded to nearest.)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from streamrl.learning.rank_memory import STEP_ELEMENTS


class Masters(ABC):
    """Float32 masters of ``size`` elements, read and written in parts. ``device``: where they are stepped."""

    size: int
    device: torch.device

    @abstractmethod
    def read(self, place: slice) -> Tensor:
        """Masters ``[start, stop)``, float32. Valid until the next read; a change counts only once it is written."""

    @abstractmethod
    def write(self, place: slice, values: Tensor) -> None:
        """Take the changed values of ``read(place)``, or others."""

    def steps(self) -> Iterator[slice]:
        """Places that cover all elements, in order, one at least."""
        chunk = STEP_ELEMENTS[self.device.type]
        for start in range(0, max(1, self.size), chunk):
            yield slice(start, min(start + chunk, self.size))

    def whole(self) -> Tensor:
        """All of them, float32 [L]: a copy where they are split."""
        values_L = torch.empty(self.size, dtype=torch.float32, device=self.device)
        for place in self.steps():
            values_L[place] = self.read(place)
        return values_L

    @torch.no_grad()
    def load(self, values_L: Tensor) -> None:
        """Take all of them, float32 [L] on their device."""
        for place in self.steps():
            self.write(place, values_L[place])


class WholeMasters(Masters):
    """One float32 vector, stepped in place: adapters, and masters in host memory below a forward on a device."""

    def __init__(self, values_L: Tensor) -> None:
        self.values_L = values_L.detach()
        self.size = values_L.numel()
        self.device = values_L.device

    def read(self, place: slice) -> Tensor:
        return self.values_L[place]

    def write(self, place: slice, values: Tensor) -> None:
        if values.data_ptr() != self.values_L[place].data_ptr():
            self.values_L[place] = values

    def whole(self) -> Tensor:
        return self.values_L


class SplitMasters(Masters):
    """The forward's float32 values and a 16-bit remainder of each: 2 bytes an element of its own.

    ``forward``: the vectors that the forward runs on, flat float32, one after the other in the masters; a function that
    gives each, as FSDP2 may replace what a parameter holds. Their values now are the masters: they are rounded here."""

    @torch.no_grad()
    def __init__(self, forward: Sequence[Callable[[], Tensor]], sizes: Sequence[int], device: torch.device) -> None:
        self._forward = list(forward)
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._stops = [start + size for start, size in zip(self._starts, sizes, strict=True)]
        self.size = sum(sizes)
        self.device = device
        self._remainders_L = torch.empty(self.size, dtype=torch.int16, device=device)
        scratch = min(self.size, STEP_ELEMENTS[device.type])
        self._values_C = torch.empty(scratch, dtype=torch.float32, device=device)
        self._patterns_C = torch.empty(scratch, dtype=torch.int32, device=device)
        for place in self.steps():
            values_C = self._values_C[: place.stop - place.start]
            for part, inside in self._parts(place):
                values_C[inside] = part
            self.write(place, values_C)

    def _parts(self, place: slice) -> Iterator[tuple[Tensor, slice]]:
        """The forward's vectors in ``place``: each part of one, and where in ``place`` it lies."""
        index = max(0, bisect_right(self._starts, place.start) - 1)
        while index < len(self._starts) and self._starts[index] < place.stop:
            start = max(self._starts[index], place.start)
            stop = min(self._stops[index], place.stop)
            if start < stop:
                part = self._forward[index]()[start - self._starts[index] : stop - self._starts[index]]
                yield part, slice(start - place.start, stop - place.start)
            index += 1

    @torch.no_grad()
    def read(self, place: slice) -> Tensor:
        values_C = self._values_C[: place.stop - place.start]
        for part, inside in self._parts(place):
            values_C[inside] = part
        values_C.view(torch.int32).add_(self._remainders_L[place])
        return values_C

    @torch.no_grad()
    def write(self, place: slice, values: Tensor) -> None:
        patterns_C = self._patterns_C[: place.stop - place.start]
        published_C = patterns_C.view(torch.float32)
        published_C.copy_(values.to(torch.bfloat16))
        for part, inside in self._parts(place):
            part.copy_(published_C[inside])
        torch.sub(values.view(torch.int32), patterns_C, out=patterns_C)
        self._remainders_L[place] = patterns_C.clamp_(max=(1 << 15) - 1)
