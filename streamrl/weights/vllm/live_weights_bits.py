"""Bits of a checkpoint tensor as a route sees them: a rectangle of them, their hash, their form in a runtime type."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from streamrl.weights.codec.bits import BitArray
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.vllm.load_plan import Rectangle

UPPER_HALF = 16
"""Bits: a float32 that holds a bfloat16 has it there, and zeros below."""


def inside(rectangle: Rectangle, bits: BitArray) -> BitArray:
    """The elements of ``bits`` inside the rectangle, flat: a view where they are contiguous, else a copy."""
    if rectangle.strides == (1,):
        return bits[rectangle.offset : rectangle.offset + rectangle.elements]
    strides = tuple(stride * bits.itemsize for stride in rectangle.strides)
    view = np.lib.stride_tricks.as_strided(bits[rectangle.offset :], rectangle.sizes, strides, writeable=False)
    return cast("BitArray", view.reshape(-1))


def hash_rectangle(name: str, rectangle: Rectangle, bits: BitArray) -> int:
    """What ``bits`` [n], at the places of ``rectangle`` in tensor ``name``, add to the state hash."""
    if rectangle.strides == (1,):
        return hash_range(name, rectangle.offset, bits)
    return hash_elements(name, rectangle.positions(), bits)


def to_runtime(bits: BitArray, element_size: int) -> npt.NDArray[np.int16] | npt.NDArray[np.int32]:
    """Published bits as integers of ``element_size`` bytes: the published type, or float32 that holds bfloat16."""
    if bits.dtype.itemsize == element_size:
        flat = np.ascontiguousarray(bits)
        return flat.view(np.int16) if element_size == 2 else flat.view(np.int32)
    return (bits.astype(np.uint32) << np.uint32(UPPER_HALF)).view(np.int32)
