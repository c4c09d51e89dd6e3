"""Complete weights, their exponents coded apart: they are few and like each other, the other bits are noise.

The sign is moved below the mantissa, so that the upper byte of an element holds its exponent (and, in float16, two
bits more). That plane takes a third of its size with zstd at level 1; the lower bytes are copied."""

from __future__ import annotations

import numpy as np
import zstandard

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import BitArray, BitType


def split_planes(bits: BitArray) -> bytes:
    """All elements (uint16 or uint32 [n]): the plane of the upper bytes as one zstd frame, then the lower bytes."""
    kind = bits.dtype.type
    width = bits.dtype.itemsize
    turned = (bits << kind(1)) | (bits >> kind(8 * width - 1))
    exponents = (turned >> kind(8 * width - 8)).astype(np.uint8)
    frame = zstandard.ZstdCompressor(level=1, write_checksum=False).compress(exponents.data)
    lower = turned.astype(np.uint8) if width == 2 else turned.view(np.uint8).reshape(-1, width)[:, :-1]
    return b"".join((frame, lower.tobytes()))


def join_planes(body: memoryview, bit_dtype: BitType, count: int, tensor: str) -> BitArray:
    """The inverse, for ``count`` elements. Raises ``WeightError`` for what ``split_planes`` does not write."""
    width = bit_dtype.itemsize
    split = len(body) - count * (width - 1)
    if split < 1:
        raise WeightError(f"patch of {tensor!r} has {len(body)} bytes in its planes; {count} elements need more")
    exponents = _read_frame(body[:split], count, tensor)
    turned = np.empty(count, dtype=bit_dtype)
    by_byte = turned.view(np.uint8).reshape(-1, width)
    by_byte[:, -1] = exponents
    by_byte[:, :-1] = np.frombuffer(body[split:], dtype=np.uint8).reshape(-1, width - 1)
    kind = turned.dtype.type
    joined: BitArray = (turned >> kind(1)) | (turned << kind(8 * width - 1))
    return joined


def _read_frame(frame: memoryview, count: int, tensor: str) -> np.ndarray:
    """One zstd frame, whose header must claim ``count`` bytes before anything is allocated for it."""
    try:
        claimed = zstandard.get_frame_parameters(frame).content_size
        if claimed == count:
            plain = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
            return np.frombuffer(plain, dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise WeightError(f"patch of {tensor!r} has exponents that cannot be decoded: {error}") from error
    raise WeightError(f"patch of {tensor!r} claims {claimed} exponents for {count} elements")
