"""Classes of elements by the exponent that the receiver already holds.

Whether an optimizer step moves a published element is a matter of the step against the spacing of the numbers
around it, hence of its exponent. Positions counted within classes of like exponents cost half of what they cost
counted over all elements (SparseRL-Sync's data: 8.1 bits a change at a density of 1 %, 3 to 4.5 within classes).

A class is a range of magnitudes: the patterns without their sign bit from one threshold up to the next. The
thresholds travel with the patch, so both sides count alike, whatever they were chosen from.
"""

from __future__ import annotations

from itertools import pairwise
from math import log2
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamrl.weights.bit_patterns import BitArray, mantissa_bits
from streamrl.weights.ordered_bits import step_symbols

MAXIMUM_CLASSES = 16
THRESHOLD_BITS = 8
"""Thresholds differ in the upper eight bits of a magnitude: the exponent, in float16 with three bits more."""

Sliceable = TypeVar("Sliceable", bound=Any)
"""An array, or a tensor of torch: what has ``shape``, ``reshape`` and slices."""

SINGLE = 1 << 15
"""First number of a patch by single exponents (``single_exponents``): headers are shorter."""

_CLASS_BITS = 200.0  # what a class costs by itself: its place in the header and the tables of its two streams
_LEAST_GAIN = 0.003  # of the whole: each class costs time too
_FEW_ELEMENTS = 64  # what can hardly save the bits of a class, whatever they do
_SAMPLE_BLOCK = 1 << 12
_SMALLEST_SAMPLE, _LARGEST_SAMPLE = 1 << 14, 1 << 17
_SYMBOL_KINDS = 8


def choose_thresholds(base: BitArray, new: BitArray, dtype: str) -> npt.NDArray[np.uint32]:
    """Lowest magnitudes (uint32 [classes - 1], increasing) of all classes but the first.

    Neighbouring exponents share a class unless their change rates, or the sizes of their changes, differ by more
    than a class costs. Judged from a sample of blocks spread over ``base`` and ``new`` (uint16 or uint32 [n]).
    """
    every = sample_every(base.size)
    return thresholds_of_sample(sample_blocks(base, every), sample_blocks(new, every), every, dtype)


def thresholds_of_sample(base: BitArray, new: BitArray, every: int, dtype: str) -> npt.NDArray[np.uint32]:
    """The same, from one out of ``every`` elements."""
    lowest = _merge_cheapest(*_lump(_count(base, new, dtype), every), every)
    return (np.array(lowest[1:], dtype=np.uint64) << np.uint64(mantissa_bits(dtype))).astype(np.uint32)


def sample_every(elements: int) -> int:
    """One out of how many blocks is looked at."""
    return max(1, elements // min(max(elements // 16, _SMALLEST_SAMPLE), _LARGEST_SAMPLE))


def sample_blocks(bits: Sliceable, every: int) -> Sliceable:
    """One block out of ``every``, of an array or a tensor of one dimension."""
    rows = bits.shape[0] // (every * _SAMPLE_BLOCK)
    if every == 1 or not rows:
        return bits
    blocks = bits[: rows * every * _SAMPLE_BLOCK].reshape(rows, every * _SAMPLE_BLOCK)
    sampled: Sliceable = blocks[:, :_SAMPLE_BLOCK].reshape(-1)
    return sampled


def _count(base: BitArray, new: BitArray, dtype: str) -> npt.NDArray[np.int64]:
    """By exponent [256]: the elements, and the changes by kind of symbol (0 to 3, then by their bit length)."""
    exponents = exponents_of(base, dtype)
    totals = np.zeros((256, 1 + _SYMBOL_KINDS), dtype=np.int64)
    totals[:, 0] = np.bincount(exponents, minlength=256)
    changed = np.flatnonzero(base != new)
    kinds = np.searchsorted(_KIND_STARTS, step_symbols(base[changed], new[changed]), side="right")
    cells = np.bincount(exponents[changed] * _SYMBOL_KINDS + kinds, minlength=256 * _SYMBOL_KINDS)
    totals[:, 1:] = cells.reshape(256, _SYMBOL_KINDS)
    return totals


_KIND_STARTS = np.array([1, 2, 3, 4, 8, 64, 4096], dtype=np.uint32)


def exponents_of(bits: BitArray, dtype: str) -> npt.NDArray[np.intp]:
    """The biased exponents (0 to 255) of the patterns."""
    top = bits.dtype.type((1 << (8 * bits.dtype.itemsize - 1)) - 1)
    return ((bits & top) >> bits.dtype.type(mantissa_bits(dtype))).astype(np.intp)


def _lump(totals: npt.NDArray[np.int64], every: int) -> tuple[list[list[int]], list[int]]:
    """Runs of exponents with enough elements to be worth a thought, and the lowest exponent of each."""
    groups: list[list[int]] = []
    lowest: list[int] = []
    for exponent in np.flatnonzero(totals[:, 0]).tolist():
        counts = totals[exponent].tolist()
        if groups and groups[-1][0] * every < _FEW_ELEMENTS:
            groups[-1] = _sum(groups[-1], counts)
        else:
            groups.append(counts)
            lowest.append(exponent)
    return groups, lowest


def _merge_cheapest(groups: list[list[int]], lowest: list[int], every: int) -> list[int]:
    """Merge neighbours, the cheapest pair first, until each class that is left pays for itself.

    ``groups``: elements, then changes by kind, of one out of ``every``. Returns the lowest exponent of each class.
    """
    bits = [_cost_bits(group) for group in groups]
    together = [_cost_bits(_sum(*pair)) for pair in pairwise(groups)]
    least = max(_CLASS_BITS / every, _LEAST_GAIN * sum(bits))
    while together:
        extra = [joined - sum(apart) for joined, apart in zip(together, pairwise(bits), strict=True)]
        best = min(range(len(extra)), key=extra.__getitem__)
        if len(groups) <= MAXIMUM_CLASSES and extra[best] > least:
            break
        groups[best] = _sum(groups[best], groups.pop(best + 1))
        bits[best] = together.pop(best)
        del bits[best + 1], lowest[best + 1]
        for pair in (best - 1, best):
            if 0 <= pair < len(together):
                together[pair] = _cost_bits(_sum(groups[pair], groups[pair + 1]))
    return lowest


def _sum(group: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip(group, other, strict=True)]


def _cost_bits(group: list[int]) -> float:
    """Entropy of a class: which of its elements change, and what kind of change each is."""
    elements, *kinds = group
    counts = [kind for kind in kinds if kind]
    counts.append(elements - sum(counts))
    if not counts[-1]:
        counts.pop()
    return elements * log2(elements) - sum([count * log2(count) for count in counts])
