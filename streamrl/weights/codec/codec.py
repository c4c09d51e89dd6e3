"""Exact codec of one ``WeightPatch``: what changed in one contiguous piece of a tensor, or all of it.

=======  ==================================================================================================
form     bytes
=======  ==================================================================================================
CLASSES  header, then for each exponent class of the *base*: the gaps between changes, then the changes as
         steps between ordered bit patterns (``class_split``, ``symbol_streams``)
single   two bytes, then the same gaps and steps in adaptive code (``adaptive_streams``): for few changes
PLANES   header, then all elements: their exponents (zstd), then their other bits
dense    all elements, and nothing else: what has exactly so many bytes is dense, all other forms have fewer
=======  ==================================================================================================

Only who holds the base can read the first two. A header is its length (uint16, little endian) and msgpack; the two
bytes of the second form are a number beyond any such length (``single_exponents``). An anchor takes the smaller of the
last two, a delta the smallest form of all: nothing is ever larger than dense. A decoder refuses what the encoder would
not have written, and checks each size before it allocates anything by it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import cast

import msgspec
import numpy as np

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.weights.bit_patterns import BitArray, BitType, PositionArray
from streamrl.weights.codec import single_exponents
from streamrl.weights.codec.class_split import ClassStreams, GapArray, Split, Thresholds
from streamrl.weights.codec.exponent_classes import MAXIMUM_CLASSES, SINGLE, THRESHOLD_BITS, choose_thresholds
from streamrl.weights.codec.exponent_plane import join_planes, split_planes
from streamrl.weights.codec.symbol_streams import decode_symbols, encode_symbols
from streamrl.weights.compiled_paths import split_form, worth_compiling

MAXIMUM_ELEMENTS = 2**31 - 1  # of one patch; larger shards are published in pieces (``manifest.work_units``)
_LAYOUT_VERSION = 3
_LENGTH = struct.Struct("<H")
_HEADER_LIMIT = 1024


class Codec(IntEnum):
    """How a patch with a header is written."""

    CLASSES = 1
    PLANES = 2


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
    single = single_exponents.choose_thresholds(base, bits, dtype)
    thresholds = choose_thresholds(base, bits, dtype) if single is None else single
    split = split_form(bits.size).split_changes(base, bits, thresholds)
    return encode_split(split, thresholds, bits.size, lambda: bits, single=single is not None)


def encode_split(
    split: Split, thresholds: Thresholds, elements: int, complete: Callable[[], BitArray], *, single: bool
) -> EncodedPatch | None:
    """Encode what differs in a unit of ``elements``, once that is known; None when nothing does.

    ``complete``: gives all new bits, should they be the shorter form. ``single``: whether ``thresholds`` are those of
    ``single_exponents``.
    """
    if not split.positions.size:
        return None
    encode = single_exponents.encode if single else _encode_classes
    encoded = encode(thresholds, split, elements)
    patch = WeightPatch(split.positions, split.values)
    if 2 * len(encoded) > elements * split.values.itemsize:
        whole = encode_complete(complete())
        if len(whole) <= len(encoded):
            return EncodedPatch(patch, whole, elements)
    return EncodedPatch(patch, encoded, split.positions.size)


def encode_complete(bits: BitArray) -> bytes:
    """All elements, readable without a base."""
    header = _Header(_LAYOUT_VERSION, Codec.PLANES, bits.itemsize, bits.size, bits.size)
    planes = _frame(header, split_planes(bits))
    return planes if len(planes) < bits.nbytes else bits.tobytes()


def decode_patch(
    encoded: memoryview | bytes, bit_dtype: BitType, count: int, tensor: str, base: BitArray | None
) -> WeightPatch:
    """Decode one patch to absolute values. Arrays may share memory with ``encoded``.

    ``count``: elements of the shard, known beforehand. ``base``: what the receiver holds of the shard (uint16 or
    uint32 [count]); None reads complete patches only. ``tensor`` names the tensor in errors.
    Raises ``WeightError`` for anything that ``encode_patch`` does not write.
    """
    view = memoryview(encoded)
    if len(view) == count * bit_dtype.itemsize:
        return _complete_patch(cast("BitArray", np.frombuffer(view, dtype=bit_dtype)))
    if len(view) >= _LENGTH.size and _LENGTH.unpack_from(view)[0] >= SINGLE:
        held = _base_for(base, bit_dtype, count, tensor)
        return WeightPatch(*single_exponents.decode(view, held, tensor))
    header, body = _read_header(view, tensor)
    if header.width != bit_dtype.itemsize or header.elements != count or not 0 <= header.changed <= count:
        raise WeightError(
            f"patch of {tensor!r} holds {header.changed} of {header.elements} elements of {header.width} bytes; "
            f"expected a shard of {count} elements of {bit_dtype.itemsize} bytes"
        )
    if header.codec is not Codec.CLASSES:
        return _complete_patch(_read_planes(header, body, bit_dtype, tensor))
    held = _base_for(base, bit_dtype, count, tensor)
    streams = _read_streams(header, body, bit_dtype, tensor)
    thresholds = np.array(header.thresholds, dtype=np.uint32)  # after the check: numpy raises for more than 32 bits
    positions, values = split_form(count).join_changes(held, thresholds, streams, tensor)
    return WeightPatch(positions, values)


def _complete_patch(values: BitArray) -> WeightPatch:
    _prepare_deltas(values)
    return WeightPatch(None, values)


def _base_for(base: BitArray | None, bit_dtype: BitType, count: int, tensor: str) -> BitArray:
    if base is None:
        raise WeightError(f"patch of {tensor!r} is a delta, and nothing is held that it could be applied to")
    if base.size != count or base.dtype.itemsize != bit_dtype.itemsize:
        raise WeightError(f"patch of {tensor!r} has {count} elements; its base has {base.size} of {base.dtype}")
    return _together(base)


def _together(bits: BitArray) -> BitArray:
    return cast("BitArray", np.ascontiguousarray(bits))


def _prepare_deltas(complete: BitArray) -> None:
    """Load what deltas of such a shard will need while an anchor is made or read: nothing waits for it yet, and on a
    new machine it is compiled first (15 s, then kept beside the source)."""
    if worth_compiling(complete.size):
        form, base = split_form(complete.size), np.zeros(64, dtype=complete.dtype)
        new, thresholds = base + base.dtype.type(1), np.zeros(0, dtype=np.uint32)
        single_exponents.choose_thresholds(base, new, "bfloat16")
        encoded = single_exponents.encode(thresholds, form.split_changes(base, new, thresholds), base.size)
        single_exponents.decode(memoryview(encoded), base, "prepared")


def _encode_classes(thresholds: Thresholds, split: Split, elements: int) -> bytes:
    parts = [(encode_symbols(stream.gaps), encode_symbols(stream.symbols)) for stream in split.streams]
    header = _Header(
        _LAYOUT_VERSION,
        Codec.CLASSES,
        split.values.itemsize,
        elements,
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
    except UNDECODABLE as error:
        raise WeightError(f"patch of {tensor!r} has a header that cannot be read: {error}") from error
    if header.layout != _LAYOUT_VERSION or msgspec.msgpack.encode(header) != view[_LENGTH.size : start]:
        raise WeightError(
            f"patch of {tensor!r} has layout {header.layout} or a header of another writer; this build reads "
            f"{_LAYOUT_VERSION}: run the same streamrl version on both sides"
        )
    return header, view[start:]


_decoder = msgspec.msgpack.Decoder(_Header)


def _read_planes(header: _Header, body: memoryview, bit_dtype: BitType, tensor: str) -> BitArray:
    if header.changed != header.elements or header.thresholds or header.streams:
        raise WeightError(f"patch of {tensor!r} is complete, and lists {header.changed} of {header.elements} elements")
    return join_planes(body, bit_dtype, header.elements, tensor)


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
