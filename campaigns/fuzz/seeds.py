"""Valid messages to mutate, with the places of their values: what makes mutations know the structure.

A C decoder gives a fuzzer nothing to steer by, and random bytes end at its first check. So a seed is taken apart once:
``spans`` are the bytes of every value in it, nested ones too, and mutations replace, move and repeat whole values."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from itertools import chain
from typing import Any

import msgspec

Span = tuple[int, int]


class Grammar(msgspec.Struct, frozen=True, eq=False):
    """A format: how its values are found, and values that its decoders might not like. ``nest``: what
    opens and what closes a value that has another one inside."""

    spans_of: Callable[[bytes], list[Span]]
    nasty: tuple[bytes, ...]
    nest: tuple[tuple[bytes, bytes], ...]


class Seed(msgspec.Struct, frozen=True, eq=False):
    """One valid frame."""

    content: bytes
    grammar: Grammar
    spans: tuple[Span, ...]


def seed(content: bytes, grammar: Grammar) -> Seed:
    """A frame taken apart. What is not of its grammar has no spans: its bytes are mutated only."""
    return Seed(content, grammar, tuple(grammar.spans_of(content)))


def message(*frames: Seed) -> tuple[Seed, ...]:
    """A message of several frames."""
    return frames


def _spans(content: bytes, value: Any, encode: Callable[[Any], bytes]) -> list[Span]:
    """Of ``value``, which ``content`` is, and of every value in it: each is found behind the start of its parent."""
    found: list[Span] = []

    def find(value: Any, at: int) -> int:
        code = encode(value)
        start = content.find(code, at)
        if start < 0:
            return at
        found.append((start, start + len(code)))
        at = start + 1
        if isinstance(value, dict):
            value = chain.from_iterable(value.items())
        for inner in value if isinstance(value, (list, tuple, chain)) else ():
            at = find(inner, at)
        return start + len(code)

    find(value, 0)
    return found


# ---- MessagePack ---------------------------------------------------------------------------------------

_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
_COUNTED = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def msgpack_spans(content: bytes) -> list[Span]:
    """Of every value; none in a seed that is no valid message."""
    try:
        value = msgspec.msgpack.decode(content)
    except msgspec.DecodeError:
        return []
    return _spans(content, value, msgspec.msgpack.encode)


def _pack(*values: Any) -> tuple[bytes, ...]:
    return tuple(msgspec.msgpack.encode(value) for value in values)


_POWERS = (7, 8, 16, 31, 32, 53, 62, 63)
_NUMBERS: tuple[int, ...] = (0, 1, -1, 2, *(2**n - 1 for n in (*_POWERS, 64)), *(2**n for n in _POWERS), -(2**63))
_FLOATS = (0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, 1e16, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "\0", "é", "\ud7ff", "\U0010ffff", "../../etc/passwd", "1", "nan", "x" * 300, "%s{}\n\x1b[31m")

_TIMES = (
    b"\xd6\xff\x00\x00\x00\x01",
    b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff",  # more nanoseconds than there are
    b"\xc7\x0c\xff\x00\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff",  # a year that no calendar has
    b"\xc7\x0c\xff\x3b\x9a\xca\x00\x80\x00\x00\x00\x00\x00\x00\x00",
)
_ARRAYS = tuple(
    struct.pack(">BBB", 0xC7, 1 + len(content), kind) + code + content
    for kind in (1, 2, 3, 0x80)
    for code in (b"i", b"f", b"B", b"d", b"q", b"l", b"u", b"z", b"\0")
    for content in (b"", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\1\0\0\0\0\0\0\0", b"\0\0\0")
)
_DECLARED = (
    *(bytes((code,)) + b"\xff" * width for code, width in (_SIZED | _COUNTED).items()),
    b"\xdb\x7f\xff\xff\xff",
    b"\xdd\x00\x10\x00\x00",
    b"\xdf\x00\x10\x00\x00",
)
_BAD_TEXTS = (b"\xa2\xff\xfe", b"\xa3\xed\xa0\x80", b"\xa1\x80", b"\xa4\xf7\xbf\xbf\xbf", b"\xd9\x02\xc3\x28")
_BAD_KEYS = (
    b"\x82\xa1a\x01\xa1a\x02",  # one key twice
    b"\x81\x80\x01",  # keys that have no hash
    b"\x81\x81\xa1a\x90\x01",
    b"\x81\x91\x01\x01",
    b"\x81\xc0\x01",
    b"\x81\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x01",
    b"\x81\xa2\xff\xfe\x01",
)

MSGPACK = Grammar(
    msgpack_spans,
    (
        *_pack(*_NUMBERS, *_FLOATS, *_TEXTS, None, True, False, b"", b"\0\1", [], {}, [[]], {"": {}}, [0] * 40),
        *_TIMES,
        *_ARRAYS,
        *_DECLARED,
        *_BAD_TEXTS,
        *_BAD_KEYS,
        b"\xc1",
        b"\xca\x7f\xc0\x00\x00",
    ),
    ((b"\x91", b""), (b"\x81\xa1a", b""), (b"\x92\x01", b""), (b"\x81", b""), (b"\x81\xa4type", b"")),
)

# ---- JSON ----------------------------------------------------------------------------------------------


def json_spans(content: bytes) -> list[Span]:
    """Of every value and key of what ``json.dumps`` wrote."""
    return _spans(content, json.loads(content), lambda value: json.dumps(value).encode())


_PLAIN: tuple[Any, ...] = (*_NUMBERS, *_FLOATS, *_TEXTS, None, True, False, [], {}, [[]])

JSON = Grammar(
    json_spans,
    (
        *(json.dumps(value).encode() for value in _PLAIN),
        *(b"1e999", b"-1e999", b"1" * 5000, b"0" * 20, b"01", b"1.", b"-", b"1e", b"NaN", b"Infinity", b"nul"),
        *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u12"', b'"\\x"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\n"', b'"'),
        *(b'{"a":1,"a":2}', b'{"":{}}', b"{1:2}", b'{"a"}', b"[1,]", b"[,]", b"/**/1", b"\xef\xbb\xbf1", b"\0"),
        *(
            b'{"type":1}',
            b'{"type":"\\u0000"}',
            b'{"type":[]}',
            b"9" * 400,
            b"1." + b"1" * 400,
            b'"' + b"a" * 999 + b'"',
        ),
    ),
    ((b"[", b"]"), (b"[", b""), (b'{"a":', b"}"), (b"[1,", b"]"), (b'{"type":', b"}"), (b'{"type":"', b'"}')),
)

PLAIN = Grammar(lambda content: [], (b"", b"\0", b"\xff" * 8), ((b"\0", b""),))
"""What has no values: only its bytes are mutated."""


def fixed_fields(*widths: int) -> Grammar:
    """Binary fields of these widths, then the rest."""

    def spans(content: bytes) -> list[Span]:
        at, found = 0, []
        for width in widths:
            found.append((at, min(at + width, len(content))))
            at += width
        return [*found, (at, len(content))] if at < len(content) else found

    values = [value.to_bytes(width, "little") for width in (1, 2, 4, 8) for value in (0, 1, (1 << 8 * width) - 1)]
    values += [value[::-1] for value in values]
    return Grammar(spans, (*PLAIN.nasty, *values), PLAIN.nest)
