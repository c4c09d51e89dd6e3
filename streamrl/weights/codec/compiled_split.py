"""``class_split`` in one pass, compiled by numba: what large shards use. Same arguments, same results, without the GIL.

Elements are taken in blocks. Counting the classes of a block takes a few vector instructions a threshold on the upper
bytes of its patterns, and a change a few more on masks of 64 elements (``bit_masks``); single elements are walked along
in blocks full of changes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from streamrl.weights.bit_patterns import BitArray, PositionArray
from streamrl.weights.codec.bit_masks import LANES, differing, lowest_one, ones, place_of, within
from streamrl.weights.codec.class_split import SAMPLE_BLOCK, ClassStreams, Split, Thresholds, beyond_class
from streamrl.weights.codec.exponent_classes import THRESHOLD_BITS

_BLOCK = SAMPLE_BLOCK
_CROWDED = 24  # changes in a block from which walking along it is quicker
_GROUPS = _BLOCK // LANES
_ONE = np.uint64(1)
_FEW, _LEAST_ROOM = 64, 1 << 10  # one out of 64 elements is thought to change: fresh memory costs as much as a change
_AT_ONCE = 4  # places of a group that are written down without asking how many there are
_BEFORE = np.array(
    [[(1 << max(0, min(LANES, place - LANES * group))) - 1 for group in range(_GROUPS)] for place in range(_BLOCK)],
    dtype=np.uint64,
)
"""For each place in a block: a mask of the places before it."""


def split_changes(base: BitArray, new: BitArray, thresholds: Thresholds) -> Split:
    """See ``class_split.split_changes``. The arrays must be contiguous."""
    kinds, width = thresholds.size + 1, base.dtype
    classes, totals = _classes(base, thresholds), np.zeros(kinds, dtype=np.int64)
    seen, last = np.zeros(kinds, dtype=np.int64), np.full(kinds, -1, dtype=np.int64)
    room = min(base.size, max(base.size // _FEW, _LEAST_ROOM)) + _BLOCK
    found = [np.empty(room, dtype=dtype) for dtype in (np.int64, width, np.uint32, width, np.uint8)]
    reached, changed = _split(base, new, *classes, 0, 0, seen, last, totals, *found)
    while reached < base.size:
        found = [np.concatenate((part[:changed], np.empty(room, dtype=part.dtype))) for part in found]
        room *= 2
        reached, changed = _split(base, new, *classes, reached, changed, seen, last, totals, *found)
    positions, values, gaps, symbols, by_place = (part[:changed] for part in found)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(totals)))
    by_class = np.empty(changed, dtype=np.uint32), np.empty(changed, dtype=width)
    _gather(by_place, gaps, symbols, starts[:-1].copy(), *by_class)
    streams = [ClassStreams(by_class[0][start:stop], by_class[1][start:stop]) for start, stop in pairwise(starts)]
    seen[0] -= -base.size % _BLOCK  # zeros that filled up the last block
    return Split(positions, values, streams, seen)


def class_sizes(base: BitArray, thresholds: Thresholds) -> npt.NDArray[np.int64]:
    """Elements of each class, int64 [classes]. ``base`` must be contiguous."""
    sizes = np.zeros(thresholds.size + 1, dtype=np.int64)
    _size_classes(base, *_classes(base, thresholds), sizes)
    return sizes


def sample_changes(base: BitArray, new: BitArray, every: int) -> tuple[int, int, int]:
    """See ``class_split.sample_changes``."""
    _, mask, shift = _classes(base, np.zeros(0, dtype=np.uint32))
    highest, highest_changing, changes = _sample_changes(base, new, mask, shift, every)
    return int(highest), int(highest_changing), int(changes)


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
def _split(base, new, limits, mask, shift, begin, changed, seen, last, totals, positions, values, gaps, symbols, kinds):
    """Go on at element ``begin`` with ``changed`` changes. Fill the last five in the order of positions, and by class
    ``totals``, ``seen`` and ``last``. Returns where there was no room for one more block, and the changes so far."""
    kind_at, lowest, span = _class_table(limits)
    counts = np.zeros(span.size, np.int64)
    spare_base, spare_new = np.empty(_BLOCK, base.dtype), np.empty(_BLOCK, base.dtype)
    upper, differs = np.empty(_BLOCK, np.uint8), np.empty(_GROUPS, np.uint64)
    places = np.empty(_BLOCK + LANES, np.int64)
    for start in range(begin, base.size, _BLOCK):
        if changed + _BLOCK > positions.size:
            return start, changed
        old, now = _block_at(base, start, spare_base), _block_at(new, start, spare_new)
        _take_upper(old, mask, shift, upper)
        for group in range(_GROUPS):
            differs[group] = differing(old, now, group * LANES)
        found = _list_places(differs, places)
        crowded = found > _CROWDED
        if crowded:
            _rank_changes(upper, differs, kind_at, counts, gaps[changed:])
        else:
            _count_classes(upper, limits, counts)
        for at in range(found):
            i = places[at]
            kind = kind_at[upper[i]]
            rank = np.int64(gaps[changed]) if crowded else _rank_member(upper, i, lowest[kind], span[kind])
            rank += seen[kind]
            gaps[changed] = rank - last[kind] - 1
            last[kind] = rank
            positions[changed], values[changed], kinds[changed] = start + i, now[i], kind
            symbols[changed] = _step_symbol(old[i], now[i], mask)
            totals[kind] += 1
            changed += 1
        seen += counts
    return base.size, changed


@_compiled
def _sample_changes(base, new, mask, shift, every):
    highest, highest_changing, changes = np.int64(0), np.int64(-1), np.int64(0)
    for start in range(0, base.size, every * _BLOCK):
        for i in range(start, min(start + _BLOCK, base.size)):
            upper = np.int64((base[i] & mask) >> shift)
            highest = max(highest, upper)
            if base[i] != new[i]:
                highest_changing = max(highest_changing, upper)
                changes += 1
    return highest, highest_changing, changes


@_compiled
def _size_classes(base, limits, mask, shift, sizes):
    counts, spare, upper = np.zeros(sizes.size, np.int64), np.empty(_BLOCK, base.dtype), np.empty(_BLOCK, np.uint8)
    for start in range(0, base.size, _BLOCK):
        _take_upper(_block_at(base, start, spare), mask, shift, upper)
        _count_classes(upper, limits, counts)
        sizes += counts
    sizes[0] -= -base.size % _BLOCK  # zeros that filled up the last block


@_compiled
def _rank_changes(upper, differs, kind_at, counts, ranks):
    """Count the classes, and the members of its class before each change: element by element."""
    counts[:] = 0
    found = 0
    for i in range(_BLOCK):
        kind = kind_at[upper[i]]
        if differs[i // LANES] >> np.uint64(i % LANES) & _ONE:
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
    places, sources = np.empty(_BLOCK + LANES, np.int64), np.empty(_BLOCK, np.int64)
    spare, upper = np.empty(_BLOCK, base.dtype), np.empty(_BLOCK, np.uint8)
    differs = np.empty(_GROUPS, np.uint64)
    following, ranks = starts[:-1].copy(), np.full(span.size, -1)
    for kind in range(span.size):
        _advance(kind, following, ranks, starts, gaps)
    done = found = 0
    for start in range(0, base.size, _BLOCK):
        old = _block_at(base, start, spare)
        _take_upper(old, mask, shift, upper)
        differs[:] = 0
        if found > _CROWDED // 2:  # this one too, most likely
            for i in range(_BLOCK):
                kind = kind_at[upper[i]]
                if ranks[kind] == seen[kind]:
                    differs[i // LANES] |= _ONE << np.uint64(i % LANES)
                    sources[i] = following[kind]
                    following[kind] += 1
                    _advance(kind, following, ranks, starts, gaps)
                seen[kind] += 1
        else:
            _count_classes(upper, limits, counts)
            for kind in range(span.size):
                while ranks[kind] < seen[kind] + counts[kind]:
                    i = _find_member(upper, ranks[kind] - seen[kind], lowest[kind], span[kind])
                    differs[i // LANES] |= _ONE << np.uint64(i % LANES)
                    sources[i] = following[kind]
                    following[kind] += 1
                    _advance(kind, following, ranks, starts, gaps)
            seen += counts
        found = _list_places(differs, places)
        if found and start + places[found - 1] >= base.size:
            return -1
        for at in range(found):
            i = places[at]
            positions[done], values[done] = start + i, _apply_step(old[i], symbols[sources[i]], mask)
            done += 1
    return done


@_compiled
def _list_places(differs, places):
    """Write down which bits are set, without a branch where they are few; returns how many."""
    found = 0
    for group in range(_GROUPS):
        word = differs[group]
        count = ones(word)
        for at in range(_AT_ONCE):
            places[found + at] = group * LANES + lowest_one(word)
            word &= word - _ONE
        for at in range(_AT_ONCE, count):
            places[found + at] = group * LANES + lowest_one(word)
            word &= word - _ONE
        found += count
    return found


@_compiled
def _advance(kind, following, ranks, starts, gaps):
    """The rank of the next change of a class; beyond all elements when there is none."""
    if following[kind] < starts[kind + 1]:
        ranks[kind] += np.int64(gaps[following[kind]]) + 1
    else:
        ranks[kind] = np.int64(1) << 62


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
def _count_classes(upper, limits, counts):
    """Elements of each class among the 256 of a block."""
    reached = np.int64(_BLOCK)
    for kind in range(limits.size):
        limit = limits[kind]
        above = np.int64(0)
        for start in range(0, _BLOCK, LANES):
            part = upper[start : start + LANES]
            found = np.uint8(0)
            for i in range(LANES):
                found = np.uint8(found + np.uint8(part[i] >= limit))
            above += np.int64(found)
        counts[kind] = reached - above
        reached = above
    counts[limits.size] = reached


@_compiled
def _rank_member(upper, place, lowest, span):
    """How many members of a class lie before ``place``."""
    rank = np.int64(0)
    for group in range(_GROUPS):
        rank += ones(within(upper, group * LANES, lowest, span) & _BEFORE[place, group])
    return rank


@_compiled
def _find_member(upper, rank, lowest, span):
    """The place of member number ``rank`` of a class, which the block has."""
    start = np.int64(0)
    members = within(upper, 0, lowest, span)
    for group in range(1, _GROUPS):
        found, further = ones(members), within(upper, group * LANES, lowest, span)
        passed = rank >= found  # and so it was for the groups before
        start += LANES * passed
        rank -= found * passed
        members = further if passed else members
    return start + place_of(members, rank)


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
