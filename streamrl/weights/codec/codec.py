"""Exact codec of one ``WeightPatch``: what changed in a unit of elements, or all of them.

=========  ==================================================================================================
form       bytes
=========  ==================================================================================================
a delta    header, then for each class of the *base*: the gaps between changes, and how far each one moved
complete   header without classes, then all elements: their exponents (zstd), then their other bits
dense      all elements, and nothing else: what has exactly so many bytes is dense, other forms have fewer
=========  ==================================================================================================

Whether an optimizer step moves a published element depends on the step against the spacing of the numbers around it,
hence on its exponent. So every exponent of the base, which the receiver holds too, is a class: positions are counted
among its members, and take half of what they take counted over all elements. Exponents that fewer than
``_FEW_MEMBERS`` elements have share class 0. Moves are steps between neighbouring numbers (``bits.step_symbols``).

A header is its length (uint16, little endian) and msgpack. An anchor takes the smaller of the last two forms, a delta
the smallest of all: nothing is ever larger than dense. A decoder refuses what the encoder would not have written, and
checks each size before it allocates anything by it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.weights.codec import kernels
from streamrl.weights.codec.bits import (
    BitArray,
    PositionArray,
    apply_steps,
    bit_type,
    exponent_field,
    exponents_of,
    step_symbols,
)
from streamrl.weights.codec.planes import join_planes, split_planes
from streamrl.weights.codec.symbols import decode_symbols, encode_symbols

MAXIMUM_ELEMENTS = 2**31 - 1  # of one patch; larger shards are published in pieces (``manifest.work_units``)
_LAYOUT_VERSION = 4
_LENGTH = struct.Struct("<H")
_HEADER_LIMIT = 1 << 13
_FEW_MEMBERS = 64

CountArray = npt.NDArray[np.int64]
GapArray = npt.NDArray[np.uint32]


class WeightPatch(msgspec.Struct, frozen=True, eq=False):
    """Changes of one tensor shard, decoded: absolute values, positions relative to the shard. ``positions``: int64 [n],
    strictly increasing, or None when every element is given. ``values``: uint16 or uint32 [n]."""

    positions: PositionArray | None
    values: BitArray


class EncodedPatch(msgspec.Struct, frozen=True, eq=False):
    """A patch and its bytes. ``patch`` holds copies, and nothing but what changed; ``encoded`` decodes to every element
    where a complete patch was the shorter one."""

    patch: WeightPatch
    encoded: bytes


class ExponentClasses(msgspec.Struct, frozen=True, eq=False):
    """The classes of a base: that of each exponent (uint16 [exponents]), and how many members each has (int64)."""

    class_at: npt.NDArray[np.uint16]
    sizes: CountArray

    @classmethod
    def of(cls, counts: CountArray) -> ExponentClasses:
        """``counts``: elements of the base by exponent, int64 [exponents]."""
        common = counts >= _FEW_MEMBERS
        class_at = np.where(common, np.cumsum(common), 0).astype(np.uint16)
        return cls(class_at, np.concatenate(([counts[~common].sum()], counts[common])))


class ClassChanges(msgspec.Struct, frozen=True, eq=False):
    """The changes of one class, in the order of their positions. ``gaps``: uint32 [n], members of the class between a
    change and the one before it. ``steps``: uint16 or uint32 [n], see ``bits.step_symbols``."""

    index: int
    gaps: GapArray
    steps: BitArray


class Changes(msgspec.Struct, frozen=True, eq=False):
    """Differences from a base: ``positions`` int64 [n] increasing, their new ``values``, and the same by class."""

    positions: PositionArray
    values: BitArray
    by_class: list[ClassChanges]


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``classes``: of each that changed its index, its changes, its bytes of gaps and of steps. Empty: complete."""

    layout: int
    elements: int
    classes: tuple[tuple[int, int, int, int], ...] = ()


def encode_patch(bits: BitArray, base: BitArray | None, dtype: str) -> EncodedPatch | None:
    """Encode how ``bits`` differ from ``base``; everything when ``base`` is None. None when nothing differs.

    ``bits``, ``base``: uint16 or uint32 [n], which may lie apart in memory. ``dtype``: the published dtype that they
    are patterns of."""
    if bits.size > MAXIMUM_ELEMENTS:
        raise WeightError(f"a patch of {bits.size} elements was asked for; {MAXIMUM_ELEMENTS} fit: cut the shard")
    if base is None:
        return EncodedPatch(WeightPatch(None, bits.copy()), encode_complete(bits))
    base = kernels.frozen(base)
    bits = kernels.frozen(bits)
    positions = np.flatnonzero(base != bits).astype(np.int64, copy=False)
    if not positions.size:
        return None
    lowest, _ = exponent_field(dtype)
    classes = classes_of(base, dtype)
    gaps = np.empty(positions.size, dtype=np.uint32)
    kernels.gaps_between(base, lowest, classes.class_at, classes.sizes.size, positions, gaps)
    old = base[positions]
    values = bits[positions]
    kinds = classes.class_at[exponents_of(old, dtype)]
    changes = Changes(positions, values, by_class(kinds, gaps, step_symbols(old, values)))
    return encode_changes(changes, bits.size, lambda: bits)


def classes_of(base: BitArray, dtype: str) -> ExponentClasses:
    """The classes of a base (uint16 or uint32 [n], contiguous)."""
    lowest, exponents = exponent_field(dtype)
    counts = np.zeros(exponents, dtype=np.int64)
    kernels.count_exponents(base, lowest, counts)
    return ExponentClasses.of(counts)


