"""Exact codec of one ``WeightPatch``: the changed elements of a work unit, or all of its elements. A work unit is a
run of elements of one dtype, of one or several shards of a rank, and is encoded by itself (``manifest.work_units``).

The publisher encodes in the trainer rank's process, ``pull.decoding`` decodes in vLLM's worker processes. A patch has
one of three forms:

=========  ==================================================================================================
form       bytes
=========  ==================================================================================================
delta      header, then for each class of the *base*: the gaps between changes, then the move of each change
complete   header without classes, then all elements: their exponents (zstd), then their other bits
dense      the bits of all elements, without a header
=========  ==================================================================================================

A patch with exactly the size of the dense form is dense; the other forms are smaller.

Whether an optimizer step changes a published element depends on the size of the step relative to the spacing of the
numbers around the element, hence on its exponent. So every exponent of the base, which the receiver holds too, is a
class. Positions are counted within a class and take half the bytes of positions counted over all elements. Exponents
with fewer than ``_FEW_MEMBERS`` elements share class 0. Changes are coded as moves between neighbouring numbers
(``bits.move_symbols``).

A header is its length (uint16, little endian), then msgpack. An anchor takes the smaller of the last two forms, a delta
the smallest of all three. The decoder refuses bytes that the encoder would not have written, and checks each size
before it allocates memory for it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import cast

import numpy as np
from msgspec import Struct, msgpack
from numpy.typing import NDArray

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.weights.codec import kernels
from streamrl.weights.codec.bits import (
    BitArray,
    PositionArray,
    apply_moves,
    bit_type,
    exponent_field,
    exponents_of,
    move_symbols,
)
from streamrl.weights.codec.planes import join_planes, split_planes
from streamrl.weights.codec.symbols import decode_symbols, encode_symbols

MAXIMUM_ELEMENTS = 2**31 - 1
"""Largest number of elements of a patch. ``manifest.work_units`` makes units that are smaller."""

_LAYOUT_VERSION = 4
_LENGTH = struct.Struct("<H")
_HEADER_LIMIT = 1 << 13  # bytes
_FEW_MEMBERS = 64

CountArray = NDArray[np.int64]
GapArray = NDArray[np.uint32]


class WeightPatch(Struct, frozen=True, eq=False):
    """Changes of one shard or work unit, decoded. ``positions``: int64 [n] from its first element on, strictly
    increasing, or None for all elements. ``values``: new bit patterns, uint16 or uint32 [n]."""

    positions: PositionArray | None
    values: BitArray


class EncodedPatch(Struct, frozen=True, eq=False):
    """A patch and its bytes. The publisher updates its baseline and state hash by ``patch``, which has copies of the
    changed elements only, also where ``encoded`` has all elements because the complete form was smaller."""

    patch: WeightPatch
    encoded: bytes


class ExponentClasses(Struct, frozen=True, eq=False):
    """The classes of a base. ``class_at``: class of each exponent, uint16 [exponents]. ``sizes``: number of elements of
    each class, int64 [classes]."""

    class_at: NDArray[np.uint16]
    sizes: CountArray

    @classmethod
    def from_counts(cls, counts: CountArray) -> ExponentClasses:
        """Make the classes of a base. ``counts``: number of elements by exponent, int64 [exponents]."""
        common = counts >= _FEW_MEMBERS
        class_at = np.where(common, np.cumsum(common), 0).astype(np.uint16)
        return cls(class_at, np.concatenate(([counts[~common].sum()], counts[common])))


class ClassChanges(Struct, frozen=True, eq=False):
    """The changes of one class, by rising position. ``index``: number of the class. ``gaps``: uint32 [n], unchanged
    elements of the class between a change and the change before it. ``moves``: uint16 or uint32 [n], see
    ``bits.move_symbols``."""

    index: int
    gaps: GapArray
    moves: BitArray


class Changes(Struct, frozen=True, eq=False):
    """Differences from a base. ``positions``: int64 [n], increasing. ``values``: new patterns at the positions.
    ``by_class``: all changes once more, by class."""

    positions: PositionArray
    values: BitArray
    by_class: list[ClassChanges]


class _Header(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Header of a patch. ``classes``: index, number of changes, bytes of gaps and bytes of moves of each class with
    changes; empty in the complete form."""

    layout: int
    elements: int
    classes: tuple[tuple[int, int, int, int], ...] = ()


