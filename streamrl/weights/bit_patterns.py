"""Which integers stand for the elements of a published tensor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.base.errors import WeightError

BitArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
BitType = np.dtype[np.uint16] | np.dtype[np.uint32]
PositionArray = npt.NDArray[np.int64]

_BIT_TYPES: dict[str, BitType] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<u2"),
    "float32": np.dtype("<u4"),
}
_MANTISSA_BITS = {"bfloat16": 7, "float16": 10, "float32": 23}


def mantissa_bits(dtype: str) -> int:
    """Bits of a published dtype below its exponent."""
    return _MANTISSA_BITS[dtype]


def bit_type(dtype: str, tensor: str) -> BitType:
    """The integer type that holds one element of ``dtype``. ``tensor`` names the tensor in the error."""
    found = _BIT_TYPES.get(dtype)
    if found is None:
        raise WeightError(
            f"tensor {tensor!r} has the published dtype {dtype!r}; only {', '.join(sorted(_BIT_TYPES))} can be"
        )
    return found


def as_bits(values: npt.NDArray[np.generic], dtype: str, count: int, tensor: str) -> BitArray:
    """``values`` as flat unsigned bit patterns, checked to be ``count`` elements as wide as ``dtype``."""
    wanted = bit_type(dtype, tensor)
    if values.dtype.kind not in "iu" or values.dtype.itemsize != wanted.itemsize:
        raise WeightError(
            f"tensor {tensor!r} ({dtype}) was given as numpy {values.dtype}; give its bit patterns as {wanted.name}"
        )
    flat = values.reshape(-1).view(wanted)  # bits may lie apart, as the upper halves of float32 values do
    if flat.size != count:
        raise WeightError(f"tensor {tensor!r} was given with {flat.size} elements; this shard holds {count}")
    return flat
