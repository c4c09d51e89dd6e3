"""The entropy stage of small units: gaps and steps of all classes in one stretch of adaptive arithmetic code.

No tables travel: both sides start with the same guesses and learn from what they have coded (binary range coder,
Martin 1979; frequencies by the estimator of Krichevsky and Trofimov, 1981). A class starts with what the one before it,
half as large in its weights, has taught. So a tensor of a few thousand elements costs next to its entropy, where the
tables of ``symbol_streams`` cost as much again; and classes in which nearly everything changes, or nothing, cost next
to nothing. Compiled by numba, without the GIL; ``plain_streams`` is the same without a compiler.

A gap is coded as in Golomb's code, with a divisor ``2**shift`` near the mean gap of its class, the quotient in unary. A
class ends where quotients have passed its last element, so nothing says how many changes there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numba  # type: ignore[import-untyped]
import numpy as np

from streamrl.weights.bit_patterns import BitArray, BitType
from streamrl.weights.codec.adaptive_contexts import (
    CONTEXTS,
    DIRECTION,
    DOUBT,
    INHERITED,
    INHERITED_STEPS,
    KNOWN,
    LARGEST_SHIFT,
    LEARNED,
    LEARNED_STEPS,
    MANTISSA,
    POWER,
    RATES,
    REMAINDER,
    SHIFT_FAR,
    SHIFT_LESS,
    SHIFT_SAME,
    STOP,
    CountArray,
    undecodable,
)
from streamrl.weights.codec.class_split import ClassStreams

_RATES = np.array(RATES, dtype=np.int64)


def encode_streams(streams: Sequence[ClassStreams], sizes: CountArray, limit: int) -> bytes | None:
    """Encode the changes of all classes. ``sizes``: elements of each class, int64 [classes]. None when it would take
    ``limit`` bytes or more."""
    counts = np.array([stream.gaps.size for stream in streams], dtype=np.int64)
    gaps = np.concatenate([stream.gaps for stream in streams])
    symbols = np.concatenate([stream.symbols for stream in streams]).astype(np.uint32, copy=False)
    written = np.empty(max(1, limit), dtype=np.uint8)
    length = _encode(sizes, counts, gaps, symbols, written, limit)
    return None if not 0 <= length < limit else written[:length].tobytes()


def decode_streams(encoded: memoryview, bit_dtype: BitType, sizes: CountArray, tensor: str) -> list[ClassStreams]:
    """The inverse. Raises ``WeightError`` for what ``encode_streams`` does not write."""
    body = np.frombuffer(encoded, dtype=np.uint8)
    starts = np.zeros(sizes.size + 1, dtype=np.int64)
    gaps, symbols = (np.empty(int(sizes.sum()), dtype=np.uint32) for _ in range(2))
    changed = _decode(body, sizes, 8 * bit_dtype.itemsize, starts, gaps, symbols)
    if changed <= 0:
        raise undecodable(tensor, len(encoded), changed)
    gaps, steps = gaps[:changed].copy(), cast("BitArray", symbols[:changed].astype(bit_dtype))
    return [ClassStreams(gaps[start:stop], steps[start:stop]) for start, stop in pairwise(starts.tolist())]


# What follows is typed by numba, at the first call: int64, but for arrays.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,call-overload,arg-type"

_compiled = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


@_compiled
def _encode(sizes, counts, gaps, symbols, written, limit):
    """Fill ``written``; returns how many bytes of it are the code, -1 where they are not fewer than ``limit``."""
    chances, seen, shift_chances, shift_seen = _first_guesses()
    low, span, at, expected, change = np.int64(0), np.int64(0xFFFFFFFF), np.int64(0), np.int64(0), np.int64(0)
    for kind in range(sizes.size):
        left = np.int64(sizes[kind])
        if not left:
            continue
        shift = _best_shift(left, counts[kind], expected)
        low, span, at = _encode_shift(low, span, at, written, shift_chances, shift_seen, shift - expected)
        expected = min(shift + 1, LARGEST_SHIFT)
        _inherit(chances, seen)
        direction = np.int64(0)
        for _ in range(counts[kind]):
            gap, symbol = np.int64(gaps[change]), np.int64(symbols[change])
            change += 1
            left -= gap + 1
            low, span, at = _encode_gap(low, span, at, written, chances, seen, shift, gap)
            low, span, at = _encode_symbol(low, span, at, written, chances, seen, symbol, direction)
            direction = symbol & 1
            if at >= limit:
                return -1
        stop = STOP + 2 * (shift > 0)
        first = stop
        while left > 0:
            low, span, at = _encode_bit(low, span, at, written, chances, seen, stop, 1)
            stop = first + 1
            left -= np.int64(1) << shift
            if at >= limit:
                return -1
    return _finish(low, at, written)


@_compiled
def _decode(body, sizes, width, starts, gaps, symbols):
    """Fill the last three; returns how many changes there are, and what is wrong as -1 or -2."""
    chances, seen, shift_chances, shift_seen = _first_guesses()
    code, at = np.int64(0), np.int64(0)
    for _ in range(4):
        code, at = (code << 8) | _byte(body, at), at + 1
    span, expected, change = np.int64(0xFFFFFFFF), np.int64(0), np.int64(0)
    for kind in range(sizes.size):
        left = np.int64(sizes[kind])
        starts[kind + 1] = change
        if not left:
            continue
        further, code, span, at = _decode_shift(body, code, span, at, shift_chances, shift_seen)
        shift = expected + further
        if shift < 0 or shift > LARGEST_SHIFT:
            return -1
        expected = min(shift + 1, LARGEST_SHIFT)
        _inherit(chances, seen)
        direction = np.int64(0)
        stop = STOP + 2 * (shift > 0)
        first, gap = stop, np.int64(0)
        while left > 0:
            bit, code, span, at = _decode_bit(body, code, span, at, chances, seen, stop)
            if bit:
                stop = first + 1
                gap += np.int64(1) << shift
                left -= np.int64(1) << shift
                continue
            rest, code, span, at = _decode_remainder(body, code, span, at, chances, seen, shift)
            symbol, code, span, at = _decode_symbol(body, code, span, at, chances, seen, direction, width)
            if rest >= left or symbol < 0:
                return -1
            direction = symbol & 1
            gaps[change], symbols[change] = gap + rest, symbol
            change += 1
            left -= rest + 1
            stop, gap = first, np.int64(0)
        starts[kind + 1] = change
    if body.size > at - 3 or (body.size and not body[body.size - 1]):
        return -2
    return change


@_compiled
def _first_guesses():
    """How likely each bit is a 0, in 1/65536, and how many events taught it; of a class, and of shifts."""
    chances, seen = np.full(CONTEXTS, 1 << 15), np.zeros(CONTEXTS, np.int64)
    seen[:POWER] = 3
    chances[STOP + 2 : STOP + 4] = 41000  # 1 - 1/e
    for level in range(LEARNED):
        share = np.exp(-(0.5 ** (level + 1)))
        chances[REMAINDER + level] = np.int64(65536 / (1 + share))
        seen[REMAINDER + level] = 20
    chances[POWER : POWER + 32] = 45000
    shift_chances, shift_seen = np.full(SHIFT_FAR + 2, 1 << 15), np.ones(SHIFT_FAR + 2, np.int64)
    shift_chances[SHIFT_FAR] = 45000
    return chances, seen, shift_chances, shift_seen


@_compiled
def _inherit(chances, seen):
    """The next class begins with what was learned so far, and is not sure of it. Its numbers lie twice as far apart, so
    its steps are half as many: what was learned of a power of two holds for the one below."""
    for i in range(POWER):
        seen[i] = min(seen[i], INHERITED)
    for power in range(31):
        if seen[POWER + power + 1]:
            _inherit_range(chances, seen, POWER + power, 1, 1)
            _inherit_range(chances, seen, MANTISSA + 8 * power, 8, 8)
        else:
            _inherit_range(chances, seen, POWER + power, 1, 0)
            _inherit_range(chances, seen, MANTISSA + 8 * power, 8, 0)


@_compiled
def _inherit_range(chances, seen, context, contexts, distance):
    """From ``distance`` further on; halfway back to no opinion, since rounding may make of half as many steps more."""
    for i in range(context, context + contexts):
        chances[i] = chances[i + distance] + ((32768 - chances[i + distance]) >> DOUBT)
        seen[i] = min(seen[i + distance], INHERITED_STEPS)


@_compiled
def _best_shift(elements, changes, expected):
    """The power of two next below the mean gap."""
    mean = elements // changes if changes else 2 * elements
    shift = np.int64(0)
    while mean >> (shift + 1):
        shift += 1
    if not changes:
        shift = max(shift, expected)
    return min(shift, LARGEST_SHIFT)


# ---- what is coded -------------------------------------------------------------------------------------


@_compiled
def _encode_shift(low, span, at, written, chances, seen, further):
    low, span, at = _encode_bit(low, span, at, written, chances, seen, SHIFT_SAME, np.int64(further != 0))
    if further:
        low, span, at = _encode_bit(low, span, at, written, chances, seen, SHIFT_LESS, np.int64(further < 0))
        for _ in range(abs(further) - 1):
            low, span, at = _encode_bit(low, span, at, written, chances, seen, SHIFT_FAR, 1)
        low, span, at = _encode_bit(low, span, at, written, chances, seen, SHIFT_FAR, 0)
    return low, span, at


@_compiled
def _decode_shift(body, code, span, at, chances, seen):
    bit, code, span, at = _decode_bit(body, code, span, at, chances, seen, SHIFT_SAME)
    if not bit:
        return np.int64(0), code, span, at
    less, code, span, at = _decode_bit(body, code, span, at, chances, seen, SHIFT_LESS)
    further = np.int64(1)
    while further <= LARGEST_SHIFT:
        bit, code, span, at = _decode_bit(body, code, span, at, chances, seen, SHIFT_FAR)
        if not bit:
            break
        further += 1
    return (-further if less else further), code, span, at


@_compiled
def _encode_gap(low, span, at, written, chances, seen, shift, gap):
    stop = STOP + 2 * (shift > 0)
    first = stop
    for _ in range(gap >> shift):
        low, span, at = _encode_bit(low, span, at, written, chances, seen, stop, 1)
        stop = first + 1
    low, span, at = _encode_bit(low, span, at, written, chances, seen, stop, 0)
    for level in range(min(shift, LEARNED)):
        bit = (gap >> (shift - 1 - level)) & 1
        low, span, at = _encode_bit(low, span, at, written, chances, seen, REMAINDER + level, bit)
    return _encode_fair(low, span, at, written, gap, shift - LEARNED)


@_compiled
def _decode_remainder(body, code, span, at, chances, seen, shift):
    rest = np.int64(0)
    for level in range(min(shift, LEARNED)):
        bit, code, span, at = _decode_bit(body, code, span, at, chances, seen, REMAINDER + level)
        rest = 2 * rest + bit
    return _decode_fair(body, code, span, at, rest, shift - LEARNED)


@_compiled
def _encode_symbol(low, span, at, written, chances, seen, symbol, direction):
    low, span, at = _encode_bit(low, span, at, written, chances, seen, DIRECTION + direction, symbol & 1)
    steps = (symbol >> 1) + 1
    power = np.int64(0)
    while steps >> (power + 1):
        low, span, at = _encode_bit(low, span, at, written, chances, seen, POWER + power, 1)
        power += 1
    low, span, at = _encode_bit(low, span, at, written, chances, seen, POWER + power, 0)
    place = np.int64(1)
    for level in range(min(power, LEARNED_STEPS)):
        bit = (steps >> (power - 1 - level)) & 1
        low, span, at = _encode_bit(low, span, at, written, chances, seen, MANTISSA + 8 * power + place, bit)
        place = 2 * place + bit
    return _encode_fair(low, span, at, written, steps, power - LEARNED_STEPS)


@_compiled
def _decode_symbol(body, code, span, at, chances, seen, direction, width):
    """The symbol; -1 for one that is too large, or says that nothing changes."""
    up, code, span, at = _decode_bit(body, code, span, at, chances, seen, DIRECTION + direction)
    power = np.int64(0)
    while power < width:
        bit, code, span, at = _decode_bit(body, code, span, at, chances, seen, POWER + power)
        if not bit:
            break
        power += 1
    if power >= width:
        return np.int64(-1), code, span, at
    steps, place = np.int64(1), np.int64(1)
    for _ in range(min(power, LEARNED_STEPS)):
        bit, code, span, at = _decode_bit(body, code, span, at, chances, seen, MANTISSA + 8 * power + place)
        place, steps = 2 * place + bit, 2 * steps + bit
    steps, code, span, at = _decode_fair(body, code, span, at, steps, power - LEARNED_STEPS)
    symbol = 2 * (steps - 1) + up
    return (symbol if symbol < (np.int64(1) << width) - 1 else np.int64(-1)), code, span, at


# ---- the coder -----------------------------------------------------------------------------------------


# What is coded cannot be predicted, so there are no branches on it: ``chosen`` is all ones for a 1.


@_compiled
def _learn(chances, seen, context, chosen):
    chance, known = chances[context], seen[context]
    change = ((chance ^ (~chosen & (chance ^ (65536 - chance)))) * _RATES[known]) >> 16
    chances[context] = chance + ((change ^ chosen) - chosen)
    seen[context] = known + (known < KNOWN)


@_compiled
def _encode_bit(low, span, at, written, chances, seen, context, bit):
    bound, chosen = (span >> 16) * chances[context], -np.int64(bit)
    low += bound & chosen
    span = bound + ((span - 2 * bound) & chosen)
    _learn(chances, seen, context, chosen)
    return _put(low, span, at, written)


@_compiled
def _decode_bit(body, code, span, at, chances, seen, context):
    bound = (span >> 16) * chances[context]
    bit = np.int64(code >= bound)
    code -= bound & -bit
    span = bound + ((span - 2 * bound) & -bit)
    _learn(chances, seen, context, -bit)
    while span < 1 << 24:
        code, span, at = (code << 8) | _byte(body, at), span << 8, at + 1
    return bit, code, span, at


@_compiled
def _encode_fair(low, span, at, written, number, bits):
    """The lowest ``bits`` bits, each as likely 0 as 1."""
    while bits > 0:
        some = min(bits, 8)
        bits -= some
        span >>= some
        low += span * ((number >> bits) & ((1 << some) - 1))
        low, span, at = _put(low, span, at, written)
    return low, span, at


@_compiled
def _decode_fair(body, code, span, at, number, bits):
    while bits > 0:
        some = min(bits, 8)
        bits -= some
        span >>= some
        digit = min(code // span, (1 << some) - 1)
        code -= digit * span
        number = (number << some) | digit
        while span < 1 << 24:
            code, span, at = (code << 8) | _byte(body, at), span << 8, at + 1
    return number, code, span, at


@_compiled
def _put(low, span, at, written):
    """Write the bytes that are settled, but for a carry. What finds no place is counted, and the code is given up."""
    if low >> 32:
        low &= 0xFFFFFFFF
        _carry(at, written)
    while span < 1 << 24:
        if at < written.size:
            written[at] = low >> 24
        low, span, at = (low << 8) & 0xFFFFFFFF, span << 8, at + 1
    return low, span, at


@_compiled
def _carry(at, written):
    if at <= written.size:
        while written[at - 1] == 255:
            written[at - 1] = 0
            at -= 1
        written[at - 1] += 1


@_compiled
def _finish(low, at, written):
    """One more byte says enough; zeros at the end are left out."""
    last = (low + 0xFFFFFF) >> 24
    if last >> 8:
        _carry(at, written)
    written[at] = last & 255
    at += 1
    while at and not written[at - 1]:
        at -= 1
    return at


@_compiled
def _byte(body, at):
    return np.int64(body[at]) if at < body.size else np.int64(0)
