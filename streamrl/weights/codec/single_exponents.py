"""Few changes: each exponent is a class, the code is adaptive, and two bytes say what the classes are.

The number in them is ``SINGLE``, plus the upper byte of the lowest threshold, plus 256 times the number of thresholds,
plus ``_WIDE`` where they are eight apart, as the exponents of float16 are, whose upper byte holds three bits more.
"""

from __future__ import annotations

import struct

import numpy as np

from streamrl.base.errors import WeightError
from streamrl.weights.bit_patterns import BitArray, PositionArray, bit_type
from streamrl.weights.codec.class_split import Split, Thresholds
from streamrl.weights.codec.exponent_classes import MAXIMUM_CLASSES, SINGLE, THRESHOLD_BITS
from streamrl.weights.compiled_paths import split_form, stream_form, worth_compiling

_WIDE, _WIDE_STEP = 1 << 12, 8
_KINDS = struct.Struct("<H")
_SAMPLED = 1 << 12
MANY_CHANGES = 1 << 14
"""Changes beyond which the tables of ``symbol_streams`` are little beside the code."""

MANY_CHANGES_PLAIN = 1 << 13
"""The same without a compiler, where the adaptive code takes some 5 us a change."""

_LARGE_UNIT = 1 << 20  # below, tables are more beside the code, and time is less of a matter


def choose_thresholds(base: BitArray, new: BitArray, dtype: str) -> Thresholds | None:
    """Fifteen exponents up to the last one that matters are classes: from a sample, two above the last that changes.
    What is below, and what is above, is with the first and the last. None where tables are as short and quicker,
    since there is much to code."""
    found = split_form(base.size).sample_changes(base, new, sample_every(base.size))
    return thresholds_of_sample(found, base.size, dtype)


def sample_every(elements: int) -> int:
    """One out of how many blocks is looked at."""
    return max(1, elements // (_SAMPLED if elements >= _LARGE_UNIT else 4 * _SAMPLED))


def thresholds_of_sample(found: tuple[int, int, int], elements: int, dtype: str) -> Thresholds | None:
    """The same, from what ``class_split.sample_changes`` found in one out of ``sample_every(elements)`` blocks."""
    highest, changing, changes = found
    most = MANY_CHANGES_PLAIN
    if worth_compiling(elements):
        most = MANY_CHANGES if elements >= _LARGE_UNIT else 2 * MANY_CHANGES
    if changes * sample_every(elements) > most:
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
    streams = stream_form(elements).encode_streams(split.streams, split.sizes, elements * itemsize - _KINDS.size)
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
    form = split_form(base.size)
    sizes = form.class_sizes(base, thresholds)
    streams = stream_form(base.size).decode_streams(encoded[_KINDS.size :], base.dtype, sizes, tensor)
    positions, values = form.join_changes(base, thresholds, streams, tensor)
    return positions, values


def _thresholds(first: int, step: int, count: int, itemsize: int) -> Thresholds:
    return np.arange(first, first + count * step, step, dtype=np.uint32) << _shift(itemsize)


def _shift(itemsize: int) -> np.uint32:
    return np.uint32(8 * itemsize - 1 - THRESHOLD_BITS)
