"""Exact codec of one ``WeightPatch``: what changed in one tensor shard, as absolute bit patterns.

Layout (little endian): a 24-byte header, then the body.

=========  ====================================================================
codec      body
=========  ====================================================================
INDEX      uint32 positions, strictly increasing, then the values in that order
BITMASK    one bit an element (first element in the lowest bit), then the values
DENSE      the value of every element
=========  ====================================================================

The encoder takes the smallest. A decoder refuses whatever the encoder would not have written, so that a
patch means one thing only.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec
import numpy as np

from streamrl.comm.weights.bit_patterns import BitArray, PositionArray
from streamrl.errors import WeightError

_HEADER = struct.Struct("<BBHIQQ")  # codec, bytes an element, layout version, reserved, elements, changed elements
_LAYOUT_VERSION = 1
_INDEX_LIMIT = 2**32


class Codec(IntEnum):
    """How the changed positions of a patch are written."""

    INDEX = 1
    BITMASK = 2
    DENSE = 3


class WeightPatch(msgspec.Struct, frozen=True, eq=False):
    """What changed in one tensor shard, decoded: absolute values, positions relative to the shard.

    ``positions``: int64 [n], strictly increasing, or None when every element is given.
    ``values``: uint16 or uint32 [n].
    """

    positions: PositionArray | None
    values: BitArray


def encoded_sizes(count: int, changed: int, width: int) -> dict[Codec, int]:
    """Bytes of each codec that can hold ``changed`` of ``count`` elements of ``width`` bytes."""
    sizes = {Codec.DENSE: count * width}
    sizes[Codec.BITMASK] = (count + 7) // 8 + changed * width
    if count <= _INDEX_LIMIT:
        sizes[Codec.INDEX] = 4 * changed + changed * width
    return {codec: size + _HEADER.size for codec, size in sizes.items()}


def encode_patch(bits: BitArray, positions: PositionArray | None) -> bytes:
    """Encode the elements of ``bits`` (uint16 or uint32 [count]) at ``positions`` (int64, increasing; None: all)."""
    count, width = bits.size, bits.dtype.itemsize
    changed = count if positions is None else positions.size
    sizes = encoded_sizes(count, changed, width)
    codec = Codec.DENSE if positions is None else min(sizes, key=lambda c: (sizes[c], c))
    body: tuple[bytes, ...]
    if codec is Codec.DENSE or positions is None:
        body = (bits.tobytes(),)
    elif codec is Codec.INDEX:
        body = (positions.astype("<u4").tobytes(), bits[positions].tobytes())
    else:
        flags = np.zeros(count, dtype=np.uint8)
        flags[positions] = 1
        body = (np.packbits(flags, bitorder="little").tobytes(), bits[positions].tobytes())
    return b"".join((_HEADER.pack(codec, width, _LAYOUT_VERSION, 0, count, changed), *body))


def decode_patch(encoded: memoryview | bytes, bit_dtype: np.dtype[np.generic], count: int, tensor: str) -> WeightPatch:
    """Decode one patch. Arrays may share memory with ``encoded``.

    ``count``: elements of the shard, known beforehand. ``tensor`` names the tensor in errors.
    Raises ``WeightError`` for anything that ``encode_patch`` does not write.
    """
    view = memoryview(encoded)
    if len(view) < _HEADER.size:
        raise WeightError(f"patch of {tensor!r} has {len(view)} bytes, less than its header ({_HEADER.size})")
    codec_id, width, layout, _, elements, changed = _HEADER.unpack_from(view)
    if layout != _LAYOUT_VERSION or codec_id not in list(Codec):
        raise WeightError(
            f"patch of {tensor!r} has codec {codec_id}, layout {layout}; this build reads layout 1, codecs 1-3"
        )
    if width != bit_dtype.itemsize or elements != count or changed > elements:
        raise WeightError(
            f"patch of {tensor!r} holds {changed} of {elements} elements of {width} bytes; "
            f"expected a shard of {count} elements of {bit_dtype.itemsize} bytes"
        )
    codec = Codec(codec_id)
    expected = encoded_sizes(elements, changed, width)[codec]
    if len(view) != expected:
        raise WeightError(f"patch of {tensor!r} has {len(view)} bytes; its header says {expected}")
    body = view[_HEADER.size :]
    if codec is Codec.DENSE:
        return WeightPatch(None, np.frombuffer(body, dtype=bit_dtype))
    positions = _read_positions(codec, body, elements, changed, tensor)
    return WeightPatch(positions, np.frombuffer(body[len(body) - changed * width :], dtype=bit_dtype))


def _read_positions(codec: Codec, body: memoryview, elements: int, changed: int, tensor: str) -> PositionArray:
    if codec is Codec.INDEX:
        positions = np.frombuffer(body[: 4 * changed], dtype="<u4").astype(np.int64)
        if changed and (positions[-1] >= elements or bool(np.any(np.diff(positions) <= 0))):
            raise WeightError(f"patch of {tensor!r} has positions that do not increase or leave its {elements}")
        return positions
    flags = np.unpackbits(np.frombuffer(body[: (elements + 7) // 8], dtype=np.uint8), bitorder="little")
    positions = np.flatnonzero(flags).astype(np.int64)
    if positions.size != changed or (changed and positions[-1] >= elements):
        raise WeightError(
            f"patch of {tensor!r} marks {positions.size} elements in its bitmask; its header says {changed}"
        )
    return positions
