"""Exact codec of one ``WeightPatch``: what changed in one contiguous piece of a tensor, or all of it.

Layout: the length of the header (uint16, little endian), the header (msgpack), then the body.

=======  ==================================================================================================
codec    body
=======  ==================================================================================================
CLASSES  for each exponent class of the *base*: the gaps between changes, then the changes as steps between
         ordered bit patterns (``class_split``, ``symbol_streams``). Only who holds the base can read it.
PLANES   all elements: their exponents (zstd), then their other bits
DENSE    all elements
=======  ==================================================================================================

An anchor takes the smaller of the last two, a delta the smallest of all. A decoder refuses what the encoder
would not have written, and checks each size before it allocates anything by it.
"""

from __future__ import annotations

import importlib
import struct
from enum import IntEnum
from types import ModuleType
from typing import cast

import msgspec
import numpy as np

from streamrl.comm.weights import class_split
from streamrl.comm.weights.bit_patterns import BitArray, BitType, PositionArray
from streamrl.comm.weights.class_split import ClassStreams, GapArray, Split, Thresholds
from streamrl.comm.weights.compiled_paths import worth_compiling
from streamrl.comm.weights.exponent_classes import MAXIMUM_CLASSES, THRESHOLD_BITS, choose_thresholds
from streamrl.comm.weights.exponent_plane import join_planes, split_planes
from streamrl.comm.weights.symbol_streams import decode_symbols, encode_symbols
from streamrl.errors import WeightError

MAXIMUM_ELEMENTS = 2**31 - 1  # of one patch; larger shards are published in pieces (``manifest.work_units``)
_LAYOUT_VERSION = 2
_LENGTH = struct.Struct("<H")
_HEADER_LIMIT = 1024


class Codec(IntEnum):
    """How a patch is written."""

    CLASSES = 1
    PLANES = 2
    DENSE = 3


class WeightPatch(msgspec.Struct, frozen=True, eq=False):
    """What changed in one tensor shard, decoded: absolute values, positions relative to the shard.

    ``positions``: int64 [n], strictly increasing, or None when every element is given.
    ``values``: uint16 or uint32 [n].
    """

    positions: PositionArray | None
    values: BitArray