def encode_patch(bits: BitArray, base: BitArray | None, dtype: str) -> EncodedPatch | None:
    """Encode the differences of ``bits`` from ``base``, or all of ``bits`` when ``base`` is None. Returns None when
    nothing differs.

    ``bits``, ``base``: uint16 or uint32 [n], contiguous or strided. ``dtype``: published dtype of the patterns. Raises
    ``WeightError`` for more than ``MAXIMUM_ELEMENTS``."""
    if bits.size > MAXIMUM_ELEMENTS:
        raise WeightError(f"a patch of {bits.size} elements was asked for; {MAXIMUM_ELEMENTS} fit: split the shard")
    if base is None:
        return EncodedPatch(WeightPatch(None, bits.copy()), encode_complete(bits))
    base = kernels.frozen(base)
    bits = kernels.frozen(bits)
    positions = np.flatnonzero(base != bits).astype(np.int64, copy=False)
    if not positions.size:
        return None
    lowest, _ = exponent_field(dtype)  # lowest bit of the exponent
    classes = classes_of(base, dtype)
    gaps = np.empty(positions.size, dtype=np.uint32)
    kernels.gaps_between(base, lowest, classes.class_at, classes.sizes.size, positions, gaps)
    old = base[positions]
    values = bits[positions]
    changed_classes = classes.class_at[exponents_of(old, dtype)]
    changes = Changes(positions, values, by_class(changed_classes, gaps, move_symbols(old, values)))
    return encode_changes(changes, bits.size, lambda: bits)


def unencoded_patch(bits: BitArray, base: BitArray) -> EncodedPatch | None:
    """Return the differences of ``bits`` from ``base`` without their bytes, for receivers that read the bits from
    memory. None when nothing differs."""
    positions = np.flatnonzero(base != bits).astype(np.int64, copy=False)
    if not positions.size:
        return None
    return EncodedPatch(WeightPatch(positions, bits[positions]), b"")


def classes_of(base: BitArray, dtype: str) -> ExponentClasses:
    """Return the classes of a base (uint16 or uint32 [n], contiguous)."""
    lowest, exponents = exponent_field(dtype)
    counts = np.zeros(exponents, dtype=np.int64)
    kernels.count_exponents(base, lowest, counts)
    return ExponentClasses.from_counts(counts)


def by_class(classes: NDArray[np.unsignedinteger], gaps: GapArray, moves: BitArray) -> list[ClassChanges]:
    """Group changes by class, each class by rising position. ``classes``, ``gaps``, ``moves``: class, gap and move of
    each change, all [n], by rising position."""
    order = np.argsort(classes, kind="stable")
    indices, counts = np.unique(classes, return_counts=True)
    gaps = gaps[order]
    moves = moves[order]
    edges = pairwise([0, *np.cumsum(counts).tolist()])
    return [
        ClassChanges(index, gaps[start:stop], moves[start:stop])
        for index, (start, stop) in zip(indices.tolist(), edges, strict=True)
    ]


def encode_changes(changes: Changes, elements: int, complete: Callable[[], BitArray]) -> EncodedPatch:
    """Encode the changes of a unit of ``elements``. ``complete``: returns all new bits; called only where they may be
    the smaller form."""
    classes = []
    streams: list[bytes] = []
    for change in changes.by_class:
        gaps = encode_symbols(change.gaps)
        moves = encode_symbols(change.moves)
        classes.append((change.index, change.gaps.size, len(gaps), len(moves)))
        streams += [gaps, moves]
    encoded = _frame(_Header(_LAYOUT_VERSION, elements, tuple(classes)), *streams)
    patch = WeightPatch(changes.positions, changes.values)
    # The complete form copies half of the bits or more as they are, so a delta below half of the size is smaller.
    if 2 * len(encoded) > elements * changes.values.itemsize:
        all_elements = encode_complete(complete())
        if len(all_elements) <= len(encoded):
            return EncodedPatch(patch, all_elements)
    return EncodedPatch(patch, encoded)


