"""Bit patterns as integers in the order of the numbers that they mean, and differences in that order.

A floating-point number is sign and magnitude. Read as ``~bits`` below zero and ``bits + 2**(width - 1)`` above, its
pattern becomes an unsigned integer that grows with the number, a bijection of all patterns: zeros of both signs,
infinities and every NaN payload included. One step up or down is then +1 or -1, also across a power of two and
across zero, where the exclusive or of the patterns has many bits set.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from streamrl.weights.bit_patterns import BitArray


def to_ordered(bits: BitArray) -> BitArray:
    """The patterns (uint16 or uint32 [n]) as ordered integers of the same type."""
    top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & top, ~bits, bits | top)


def from_ordered(ordered: BitArray) -> BitArray:
    """The inverse of ``to_ordered``."""
    top = ordered.dtype.type(1 << (8 * ordered.dtype.itemsize - 1))
    return np.where(ordered & top, ordered ^ top, ~ordered)


def step_symbols(base: BitArray, new: BitArray) -> BitArray:
    """How many steps lie between patterns that differ, as 0 (one down), 1 (one up), 2 (two down), ...

    The difference of the ordered integers modulo 2**width, zigzag-coded, less one (it is never zero).
    """
    signed = (to_ordered(new) - to_ordered(base)).view(f"i{base.dtype.itemsize}")
    zigzag = (signed << 1) ^ (signed >> (8 * base.dtype.itemsize - 1))
    return cast("BitArray", zigzag.view(base.dtype)) - base.dtype.type(1)


def apply_steps(base: BitArray, symbols: BitArray) -> BitArray:
    """The patterns that ``step_symbols`` was given as ``new``. A symbol of all ones means no change: check for it."""
    one = base.dtype.type(1)
    zigzag = symbols + one
    steps = (zigzag >> one) ^ (~(zigzag & one) + one)
    return from_ordered(to_ordered(base) + steps)
