"""From a valid message to a broken one. Everything follows from the number of the execution: it can be run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from campaigns.fuzz.seeds import Seed

MOST_BYTES = 1 << 20
"""No mutated frame is larger: what is about size has its own inputs (``bombs``)."""

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
        found[place] = (_broken_bytes(random, found[place], b"") if broken is None else broken)[:MOST_BYTES]
    return found


def _mutated(random: Random, frame: Seed, other: Seed) -> bytes:
    if frame.spans and random.random() < 0.7:
        return _BY_VALUE[int(random.random() * len(_BY_VALUE))](random, frame, other)
    return _broken_bytes(random, frame.content, other.content)


# ---- whole values --------------------------------------------------------------------------------------


def _replaced(random: Random, frame: Seed, other: Seed) -> bytes:
    start, end = frame.spans[int(random.random() * len(frame.spans))]
    nasty = frame.grammar.nasty
    return b"".join((frame.content[:start], nasty[int(random.random() * len(nasty))], frame.content[end:]))


def _transplanted(random: Random, frame: Seed, other: Seed) -> bytes:
    giver = other if other.spans else frame
    start, end = frame.spans[int(random.random() * len(frame.spans))]
    first, last = giver.spans[int(random.random() * len(giver.spans))]
    return b"".join((frame.content[:start], giver.content[first:last], frame.content[end:]))


def _removed(random: Random, frame: Seed, other: Seed) -> bytes:
    start, end = frame.spans[int(random.random() * len(frame.spans))]
    return frame.content[:start] + frame.content[end:]


def _repeated(random: Random, frame: Seed, other: Seed) -> bytes:
    start, end = frame.spans[int(random.random() * len(frame.spans))]
    times = (1, 2, 20)[int(random.random() * 3)]
    return b"".join((frame.content[:end], frame.content[start:end] * times, frame.content[end:]))


def _swapped(random: Random, frame: Seed, other: Seed) -> bytes:
    (a, b), (c, d) = sorted(
        (frame.spans[int(random.random() * len(frame.spans))], frame.spans[int(random.random() * len(frame.spans))])
    )
    if b > c:
        return frame.content[:a] + frame.content[c:]
    content = frame.content
    return b"".join((content[:a], content[c:d], content[b:c], content[a:b], content[d:]))


def _nested(random: Random, frame: Seed, other: Seed) -> bytes:
    start, end = frame.spans[int(random.random() * len(frame.spans))]
    # Rarely deep: a parser takes its time to find out.
    depth = _DEPTHS[int(random.random() * 3)] if random.random() < 0.9 else _DEPTHS[int(random.random() * len(_DEPTHS))]
    opens, closes = frame.grammar.nest[int(random.random() * len(frame.grammar.nest))]
    content = frame.content
    return b"".join((content[:start], opens * depth, content[start:end], closes * depth, content[end:]))


def _head_changed(random: Random, frame: Seed, other: Seed) -> bytes:
    """The first bytes of a value are its type and its length."""
    start, _ = frame.spans[int(random.random() * len(frame.spans))]
    broken = bytearray(frame.content)
    for at in range(start, min(start + 1 + int(random.random() * 3), len(broken))):
        broken[at] = (
            int(random.random() * 256)
            if random.random() < 0.5
            else (broken[at] + (1 if random.random() < 0.5 else -1)) & 255
        )
    return bytes(broken)


_Mutation = Callable[[Random, Seed, Seed], bytes]
_BY_VALUE: tuple[_Mutation, ...] = (
    _replaced,
    _replaced,
    _replaced,
    _transplanted,
    _transplanted,
    _removed,
    _repeated,
    _swapped,
    _nested,
    _head_changed,
)

# ---- bytes ---------------------------------------------------------------------------------------------


def _broken_bytes(random: Random, frame: bytes, other: bytes) -> bytes:
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
