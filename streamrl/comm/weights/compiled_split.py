"""``class_split`` in one pass, compiled by numba: what large shards use. Same arguments, same results, without the GIL.

Elements are taken in blocks. Counting the classes of a block takes a few vector instructions a threshold on the upper
bytes of its patterns, and a change a few more; single elements are walked along in blocks full of changes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from streamrl.comm.weights.bit_patterns import BitArray, PositionArray
from streamrl.comm.weights.class_split import ClassStreams, Split, Thresholds, beyond_class
from streamrl.comm.weights.exponent_classes import THRESHOLD_BITS

_BLOCK = 256
_CROWDED = 24  # changes in a block from which walking along it is quicker
_LANES = 64  # bytes that are counted together, in a byte
_ONES = np.uint64(0x0101010101010101)  # times a word of eight flags: their sum, in its top byte
_TOP_BYTE = np.uint64(56)


def split_changes(base: BitArray, new: BitArray, thresholds: Thresholds) -> Split:
    """See ``class_split.split_changes``. The arrays must be contiguous."""
    positions = np.empty(base.size, dtype=np.int64)  # pages that nothing is written to take no memory
    values = np.empty(base.size, dtype=base.dtype)
    gaps, symbols = np.empty(base.size, dtype=np.uint32), np.empty(base.size, dtype=base.dtype)
    kinds = np.empty(base.size, dtype=np.uint8)
    starts = np.zeros(thresholds.size + 2, dtype=np.int64)
    found = (positions, values, gaps, symbols, kinds)
    changed = _split(base, new, *_classes(base, thresholds), starts[1:], *found)
    np.cumsum(starts, out=starts)
    by_class = np.empty(changed, dtype=np.uint32), np.empty(changed, dtype=base.dtype)
    _gather(kinds[:changed], gaps, symbols, starts[:-1].copy(), *by_class)
    streams = [ClassStreams(by_class[0][start:stop], by_class[1][start:stop]) for start, stop in pairwise(starts)]
    return Split(positions[:changed].copy(), values[:changed].copy(), streams)


def join_changes(
    base: BitArray, thresholds: Thresholds, streams: Sequence[ClassStreams], tensor: str
) -> tuple[PositionArray, BitArray]:
    """See ``class_split.join_changes``. ``base`` must be contiguous."""
    starts = np.zeros(len(streams) + 1, dtype=np.int64)
    np.cumsum([stream.gaps.size for stream in streams], out=starts[1:])
    gaps = np.concatenate([stream.gaps for stream in streams])
    symbols = np.concatenate([stream.symbols for stream in streams])
    positions = np.empty(gaps.size, dtype=np.int64)
    values = np.empty(gaps.size, dtype=base.dtype)
    if _join(base, *_classes(base, thresholds), starts, gaps, symbols, positions, values) != gaps.size:
        raise beyond_class(tensor)
    return positions, values


def _classes(base: BitArray, thresholds: Thresholds) -> tuple[npt.NDArray[np.uint8], Any, int]:
    """The thresholds as upper bytes (``THRESHOLD_BITS`` is 8), the mask of a magnitude, where that byte starts."""
    width = 8 * base.dtype.itemsize
    shift = width - 1 - THRESHOLD_BITS
    return (thresholds >> shift).astype(np.uint8), base.dtype.type((1 << (width - 1)) - 1), shift


# What follows is typed by numba, at the first call. Patterns are uint16 or uint32, what counts is int64.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

_compiled = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


@_compiled
def _split(base, new, limits, mask, shift, totals, positions, values, gaps, symbols, kinds):
    """Fill the last five in the order of positions, ``totals`` by class; returns how many elements differ."""
    kind_at, lowest, span = _class_table(limits)
    counts, seen, last = np.zeros(span.size, np.int64), np.zeros(span.size, np.int64), np.full(span.size, -1)
    spare_base, spare_new = np.empty(_BLOCK, base.dtype), np.empty(_BLOCK, base.dtype)
    upper, flags, places = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK + 8, np.int64)
    words = flags.view(np.uint64)
    window = np.zeros(2 * _BLOCK, np.uint8)
    window[:_BLOCK] = 1
    changed = 0
    for start in range(0, base.size, _BLOCK):
        old, now = _block_at(base, start, spare_base), _block_at(new, start, spare_new)
        _take_upper(old, mask, shift, upper)
        found = _find_changes(old, now, flags, words, places)
        crowded = found > _CROWDED
        if crowded:
            _rank_changes(upper, flags, kind_at, counts, gaps[changed:])
        else:
            _count_classes(upper, limits, counts)
        for at in range(found):
            i = places[at]
            kind = kind_at[upper[i]]
            if crowded:
                rank = seen[kind] + gaps[changed]
            else:
                before = window[_BLOCK - i : 2 * _BLOCK - i]
                rank = seen[kind] + _count_members(upper, before, lowest[kind], span[kind])
            gaps[changed] = rank - last[kind] - 1
            last[kind] = rank
            positions[changed], values[changed], kinds[changed] = start + i, now[i], kind
            symbols[changed] = _step_symbol(old[i], now[i], mask)
            totals[kind] += 1
            changed += 1
        seen += counts
    return changed


@_compiled
def _rank_changes(upper, flags, kind_at, counts, ranks):
    """Count the classes, and the members of its class before each flagged element: element by element."""
    counts[:] = 0
    found = 0
    for i in range(_BLOCK):
        kind = kind_at[upper[i]]
        if flags[i]:
            ranks[found] = counts[kind]
            found += 1
        counts[kind] += 1


@_compiled
def _gather(kinds, gaps, symbols, starts, class_gaps, class_symbols):
    """Order by class; ``starts`` ends up where the next class starts."""
    for i in range(kinds.size):
        place = starts[kinds[i]]
        starts[kinds[i]] = place + 1
        class_gaps[place], class_symbols[place] = gaps[i], symbols[i]


@_compiled
def _join(base, limits, mask, shift, starts, gaps, symbols, positions, values):
    """Fill the last two; returns how many changes were found a place for."""
    kind_at, lowest, span = _class_table(limits)
    counts, seen = np.zeros(span.size, np.int64), np.zeros(span.size, np.int64)
    places, sources = np.empty(_BLOCK, np.int64), np.empty(_BLOCK, np.int64)
    spare, upper, flags = np.empty(_BLOCK, base.dtype), np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8)
    words = flags.view(np.uint64)
    following, ranks = starts[:-1].copy(), np.full(span.size, -1)
    for kind in range(span.size):
        _advance(kind, following, ranks, starts, gaps)
    done = found = 0
    for start in range(0, base.size, _BLOCK):
        old = _block_at(base, start, spare)
        _take_upper(old, mask, shift, upper)
        crowded = found > _CROWDED // 2  # most likely, where the block before was
        found = 0
        if crowded:
            for i in range(_BLOCK):
                kind = kind_at[upper[i]]
                if ranks[kind] == seen[kind]:
                    places[found], sources[found] = i, following[kind]
                    found += 1
                    following[kind] += 1
                    _advance(kind, following, ranks, starts, gaps)
                seen[kind] += 1
        else:
            _count_classes(upper, limits, counts)
            for kind in range(span.size):
                while ranks[kind] < seen[kind] + counts[kind]:
                    place = _find_member(upper, ranks[kind] - seen[kind], lowest[kind], span[kind], flags, words)
                    found = _insert(places, sources, found, place, following[kind])
                    following[kind] += 1
                    _advance(kind, following, ranks, starts, gaps)
            seen += counts
        if found and start + places[found - 1] >= base.size:
            return -1
        for i in range(found):
            positions[done] = start + places[i]
            values[done] = _apply_step(old[places[i]], symbols[sources[i]], mask)
            done += 1
    return done


@_compiled
def _advance(kind, following, ranks, starts, gaps):
    """The rank of the next change of a class; beyond all elements when there is none."""
    if following[kind] < starts[kind + 1]:
        ranks[kind] += np.int64(gaps[following[kind]]) + 1
    else:
        ranks[kind] = np.int64(1) << 62


@_compiled
def _insert(places, sources, found, place, source):
    """Keep the changes of a block in order; classes come one after another."""
    at = found
    while at and places[at - 1] > place:
        places[at], sources[at] = places[at - 1], sources[at - 1]
        at -= 1
    places[at], sources[at] = place, source
    return found + 1


@_compiled
def _class_table(limits):
    """The class of each upper byte; the lowest upper byte of each class, and how far above it the class ends."""
    kind_at = np.zeros(256, np.uint8)
    lowest, span = np.zeros(limits.size + 1, np.uint8), np.zeros(limits.size + 1, np.uint8)
    kind = 0
    for byte in range(256):
        if kind < limits.size and byte == limits[kind]:
            kind += 1
            lowest[kind] = byte
        kind_at[byte] = kind
        span[kind] = byte - lowest[kind]
    return kind_at, lowest, span


@_compiled
def _take_upper(block, mask, shift, upper):
    """The upper bytes of the magnitudes of a block: all that its classes depend on."""
    for i in range(_BLOCK):
        upper[i] = np.uint8((block[i] & mask) >> shift)


@_compiled
def _block_at(array, start, spare):
    """256 elements from ``start`` on; where fewer are left, a copy that ends in zeros."""
    if start + _BLOCK <= array.size:
        return array[start : start + _BLOCK]
    spare[:] = 0
    spare[: array.size - start] = array[start:]
    return spare


@_compiled
def _find_changes(old, now, flags, words, places):
    """The places in a block where the patterns differ; returns how many. ``words``: the memory of ``flags``."""
    for i in range(_BLOCK):
        flags[i] = old[i] != now[i]
    found = 0
    for word in range(_BLOCK // 8):
        if words[word]:
            for i in range(8 * word, 8 * word + 8):
                places[found] = i
                found += flags[i]
    return found


@_compiled
def _count_classes(upper, limits, counts):
    """Elements of each class among the 256 of a block."""
    reached = np.int64(_BLOCK)
    for kind in range(limits.size):
        limit = limits[kind]
        above = np.int64(0)
        for start in range(0, _BLOCK, _LANES):
            part = upper[start : start + _LANES]
            found = np.uint8(0)
            for i in range(_LANES):
                found = np.uint8(found + np.uint8(part[i] >= limit))
            above += np.int64(found)
        counts[kind] = reached - above
        reached = above
    counts[limits.size] = reached


@_compiled
def _count_members(upper, chosen, lowest, span):
    """How many of the elements where ``chosen`` is 1 are at most ``span`` above ``lowest``."""
    members = np.int64(0)
    for start in range(0, _BLOCK, _LANES):
        part, wanted = upper[start : start + _LANES], chosen[start : start + _LANES]
        found = np.uint8(0)
        for i in range(_LANES):
            found = np.uint8(found + (np.uint8(np.uint8(part[i] - lowest) <= span) & wanted[i]))
        members += np.int64(found)
    return members


@_compiled
def _find_member(upper, rank, lowest, span, flags, words):
    """The place of member number ``rank`` of a class, which the block has."""
    for i in range(_BLOCK):
        flags[i] = np.uint8(upper[i] - lowest) <= span
    word = 0
    while True:
        found = np.int64((words[word] * _ONES) >> _TOP_BYTE)
        if rank < found:
            break
        rank -= found
        word += 1
    place = 8 * word
    for i in range(8 * word, 8 * word + 7):  # without a branch: how many places pass before the member
        rank -= flags[i]
        place += rank >= 0
    return place


@_compiled
def _flip(bits, turned, top):
    """Flip all bits where ``turned``, else the top one. Without a branch: signs cannot be predicted."""
    return bits ^ (top | (-np.int64(turned) & (2 * top - 1)))


@_compiled
def _ordered(bits, top):
    """See ``ordered_bits.to_ordered``."""
    return _flip(bits, (bits & top) != 0, top)


@_compiled
def _step_symbol(old, now, mask):
    """See ``ordered_bits.step_symbols``."""
    top = np.int64(mask) + 1
    steps = (_ordered(np.int64(now), top) - _ordered(np.int64(old), top)) & (2 * top - 1)
    steps = (steps ^ top) - top
    return ((steps << 1) ^ (steps >> 63)) - 1


@_compiled
def _apply_step(old, symbol, mask):
    """See ``ordered_bits.apply_steps``."""
    top, zigzag = np.int64(mask) + 1, np.int64(symbol) + 1
    ordered = (_ordered(np.int64(old), top) + ((zigzag >> 1) ^ -(zigzag & 1))) & (2 * top - 1)
    return _flip(ordered, (ordered & top) == 0, top)
