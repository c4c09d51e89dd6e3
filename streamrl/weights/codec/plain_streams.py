"""``adaptive_streams`` without a compiler, byte for byte: what a process with a small model uses. Some 6 us a change.

What is coded, and by which guesses, is said there. One object holds the coder and what it has learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import cast

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

_FULL, _SHORT = 0xFFFFFFFF, 1 << 24


def encode_streams(streams: Sequence[ClassStreams], sizes: CountArray, limit: int) -> bytes | None:
    """See ``adaptive_streams.encode_streams``."""
    coder, expected = _Encoder(), 0
    for stream, size in zip(streams, sizes.tolist(), strict=True):
        if not size:
            continue
        shift = _best_shift(size, stream.gaps.size, expected)
        coder.shift(shift - expected)
        expected = min(shift + 1, LARGEST_SHIFT)
        coder.inherit()
        left, direction = size, 0
        for gap, symbol in zip(stream.gaps.tolist(), stream.symbols.tolist(), strict=True):
            left -= gap + 1
            coder.gap(gap, shift)
            coder.symbol(symbol, direction)
            direction = symbol & 1
            if len(coder.written) >= limit:
                return None
        stop = first = STOP + 2 * (shift > 0)
        while left > 0:
            coder.bit(stop, 1)
            stop = first + 1
            left -= 1 << shift
            if len(coder.written) >= limit:
                return None
    written = coder.finish()
    return written if len(written) < limit else None


def decode_streams(encoded: memoryview, bit_dtype: BitType, sizes: CountArray, tensor: str) -> list[ClassStreams]:
    """See ``adaptive_streams.decode_streams``."""
    body, width = bytes(encoded), 8 * bit_dtype.itemsize
    coder, expected, streams, changed = _Decoder(body), 0, [], 0
    for size in sizes.tolist():
        gaps: list[int] = []
        symbols: list[int] = []
        if size:
            shift = expected + coder.shift()
            if not 0 <= shift <= LARGEST_SHIFT:
                raise undecodable(tensor, len(body), -1)
            expected = min(shift + 1, LARGEST_SHIFT)
            coder.inherit()
            if not coder.changes(size, shift, width, gaps, symbols):
                raise undecodable(tensor, len(body), -1)
        changed += len(gaps)
        steps = cast("BitArray", np.array(symbols, dtype=bit_dtype))
        streams.append(ClassStreams(np.array(gaps, dtype=np.uint32), steps))
    if len(body) > coder.at - 3 or (body and not body[-1]):
        raise undecodable(tensor, len(body), -2)
    if not changed:
        raise undecodable(tensor, len(body), 0)
    return streams


def _best_shift(elements: int, changes: int, expected: int) -> int:
    mean = elements // changes if changes else 2 * elements
    shift = max(0, mean.bit_length() - 1)
    return min(shift if changes else max(shift, expected), LARGEST_SHIFT)


class _Guesses:
    """How likely each bit is a 0, in 1/65536, and how many events taught it; of a class, and of shifts after those."""

    def __init__(self) -> None:
        self.chances, self.seen = [1 << 15] * CONTEXTS, [0] * CONTEXTS
        self.seen[:POWER] = [3] * POWER
        self.chances[STOP + 2 : STOP + 4] = [41000] * 2  # 1 - 1/e
        for level in range(LEARNED):
            self.chances[REMAINDER + level] = int(65536 / (1 + exp(-(0.5 ** (level + 1)))))
            self.seen[REMAINDER + level] = 20
        self.chances[POWER : POWER + 32] = [45000] * 32
        self.chances += [1 << 15] * SHIFT_FAR + [45000, 1 << 15]
        self.seen += [1] * (SHIFT_FAR + 2)

    def inherit(self) -> None:
        """The next class begins with what was learned so far, and is not sure of it."""
        seen = self.seen
        seen[:POWER] = [known if known < INHERITED else INHERITED for known in seen[:POWER]]
        chances = self.chances
        for power in range(31):
            context = POWER + power
            distance = 1 if seen[context + 1] else 0
            chance, known = chances[context + distance], seen[context + distance]
            chances[context] = chance + ((32768 - chance) >> DOUBT)
            seen[context] = known if known < INHERITED_STEPS else INHERITED_STEPS
            steps = MANTISSA + 8 * power
            if seen[steps + 1] or seen[steps + 1 + 8 * distance]:  # by the first bit: all are as at first without it
                self._inherit_steps(steps, 8 * distance)

    def _inherit_steps(self, context: int, distance: int) -> None:
        end, source = context + 8, context + distance
        self.chances[context:end] = [
            chance + ((32768 - chance) >> DOUBT) for chance in self.chances[source : source + 8]
        ]
        known = self.seen[source : source + 8]
        self.seen[context:end] = [one if one < INHERITED_STEPS else INHERITED_STEPS for one in known]


class _Encoder(_Guesses):
    """``written``: what is settled, but for a carry."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self._low, self._span = 0, _FULL

    def bit(self, context: int, bit: int) -> None:
        """One bit, as likely as its context says."""
        chance, known = self.chances[context], self.seen[context]
        bound = (self._span >> 16) * chance
        if bit:
            self._low += bound
            self._span -= bound
            self.chances[context] = chance - (chance * RATES[known] >> 16)
        else:
            self._span = bound
            self.chances[context] = chance + ((65536 - chance) * RATES[known] >> 16)
        if known < KNOWN:
            self.seen[context] = known + 1
        if self._span < _SHORT or self._low > _FULL:
            self._put()

    def fair(self, number: int, bits: int) -> None:
        """The lowest ``bits`` bits, each as likely 0 as 1."""
        while bits > 0:
            some = min(bits, 8)
            bits -= some
            self._span >>= some
            self._low += self._span * (number >> bits & ((1 << some) - 1))
            self._put()

    def shift(self, further: int) -> None:
        """How far a shift is from the expected one."""
        self.bit(CONTEXTS + SHIFT_SAME, int(further != 0))
        if further:
            self.bit(CONTEXTS + SHIFT_LESS, int(further < 0))
            for _ in range(abs(further) - 1):
                self.bit(CONTEXTS + SHIFT_FAR, 1)
            self.bit(CONTEXTS + SHIFT_FAR, 0)

    def gap(self, gap: int, shift: int) -> None:
        """A quotient in unary, then the remainder."""
        stop = first = STOP + 2 * (shift > 0)
        for _ in range(gap >> shift):
            self.bit(stop, 1)
            stop = first + 1
        self.bit(stop, 0)
        for level in range(min(shift, LEARNED)):
            self.bit(REMAINDER + level, gap >> (shift - 1 - level) & 1)
        self.fair(gap, shift - LEARNED)

    def symbol(self, symbol: int, direction: int) -> None:
        """Up or down, the power of two of the steps, and the bits below."""
        self.bit(DIRECTION + direction, symbol & 1)
        steps = (symbol >> 1) + 1
        power = steps.bit_length() - 1
        for lower in range(power):
            self.bit(POWER + lower, 1)
        self.bit(POWER + power, 0)
        place = 1
        for level in range(min(power, LEARNED_STEPS)):
            bit = steps >> (power - 1 - level) & 1
            self.bit(MANTISSA + 8 * power + place, bit)
            place = 2 * place + bit
        self.fair(steps, power - LEARNED_STEPS)

    def finish(self) -> bytes:
        """One more byte says enough; zeros at the end are left out."""
        last = (self._low + 0xFFFFFF) >> 24
        if last >> 8:
            self._carry()
        self.written.append(last & 255)
        return bytes(self.written.rstrip(b"\0"))

    def _put(self) -> None:
        if self._low > _FULL:
            self._low &= _FULL
            self._carry()
        while self._span < _SHORT:
            self.written.append(self._low >> 24)
            self._low, self._span = self._low << 8 & _FULL, self._span << 8

    def _carry(self) -> None:
        at = len(self.written) - 1
        while self.written[at] == 255:
            self.written[at] = 0
            at -= 1
        self.written[at] += 1