def by_class(kinds: npt.NDArray[np.unsignedinteger], gaps: GapArray, steps: BitArray) -> list[ClassChanges]:
    """Changes in the order of their positions, sorted by their class (``kinds``, [n])."""
    order = np.argsort(kinds, kind="stable")
    found, counts = np.unique(kinds, return_counts=True)
    gaps = gaps[order]
    steps = steps[order]
    edges = pairwise([0, *np.cumsum(counts).tolist()])
    return [
        ClassChanges(index, gaps[start:stop], steps[start:stop])
        for index, (start, stop) in zip(found.tolist(), edges, strict=True)
    ]


def encode_changes(changes: Changes, elements: int, complete: Callable[[], BitArray]) -> EncodedPatch:
    """Encode what differs in a unit of ``elements``. ``complete``: gives all new bits, should they be shorter."""
    streams = [(c.index, c.gaps.size, encode_symbols(c.gaps), encode_symbols(c.steps)) for c in changes.by_class]
    header = _Header(
        _LAYOUT_VERSION, elements, tuple((index, count, len(gaps), len(steps)) for index, count, gaps, steps in streams)
    )
    encoded = _frame(header, *(stream for *_, gaps, steps in streams for stream in (gaps, steps)))
    patch = WeightPatch(changes.positions, changes.values)
    if 2 * len(encoded) > elements * changes.values.itemsize:
        whole = encode_complete(complete())
        if len(whole) <= len(encoded):
            return EncodedPatch(patch, whole)
    return EncodedPatch(patch, encoded)


def encode_complete(bits: BitArray) -> bytes:
    """All elements, readable without a base."""
    planes = _frame(_Header(_LAYOUT_VERSION, bits.size), split_planes(bits))
    return planes if len(planes) < bits.nbytes else bits.tobytes()


def decode_patch(
    encoded: memoryview | bytes, dtype: str, count: int, tensor: str, base: BitArray | None
) -> WeightPatch:
    """Decode one patch to absolute values. Arrays may share memory with ``encoded``.

    ``dtype``: the published one. ``count``: elements of the unit, known beforehand. ``base``: what the receiver holds
    of it (uint16 or uint32 [count]); None reads complete patches only. ``tensor`` names the tensor in errors.
    Raises ``WeightError`` for anything that ``encode_patch`` does not write."""
    view = memoryview(encoded)
    bits = bit_type(dtype, tensor)
    if len(view) == count * bits.itemsize:
        return WeightPatch(None, cast("BitArray", np.frombuffer(view, dtype=bits)))
    header, body = _read_header(view, tensor)
    if header.elements != count:
        raise WeightError(f"patch of {tensor!r} is of {header.elements} elements; expected a unit of {count}")
    if not header.classes:
        return WeightPatch(None, join_planes(body, bits, count, tensor))
    if base is None:
        raise WeightError(f"patch of {tensor!r} is a delta, and nothing is held that it could be applied to")
    if base.size != count or base.dtype.itemsize != bits.itemsize:
        raise WeightError(f"patch of {tensor!r} has {count} elements; its base has {base.size} of {base.dtype}")
    base = kernels.frozen(base)
    classes = classes_of(base, dtype)
    changes = _read_classes(header, body, classes.sizes.tolist(), dtype, tensor)
    starts = np.zeros(classes.sizes.size + 1, dtype=np.int64)
    for change in changes:
        starts[change.index + 1] = change.gaps.size
    starts = np.cumsum(starts)
    gaps, steps = (np.concatenate([getattr(change, part) for change in changes]) for part in ("gaps", "steps"))
    positions = np.empty(gaps.size, dtype=np.int64)
    sources = np.empty(gaps.size, dtype=np.int64)
    lowest, _ = exponent_field(dtype)
    kernels.places_of(base, lowest, classes.class_at, starts, gaps, positions, sources)
    return WeightPatch(positions, apply_steps(base[positions], steps[sources]))


def _frame(header: _Header, *body: bytes) -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return b"".join((_LENGTH.pack(len(encoded)), encoded, *body))


_decoder = msgspec.msgpack.Decoder(_Header)


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


def _read_classes(header: _Header, body: memoryview, sizes: list[int], dtype: str, tensor: str) -> list[ClassChanges]:
    """The streams of all classes; every size is checked against the header and the base before it is used."""
    indices = [index for index, *_ in header.classes]
    lengths = sum(gap_bytes + step_bytes for *_, gap_bytes, step_bytes in header.classes)
    rising = all(low < high for low, high in pairwise((-1, *indices, len(sizes))))
    if not rising or min(min(entry[1:]) for entry in header.classes) < 0 or lengths != len(body):
        raise WeightError(
            f"patch of {tensor!r} has {len(body)} bytes in classes {indices}; its classes add up to {lengths}, and its "
            f"base has {len(sizes)}"
        )
    changes = []
    start = 0
    bits = bit_type(dtype, tensor)
    for index, count, gap_bytes, step_bytes in header.classes:
        if not 0 < count <= sizes[index]:
            raise _beyond_class(tensor, count, sizes[index])
        middle = start + gap_bytes
        stop = start + gap_bytes + step_bytes
        gaps = cast("GapArray", decode_symbols(body[start:middle], np.dtype("<u4"), count, tensor))
        reached = int(gaps.sum(dtype=np.uint64)) + count
        if reached > sizes[index]:
            raise _beyond_class(tensor, reached, sizes[index])
        steps = decode_symbols(body[middle:stop], bits, count, tensor)
        if steps.max() == (1 << (8 * bits.itemsize)) - 1:
            raise WeightError(f"patch of {tensor!r} lists an element that does not change")
        changes.append(ClassChanges(index, gaps, steps))
        start = stop
    return changes


def _beyond_class(tensor: str, changes: int, size: int) -> WeightError:
    return WeightError(
        f"patch of {tensor!r} changes what {changes} members of a class take, and there are {size}: it has another base"
    )
