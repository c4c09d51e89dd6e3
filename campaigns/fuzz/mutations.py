"""From a valid message to a broken one. Everything follows from the number of the execution: it can be run again."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from campaigns.fuzz.seeds import Seed

T = TypeVar("T")
MOST_BYTES = 1 << 20
"""No mutated frame is larger."""

_DEPTHS = (2, 9, 40, 200, 450, 1200, 6000)
_FILLS = (b"\0", b"\x7f", b"\x80", b"\xff")


def mutated_message(random: Random, frames: Sequence[Seed], others: Sequence[Sequence[Seed]]) -> list[bytes]:
    """One message with something wrong in it; ``others``: messages that parts may come from."""
    found = [frame.content for frame in frames]
    if len(found) > 1 and random.random() < 0.12:
        return _shuffled(random, found, others)
    for _ in range(1 if random.random() < 0.8 else 3):
        place = int(random.random() * len(found))
        other = others[int(random.random() * len(others))]
        # After the first mutation the places of values are not known any more.
        frame = frames[place]
        broken = _mutated(random, frame, other[min(place, len(other) - 1)]) if found[place] is frame.content else None
        found[place] = (broken_bytes(random, found[place], b"") if broken is None else broken)[:MOST_BYTES]
    return found


def _mutated(random: Random, frame: Seed, other: Seed) -> bytes:
    if frame.spans and random.random() < 0.7:
        return _broken_value(random, frame, other)
    return broken_bytes(random, frame.content, other.content)


def _broken_value(random: Random, frame: Seed, other: Seed) -> bytes:
    """A whole value of ``frame`` is replaced, removed, repeated, moved, nested, or has another head."""
    content, grammar, kind = frame.content, frame.grammar, int(random.random() * 10)
    start, end = _one(random, frame.spans)
    before, value, after = content[:start], content[start:end], content[end:]
    if kind <= 2:
        return before + _one(random, grammar.nasty) + after
    if kind <= 4:
        giver = other if other.spans else frame
        first, last = _one(random, giver.spans)
        return before + giver.content[first:last] + after
    if kind == 5:
        return before + after
    if kind == 6:
        return before + value * (1 + _one(random, (1, 2, 20))) + after
    if kind == 7:
        first, last = _one(random, frame.spans)
        (a, b), (c, d) = sorted(((start, end), (first, last)))
        return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:] if b <= c else before + after
    if kind == 8:  # rarely deep: a parser takes its time to find out
        depth = _one(random, _DEPTHS[:3] if random.random() < 0.9 else _DEPTHS)
        opens, closes = _one(random, grammar.nest)
        return before + opens * depth + value + closes * depth + after
    broken = bytearray(content)  # the first bytes of a value are its type and its length
    for at in range(start, min(start + 1 + int(random.random() * 3), len(broken))):
        broken[at] = _one(random, (int(random.random() * 256), broken[at] + 1 & 255, broken[at] - 1 & 255))
    return bytes(broken)


def _one(random: Random, things: Sequence[T]) -> T:
    return things[int(random.random() * len(things))]


# ---- bytes ---------------------------------------------------------------------------------------------


def broken_bytes(random: Random, frame: bytes, other: bytes) -> bytes:
    """``frame`` with bytes changed, removed, repeated, inserted or taken from ``other``."""
    kind = int(random.random() * 12)
    if kind == 0 or not frame:
        return random.randbytes(int(random.random() * (min(2 * len(frame), 64) + 8)))
    place = int(random.random() * len(frame))
    if kind <= 4:
        broken = bytearray(frame)
        for _ in range(1 + int(random.random() * 4) * (kind == 4)):
            broken[int(random.random() * len(frame))] ^= 1 << int(random.random() * 8)
        return bytes(broken)
    if kind == 5:
        return frame[:place]
    some = 1 + int(random.random() * 16)
    if kind == 6:
        return frame[:place] + frame[place + some :]
    if kind == 7:
        return frame[:place] + random.randbytes(some) + frame[place:]
    if kind == 8:
        width = 1 << int(random.random() * 4)
        return (frame[:place] + _FILLS[int(random.random() * 4)] * width + frame[place + width :])[: len(frame)]
    if kind == 9:
        return frame[:place] + other[place:]
    return frame + (frame[: place + 1] if kind == 10 else random.randbytes(some))


# ---- frames --------------------------------------------------------------------------------------------


def _shuffled(random: Random, found: list[bytes], others: Sequence[Sequence[Seed]]) -> list[bytes]:
    kind, place = int(random.random() * 6), int(random.random() * len(found))
    if kind == 0:
        return [*found[:place], *found[place + 1 :]]
    if kind == 1:
        return [*found[: place + 1], *found[place:]]
    if kind == 2:
        found[place], found[-1] = found[-1], found[place]
        return found
    if kind == 3:
        return [*found[:place], b"", *found[place:]]
    if kind == 4:
        return found[: place + 1]
    other = others[int(random.random() * len(others))]
    return [*found[:place], *(frame.content for frame in other[place:])]
