"""Complete form of a patch: the exponents of all elements are compressed, their other bits are copied.

``codec.py`` calls both functions. Exponents have few different values, the other bits are noise. The sign is moved
below the mantissa, so that the upper byte of an element holds its exponent (in float16 also two more bits). The plane
of these bytes takes a third of its size with zstd at level 1."""

from __future__ import annotations

import numpy as np
import zstandard

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import BitArray, BitType


def split_planes(bits: BitArray) -> bytes:
    """Encode all elements (uint16 or uint32 [n]): the plane of the upper bytes as one zstd frame, then the lower
    bytes."""
    integer = bits.dtype.type
    width = bits.dtype.itemsize
    rotated = (bits << integer(1)) | (bits >> integer(8 * width - 1))
    exponents = (rotated >> integer(8 * width - 8)).astype(np.uint8)
    frame = zstandard.ZstdCompressor(level=1, write_checksum=False).compress(exponents.data)
    lower = rotated.astype(np.uint8) if width == 2 else rotated.view(np.uint8).reshape(-1, width)[:, :-1]
    return b"".join((frame, lower.tobytes()))


def join_planes(body: memoryview, bit_dtype: BitType, count: int, tensor: str) -> BitArray:
    """Decode ``count`` elements from the result of ``split_planes``. Raises ``WeightError`` for other bytes."""
    width = bit_dtype.itemsize
    split = len(body) - count * (width - 1)
    if split < 1:
        raise WeightError(f"patch of {tensor!r} has {len(body)} bytes in its planes; {count} elements need more")
    exponents = _read_frame(body[:split], count, tensor)
    rotated = np.empty(count, dtype=bit_dtype)
    by_byte = rotated.view(np.uint8).reshape(-1, width)
    by_byte[:, -1] = exponents
    by_byte[:, :-1] = np.frombuffer(body[split:], dtype=np.uint8).reshape(-1, width - 1)
    integer = rotated.dtype.type
    bits: BitArray = (rotated >> integer(1)) | (rotated << integer(8 * width - 1))
    return bits


def _read_frame(frame: memoryview, count: int, tensor: str) -> np.ndarray:
    """Decompress one zstd frame. The header must claim ``count`` bytes, before memory is allocated for the content."""
    try:
        claimed = zstandard.get_frame_parameters(frame).content_size
        if claimed == count:
            content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
            return np.frombuffer(content, dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise WeightError(f"patch of {tensor!r} has exponents that cannot be decoded: {error}") from error
    raise WeightError(f"patch of {tensor!r} claims {claimed} exponents for {count} elements")
