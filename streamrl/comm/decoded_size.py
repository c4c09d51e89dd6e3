"""Estimate of the memory of a decoded MessagePack document before it is decoded, from the heads of its values alone.

Readers of bytes from other processes and of large files call it first: ``wire``, the weight manifest, prompt rows. One
byte can become about eighty: an empty list is one byte on a wire, but 64 bytes in memory and a place in the list around
it.

Only documents of some size are examined. Adjacent values of one kind are counted together, and a long text or array is
skipped at once, so that usual messages are examined quickly. (A text with one character far from ASCII takes four bytes
for each of its characters; the estimate ignores such texts.)"""

from __future__ import annotations

import re

Buffer = bytes | bytearray | memoryview

SPARE_BYTES = 48 << 20
"""Memory that any document may take, however few bytes it has: callers add it to their limit."""

UNSUSPECTED_BYTES = 1 << 19
"""Documents of fewer bytes take less than ``SPARE_BYTES`` in any case, and are not examined."""

# Bytes of memory. A place is a pointer in a list, with the places that a growing list allocates in advance.
_PLACE = 18
_LIST = 64
_MAP = 240
_ENTRY = 64
_NUMBER = 32
_TEXT = 49
# Adjacent values of a fixed length: pattern of a value, its bytes, its memory. Lists are counted without their items.
# The first pattern has small integers, nil and booleans: shared objects, of which only the pointer takes memory.
_RUNS: list[tuple[bytes, int, int]] = [
    (rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]", 1, _PLACE),
    (rb"[\x90-\x9f]", 1, _PLACE + _LIST),
    (rb"\x80", 1, _PLACE + _LIST),
    (rb"[\x81-\x85]", 1, _PLACE + _MAP),
    (rb"[\x86-\x8f]", 1, _PLACE + _MAP + 2 * _ENTRY),
    *((b"[%b].{%d}" % (codes, size), 1 + size, _PLACE + _NUMBER)
      for codes, size in ((rb"\xcc\xd0", 1), (rb"\xcd\xd1", 2), (rb"\xca\xce\xd2", 4), (rb"\xcb\xcf\xd3", 8))),
    *((b"\\x%02x.{%d}" % (0xA0 + size, size), 1 + size, _PLACE + (_TEXT + size if size > 1 else 0))
      for size in range(32)),
]  # fmt: skip
# Runs have at most 4096 values: the regular expression remembers the start of each repetition.
_RUN = re.compile(b"|".join(b"((?:%b){1,4096}+)" % pattern for pattern, _, _ in _RUNS), re.DOTALL)
# Binary and extension values whose head has a length: bytes of the length, other bytes of the head.
_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_COUNTED = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_ARRAY = 400  # an ``array.array`` without its elements: more than its 80 bytes, since making one is slow


def takes_more(document: Buffer, limit: int) -> bool:
    """Return whether ``document`` takes more than ``limit`` bytes once it is decoded to plain values: lists, maps,
    texts, numbers, arrays. The estimate ends at the first byte that is no MessagePack, and takes no value to be longer
    than the document."""
    if len(document) < UNSUSPECTED_BYTES:
        return False
    position = 0
    size = 0
    end = len(document)
    while position < end and size <= limit:
        run = _RUN.match(document, position)
        if run is not None and run.lastindex is not None:
            _, value_bytes, memory = _RUNS[run.lastindex - 1]
            size += (run.end() - position) // value_bytes * memory
            position = run.end()
            continue
        step, memory = _one_value(document, position, end)
        position += step
        size += memory
    return size > limit


def _one_value(document: Buffer, position: int, end: int) -> tuple[int, int]:
    """(bytes, memory) of the value at ``position``; for a list or a map those of its head and its empty places."""
    code = document[position]
    if code in _EXTENSIONS:
        return 2 + _EXTENSIONS[code], _PLACE + _ARRAY + _EXTENSIONS[code]
    if code in _TEXTS:
        length = int.from_bytes(document[position + 1 : position + 1 + _TEXTS[code]], "big")
        return 1 + _TEXTS[code] + length, _PLACE + _TEXT + min(length, end - position)
    if code in _SIZED:
        width, type_bytes = _SIZED[code]
        length = int.from_bytes(document[position + 1 : position + 1 + width], "big")
        return 1 + width + type_bytes + length, _PLACE + _ARRAY + min(length, end - position)
    if code in _COUNTED:
        width = _COUNTED[code]
        count = min(int.from_bytes(document[position + 1 : position + 1 + width], "big"), end - position)
        return 1 + width, _PLACE + (_MAP + _ENTRY * count if code >= 0xDE else _LIST)
    return end - position, 0  # a truncated document, or no MessagePack: the decoder raises