def encode_complete(bits: BitArray) -> bytes:
    """Encode all elements, to be decoded without a base: the complete or the dense form, the smaller one."""
    planes = _frame(_Header(_LAYOUT_VERSION, bits.size), split_planes(bits))
    return planes if len(planes) < bits.nbytes else bits.tobytes()


def decode_patch(
    encoded: memoryview | bytes, dtype: str, count: int, tensor: str, base: BitArray | None
) -> WeightPatch:
    """Decode one patch to absolute values. Arrays may share memory with ``encoded``.

    ``dtype``: published dtype. ``count``: number of elements of the unit. ``tensor``: name of the unit in errors.
    ``base``: the receiver's bits of the unit (uint16 or uint32 [count]); None where only complete patches can be read.
    Raises ``WeightError`` for bytes that ``encode_patch`` does not write."""
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
    gaps = np.concatenate([change.gaps for change in changes])
    moves = np.concatenate([change.moves for change in changes])
    positions = np.empty(gaps.size, dtype=np.int64)
    sources = np.empty(gaps.size, dtype=np.int64)  # index in ``gaps`` and ``moves`` of each change
    lowest, _ = exponent_field(dtype)
    kernels.places_of(base, lowest, classes.class_at, starts, gaps, positions, sources)
    return WeightPatch(positions, apply_moves(base[positions], moves[sources]))


def _frame(header: _Header, *body: bytes) -> bytes:
    encoded = msgpack.encode(header)
    return b"".join((_LENGTH.pack(len(encoded)), encoded, *body))


_decoder = msgpack.Decoder(_Header)


def _read_header(view: memoryview, tensor: str) -> tuple[_Header, memoryview]:
    length = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else 0
    start = _LENGTH.size + length
    if not 0 < length <= _HEADER_LIMIT or len(view) < start:
        raise WeightError(f"patch of {tensor!r} has {len(view)} bytes and a header of {length}")
    try:
        header = _decoder.decode(view[_LENGTH.size : start])
    except UNDECODABLE as error:
        raise WeightError(f"patch of {tensor!r} has a header that cannot be read: {error}") from error
    if header.layout != _LAYOUT_VERSION or msgpack.encode(header) != view[_LENGTH.size : start]:
        raise WeightError(
            f"patch of {tensor!r} has layout {header.layout} or a header of another writer; this build reads "
            f"{_LAYOUT_VERSION}: run the same streamrl version on both sides"
        )
    return header, view[start:]


def _read_classes(header: _Header, body: memoryview, sizes: list[int], dtype: str, tensor: str) -> list[ClassChanges]:
    """Decode the streams of all classes. ``sizes``: number of elements of each class of the base. Every size is checked
    against the header and the base before it is used; raises ``WeightError``."""
    indices = [index for index, *_ in header.classes]
    lengths = sum(gap_bytes + move_bytes for *_, gap_bytes, move_bytes in header.classes)
    rising = all(low < high for low, high in pairwise((-1, *indices, len(sizes))))
    if not rising or min(min(entry[1:]) for entry in header.classes) < 0 or lengths != len(body):
        raise WeightError(
            f"patch of {tensor!r} has {len(body)} bytes in classes {indices}; its classes add up to {lengths}, and its "
            f"base has {len(sizes)}"
        )
    changes = []
    start = 0
    bits = bit_type(dtype, tensor)
    for index, count, gap_bytes, move_bytes in header.classes:
        if not 0 < count <= sizes[index]:
            raise _beyond_class(tensor, count, sizes[index])
        middle = start + gap_bytes
        stop = start + gap_bytes + move_bytes
        gaps = cast("GapArray", decode_symbols(body[start:middle], np.dtype("<u4"), count, tensor))
        members = int(gaps.sum(dtype=np.uint64)) + count
        if members > sizes[index]:
            raise _beyond_class(tensor, members, sizes[index])
        moves = decode_symbols(body[middle:stop], bits, count, tensor)
        if moves.max() == (1 << (8 * bits.itemsize)) - 1:  # the symbol with all bits set would be no change
            raise WeightError(f"patch of {tensor!r} lists an element that does not change")
        changes.append(ClassChanges(index, gaps, moves))
        start = stop
    return changes


def _beyond_class(tensor: str, members: int, size: int) -> WeightError:
    return WeightError(
        f"patch of {tensor!r} needs {members} elements in a class that has {size}: it was encoded against another base"
    )
