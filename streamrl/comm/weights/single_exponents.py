"""Few changes: each exponent is a class, the code is adaptive, and two bytes say what the classes are.

The number in them is ``SINGLE``, plus the upper byte of the lowest threshold, plus 256 times the number of thresholds,
plus ``_WIDE`` where they are eight apart, as the exponents of float16 are, whose upper byte holds three bits more.
"""

from __future__ import annotations

import struct

import numpy as np

from streamrl.comm.weights.adaptive_streams import decode_streams, encode_streams
from streamrl.comm.weights.bit_patterns import BitArray, PositionArray, bit_type
from streamrl.comm.weights.class_split import Split, Thresholds
from streamrl.comm.weights.compiled_split import class_sizes, join_changes, sample_changes
from streamrl.comm.weights.exponent_classes import MAXIMUM_CLASSES, SINGLE, THRESHOLD_BITS
from streamrl.errors import WeightError

_WIDE, _WIDE_STEP = 1 << 12, 8
_KINDS = struct.Struct("<H")
_SAMPLED = 1 << 12
MANY_CHANGES = 1 << 14
"""Changes beyond which the tables of ``symbol_streams`` are little beside the code."""


def choose_thresholds(base: BitArray, new: BitArray, dtype: str) -> Thresholds | None:
    """Fifteen exponents up to the last one that matters are classes: from a sample, two above the last that changes.
    What is below, and what is above, is with the first and the last. None where tables are as short and quicker,
    since there is much to code."""
    every = sample_every(base.size)
    return thresholds_of_sample(sample_changes(base, new, every), every, dtype)


def sample_every(elements: int) -> int:
    """One out of how many blocks is looked at."""
    return max(1, elements // _SAMPLED)


def thresholds_of_sample(found: tuple[int, int, int], every: int, dtype: str) -> Thresholds | None:
    """The same, from what ``sample_changes`` found in one out of ``every`` blocks."""
    highest, changing, changes = found
    if changes * every > MANY_CHANGES:
        return None
    step = _WIDE_STEP if dtype == "float16" else 1
    last = (min(highest, changing + 2) if changing >= 0 else highest) // step
    lowest = max(1, last - MAXIMUM_CLASSES + 2)
    return _thresholds(lowest * step, step, last - lowest + 1, bit_type(dtype, "").itemsize)


def encode(thresholds: Thresholds, split: Split, elements: int) -> bytes:
    """The patch of a unit of so many elements. Where it would be no shorter than dense, so many zeros in its place."""
    itemsize = split.values.itemsize
    uppers = (thresholds >> _shift(itemsize)).tolist()
    kinds = SINGLE | len(uppers) << 8 | (uppers[0] if uppers else 0)
    if len(uppers) > 1 and uppers[1] - uppers[0] == _WIDE_STEP:
        kinds |= _WIDE
    streams = encode_streams(split.streams, split.sizes, elements * itemsize - _KINDS.size)
    return bytes(elements * itemsize) if streams is None else _KINDS.pack(kinds) + streams


def decode(encoded: memoryview, base: BitArray, tensor: str) -> tuple[PositionArray, BitArray]:
    """Positions (int64 [n], increasing) and absolute new values. Raises ``WeightError`` for anything else than
    ``encode`` writes. ``base`` must be contiguous."""
    (kinds,) = _KINDS.unpack_from(encoded)
    first, count, step = kinds & 255, kinds >> 8 & 15, _WIDE_STEP if kinds & _WIDE else 1
    written = SINGLE <= kinds < SINGLE + 2 * _WIDE and first + (count - 1) * step < 256
    if not written or (first == 0) != (count == 0) or (count < 2 and kinds & _WIDE):
        raise WeightError(f"patch of {tensor!r} has classes that cannot be: {kinds:#06x}")
    thresholds = _thresholds(first, step, count, base.itemsize)
    sizes = class_sizes(base, thresholds)
    streams = decode_streams(encoded[_KINDS.size :], base.dtype, sizes, tensor)
    return join_changes(base, thresholds, streams, tensor)


def _thresholds(first: int, step: int, count: int, itemsize: int) -> Thresholds:
    return np.arange(first, first + count * step, step, dtype=np.uint32) << _shift(itemsize)


def _shift(itemsize: int) -> np.uint32:
    return np.uint32(8 * itemsize - 1 - THRESHOLD_BITS)
