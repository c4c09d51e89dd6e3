"""Elements of published tensors as integers: their type, their exponent, and moves between neighbouring numbers.

The codec, the publisher (trainer rank) and the replica (vLLM's workers) use these functions. A floating-point number is
stored as sign and magnitude. Read as ``~bits`` below zero and ``bits + 2**(width - 1)`` above, its pattern becomes an
unsigned integer that grows with the number. The map is a bijection of all patterns: zeros of both signs, infinities and
every NaN payload included. A move to the next number up or down is then +1 or -1, also across a power of two and across
zero, where the exclusive or of the patterns has many bits set."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from streamrl.base.errors import WeightError

BitArray = NDArray[np.uint16] | NDArray[np.uint32]
BitType = np.dtype[np.uint16] | np.dtype[np.uint32]
PositionArray = NDArray[np.int64]

_BIT_TYPES: dict[str, BitType] = {"bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2"), "float32": np.dtype("<u4")}
_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}


def exponent_field(dtype: str) -> tuple[int, int]:
    """Return where the exponent of a published dtype is in a pattern: its lowest bit, and the number of its values."""
    lowest = _MANTISSA_BITS[dtype]
    return lowest, 1 << (8 * _BIT_TYPES[dtype].itemsize - 1 - lowest)


def exponents_of(bits: BitArray, dtype: str) -> BitArray:
    """Return the biased exponents of the patterns (uint16 or uint32 [n]), in the same type."""
    lowest, values = exponent_field(dtype)
    return (bits >> bits.dtype.type(lowest)) & bits.dtype.type(values - 1)


def bit_type(dtype: str, tensor: str) -> BitType:
    """Return the integer type that holds one element of ``dtype``. Raises ``WeightError`` naming ``tensor``."""
    integer_type = _BIT_TYPES.get(dtype)
    if integer_type is None:
        raise WeightError(
            f"tensor {tensor!r} has the published dtype {dtype!r}; only {', '.join(sorted(_BIT_TYPES))} can be"
        )
    return integer_type


def as_bits(values: NDArray[np.generic], dtype: str, count: int, tensor: str) -> BitArray:
    """Return ``values`` as flat unsigned bit patterns. Raises ``WeightError`` unless they are ``count`` integers as
    wide as ``dtype``."""
    expected = bit_type(dtype, tensor)
    if values.dtype.kind not in "iu" or values.dtype.itemsize != expected.itemsize:
        raise WeightError(
            f"tensor {tensor!r} ({dtype}) was given as numpy {values.dtype}; give its bit patterns as {expected.name}"
        )
    flat = values.reshape(-1).view(expected)  # may be strided, as the upper halves of float32 values are
    if flat.size != count:
        raise WeightError(f"tensor {tensor!r} was given with {flat.size} elements; this shard holds {count}")
    return flat


def to_ordered(bits: BitArray) -> BitArray:
    """Map patterns (uint16 or uint32 [n]) to integers of the same type that are ordered as the numbers are."""
    top = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & top, ~bits, bits | top)


def from_ordered(ordered: BitArray) -> BitArray:
    """Map ordered integers to patterns: the inverse of ``to_ordered``."""
    top = ordered.dtype.type(1 << (8 * ordered.dtype.itemsize - 1))
    return np.where(ordered & top, ordered ^ top, ~ordered)


def move_symbols(base: BitArray, new: BitArray) -> BitArray:
    """Encode the moves between patterns that differ: 0 is one number down, 1 one up, 2 two down, and so on. A symbol is
    the difference of the ordered integers modulo 2**width, zigzag-encoded, minus one (the difference is never zero)."""
    signed = (to_ordered(new) - to_ordered(base)).view(f"i{base.dtype.itemsize}")
    zigzag = (signed << 1) ^ (signed >> (8 * base.dtype.itemsize - 1))
    return cast("BitArray", zigzag.view(base.dtype)) - base.dtype.type(1)


def apply_moves(base: BitArray, symbols: BitArray) -> BitArray:
    """Return the ``new`` patterns from ``base`` and the result of ``move_symbols``. A symbol with all bits set would
    mean no change: callers check for it before."""
    unit = base.dtype.type(1)
    zigzag = symbols + unit
    moves = (zigzag >> unit) ^ (~(zigzag & unit) + unit)
    return from_ordered(to_ordered(base) + moves)