class EncodedPatch(msgspec.Struct, frozen=True, eq=False):
    """A patch and its bytes. ``patch`` holds copies, and nothing but what changed. ``listed_elements``: how many
    ``encoded`` decodes to, which is every element where a complete patch was the shorter one."""

    patch: WeightPatch
    encoded: bytes
    listed_elements: int


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``thresholds``: see ``exponent_classes``. ``streams``: changes, bytes of gaps and bytes of symbols, by class."""

    layout: int
    codec: Codec
    width: int
    elements: int
    changed: int
    thresholds: tuple[int, ...] = ()
    streams: tuple[tuple[int, int, int], ...] = ()


def encode_patch(bits: BitArray, base: BitArray | None, dtype: str) -> EncodedPatch | None:
    """Encode how ``bits`` differ from ``base``; everything when ``base`` is None. None when nothing differs.

    ``bits``, ``base``: uint16 or uint32 [n], which may lie apart in memory; one pass over them. ``dtype``: the
    published dtype that they are patterns of.
    """
    if bits.size > MAXIMUM_ELEMENTS:
        raise WeightError(f"a patch of {bits.size} elements was asked for; {MAXIMUM_ELEMENTS} fit: cut the shard")
    if base is None:
        _prepare_deltas(bits)
        return EncodedPatch(WeightPatch(None, bits.copy()), encode_complete(bits), bits.size)
    base, bits = _together(base), _together(bits)
    thresholds = choose_thresholds(base, bits, dtype)
    split = _compiled_or_plain(bits.size).split_changes(base, bits, thresholds)
    if not split.positions.size:
        return None
    patch, encoded = WeightPatch(split.positions, split.values), _encode_classes(bits, thresholds, split)
    if 2 * len(encoded) > bits.nbytes and len(complete := encode_complete(bits)) < len(encoded):
        return EncodedPatch(patch, complete, bits.size)
    return EncodedPatch(patch, encoded, split.positions.size)


def encode_complete(bits: BitArray) -> bytes:
    """All elements, readable without a base."""
    planes = split_planes(bits)
    if len(planes) < bits.nbytes:
        return _frame(_Header(_LAYOUT_VERSION, Codec.PLANES, bits.itemsize, bits.size, bits.size), planes)
    return _frame(_Header(_LAYOUT_VERSION, Codec.DENSE, bits.itemsize, bits.size, bits.size), bits.tobytes())


def decode_patch(
    encoded: memoryview | bytes, bit_dtype: BitType, count: int, tensor: str, base: BitArray | None
) -> WeightPatch:
    """Decode one patch to absolute values. Arrays may share memory with ``encoded``.

    ``count``: elements of the shard, known beforehand. ``base``: what the receiver holds of the shard (uint16 or
    uint32 [count]); None reads complete patches only. ``tensor`` names the tensor in errors.
    Raises ``WeightError`` for anything that ``encode_patch`` does not write.
    """
    view = memoryview(encoded)
    header, body = _read_header(view, tensor)
    if header.width != bit_dtype.itemsize or header.elements != count or not 0 <= header.changed <= count:
        raise WeightError(
            f"patch of {tensor!r} holds {header.changed} of {header.elements} elements of {header.width} bytes; "
            f"expected a shard of {count} elements of {bit_dtype.itemsize} bytes"
        )
    if header.codec is not Codec.CLASSES:
        values = _read_complete(header, body, bit_dtype, tensor)
        _prepare_deltas(values)
        return WeightPatch(None, values)
    if base is None:
        raise WeightError(f"patch of {tensor!r} is a delta, and nothing is held that it could be applied to")
    if base.size != count or base.dtype.itemsize != bit_dtype.itemsize:
        raise WeightError(f"patch of {tensor!r} has {count} elements; its base has {base.size} of {base.dtype}")
    thresholds = np.array(header.thresholds, dtype=np.uint32)
    streams = _read_streams(header, body, bit_dtype, tensor)
    positions, values = _compiled_or_plain(count).join_changes(_together(base), thresholds, streams, tensor)
    return WeightPatch(positions, values)


def _together(bits: BitArray) -> BitArray:
    return cast("BitArray", np.ascontiguousarray(bits))


def _compiled_or_plain(elements: int) -> ModuleType:
    return importlib.import_module("streamrl.comm.weights.compiled_split") if worth_compiling(elements) else class_split


def _prepare_deltas(complete: BitArray) -> None:
    """Load what deltas of such a shard will need while an anchor is made or read: nothing waits for it yet, and on a
    new machine it is compiled first (8 s, then kept beside the source)."""
    split = _compiled_or_plain(complete.size)
    if split is not class_split:
        two, thresholds = np.array([0, 1], dtype=complete.dtype), np.zeros(0, dtype=np.uint32)
        split.join_changes(two, thresholds, split.split_changes(two, two[::-1].copy(), thresholds).streams, "two")


def _encode_classes(bits: BitArray, thresholds: Thresholds, split: Split) -> bytes:
    parts = [(encode_symbols(stream.gaps), encode_symbols(stream.symbols)) for stream in split.streams]
    header = _Header(
        _LAYOUT_VERSION,
        Codec.CLASSES,
        bits.itemsize,
        bits.size,
        split.positions.size,
        tuple(thresholds.tolist()),
        tuple((s.gaps.size, len(g), len(v)) for s, (g, v) in zip(split.streams, parts, strict=True)),
    )
    return _frame(header, *(stream for pair in parts for stream in pair))


def _frame(header: _Header, *body: bytes) -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return b"".join((_LENGTH.pack(len(encoded)), encoded, *body))


def _read_header(view: memoryview, tensor: str) -> tuple[_Header, memoryview]:
    length = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else 0
    start = _LENGTH.size + length
    if not 0 < length <= _HEADER_LIMIT or len(view) < start:
        raise WeightError(f"patch of {tensor!r} has {len(view)} bytes and a header of {length}")
    try:
        header = _decoder.decode(view[_LENGTH.size : start])
    except msgspec.MsgspecError as error:
        raise WeightError(f"patch of {tensor!r} has a header that cannot be read: {error}") from error
    if header.layout != _LAYOUT_VERSION or msgspec.msgpack.encode(header) != view[_LENGTH.size : start]:
        raise WeightError(
            f"patch of {tensor!r} has layout {header.layout} or a header of another writer; this build reads "
            f"{_LAYOUT_VERSION}: run the same streamrl version on both sides"
        )
    return header, view[start:]


_decoder = msgspec.msgpack.Decoder(_Header)


def _read_complete(header: _Header, body: memoryview, bit_dtype: BitType, tensor: str) -> BitArray:
    if header.changed != header.elements or header.thresholds or header.streams:
        raise WeightError(f"patch of {tensor!r} is complete, and lists {header.changed} of {header.elements} elements")
    if header.codec is Codec.PLANES:
        return join_planes(body, bit_dtype, header.elements, tensor)
    if len(body) != header.elements * header.width:
        raise WeightError(f"patch of {tensor!r} has {len(body)} bytes of values; its header says {header.elements}")
    return cast("BitArray", np.frombuffer(body, dtype=bit_dtype))


def _read_streams(header: _Header, body: memoryview, bit_dtype: BitType, tensor: str) -> list[ClassStreams]:
    """The streams of all classes; every size is checked against the header and the shard before it is used."""
    thresholds, top = header.thresholds, 1 << (8 * header.width - 1)
    low_bits = (1 << (8 * header.width - 1 - THRESHOLD_BITS)) - 1
    rising = not any(threshold & low_bits for threshold in thresholds) and all(
        low < high for low, high in zip((0, *thresholds), (*thresholds, top), strict=True)
    )
    if not rising or len(header.streams) != len(thresholds) + 1 or len(header.streams) > MAXIMUM_CLASSES:
        raise WeightError(f"patch of {tensor!r} has {len(header.streams)} classes with thresholds {thresholds}")
    sizes = [size for stream in header.streams for size in stream]
    lengths = sum(gaps + symbols for _, gaps, symbols in header.streams)
    changed = sum(changes for changes, _, _ in header.streams)
    if min(sizes) < 0 or lengths != len(body) or changed != header.changed or not changed:
        raise WeightError(
            f"patch of {tensor!r} has {len(body)} bytes and {header.changed} changes; its classes add up to "
            f"{lengths} and {changed}"
        )
    streams, start = [], 0
    for changes, gap_bytes, symbol_bytes in header.streams:
        middle, stop = start + gap_bytes, start + gap_bytes + symbol_bytes
        gaps = cast("GapArray", decode_symbols(body[start:middle], np.dtype("<u4"), changes, tensor))
        symbols = decode_symbols(body[middle:stop], bit_dtype, changes, tensor)
        if changes and symbols.max() == (1 << (8 * header.width)) - 1:
            raise WeightError(f"patch of {tensor!r} lists an element that does not change")
        streams.append(ClassStreams(gaps, symbols))
        start = stop
    return streams