class _Decoder(_Guesses):
    """``at``: bytes that were looked at. Behind the last one there are zeros."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.at = 4
        self._body = body
        self._code, self._span = int.from_bytes(body[:4].ljust(4, b"\0"), "big"), _FULL

    def bit(self, context: int) -> int:
        """The inverse of ``_Encoder.bit``."""
        chance, known = self.chances[context], self.seen[context]
        bound = (self._span >> 16) * chance
        if bit := self._code >= bound:
            self._code -= bound
            self._span -= bound
            self.chances[context] = chance - (chance * RATES[known] >> 16)
        else:
            self._span = bound
            self.chances[context] = chance + ((65536 - chance) * RATES[known] >> 16)
        if known < KNOWN:
            self.seen[context] = known + 1
        if self._span < _SHORT:
            self._take()
        return int(bit)

    def fair(self, number: int, bits: int) -> int:
        """``number`` with the next ``bits`` bits below it."""
        while bits > 0:
            some = min(bits, 8)
            bits -= some
            self._span >>= some
            digit = min(self._code // self._span, (1 << some) - 1)
            self._code -= digit * self._span
            number = number << some | digit
            if self._span < _SHORT:
                self._take()
        return number

    def shift(self) -> int:
        """How far a shift is from the expected one."""
        if not self.bit(CONTEXTS + SHIFT_SAME):
            return 0
        less, further = self.bit(CONTEXTS + SHIFT_LESS), 1
        while further <= LARGEST_SHIFT and self.bit(CONTEXTS + SHIFT_FAR):
            further += 1
        return -further if less else further

    def changes(self, left: int, shift: int, width: int, gaps: list[int], symbols: list[int]) -> bool:
        """The changes of one class of ``left`` elements. False where one leaves it, or cannot be."""
        stop = first = STOP + 2 * (shift > 0)
        gap, direction = 0, 0
        while left > 0:
            if self.bit(stop):
                stop = first + 1
                gap += 1 << shift
                left -= 1 << shift
                continue
            rest = 0
            for level in range(min(shift, LEARNED)):
                rest = 2 * rest + self.bit(REMAINDER + level)
            rest = self.fair(rest, shift - LEARNED)
            symbol = self._symbol(direction, width)
            if rest >= left or symbol < 0:
                return False
            direction = symbol & 1
            gaps.append(gap + rest)
            symbols.append(symbol)
            left -= rest + 1
            stop, gap = first, 0
        return True

    def _symbol(self, direction: int, width: int) -> int:
        """-1 for one that is too large, or says that nothing changes."""
        up, power = self.bit(DIRECTION + direction), 0
        while power < width and self.bit(POWER + power):
            power += 1
        if power >= width:
            return -1
        steps, place = 1, 1
        for _ in range(min(power, LEARNED_STEPS)):
            bit = self.bit(MANTISSA + 8 * power + place)
            place, steps = 2 * place + bit, 2 * steps + bit
        symbol = 2 * (self.fair(steps, power - LEARNED_STEPS) - 1) + up
        return symbol if symbol < (1 << width) - 1 else -1

    def _take(self) -> None:
        while self._span < _SHORT:
            byte = self._body[self.at] if self.at < len(self._body) else 0
            self._code, self._span, self.at = self._code << 8 | byte, self._span << 8, self.at + 1
