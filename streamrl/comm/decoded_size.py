"""Estimate of the memory of a decoded MessagePack document before it is decoded, from the heads of its values alone.

A byte can become seventy: an empty list is one byte on a wire and a list of 64 bytes in memory, with a place in another
one. Only documents of some size are examined; of those, values of one kind in a row are taken in one step, and a long
text or array is one step too, so that what honest peers send is passed quickly. (A text of which one character is far
from ASCII takes four bytes for each; that is not checked.)"""

from __future__ import annotations

import re

Buffer = bytes | bytearray | memoryview

SPARE_BYTES = 48 << 20
"""What any document may take."""

UNSUSPECTED_BYTES = 1 << 19
"""Documents of fewer bytes take less than that in any case, and are not looked at."""

# a place: in a list that grows
_PLACE = 18
_LIST = 64
_MAP = 240
_ENTRY = 64
_NUMBER = 32
_TEXT = 49
# Values of a fixed length, in runs: what they match, bytes of each, memory of each. Lists without their items.
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
# No longer runs: whatever is repeated, the regular expression remembers where each began.
_RUN = re.compile(b"|".join(b"((?:%b){1,4096}+)" % pattern for pattern, _, _ in _RUNS), re.DOTALL)
# Heads with a length behind them: bytes of it, and of what else is in the head.
_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_COUNTED = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_ARRAY = 400  # an ``array.array``, beside its elements, and the time that it takes


def takes_more(document: Buffer, limit: int) -> bool:
    """Return whether ``document`` takes more than ``limit`` bytes once it is decoded to plain values: lists, maps,
    texts, numbers, arrays. Bytes that are no MessagePack end the estimate at what comes before; no value is believed to
    be longer than the document."""
    if len(document) < UNSUSPECTED_BYTES:
        return False
    at = 0
    size = 0
    end = len(document)
    while at < end and size <= limit:
        run = _RUN.match(document, at)
        if run is not None and run.lastindex is not None:
            _, each, memory = _RUNS[run.lastindex - 1]
            size += (run.end() - at) // each * memory
            at = run.end()
            continue
        step, memory = _one_value(document, at, end)
        at = at + step
        size = size + memory
    return size > limit


def _one_value(document: Buffer, at: int, end: int) -> tuple[int, int]:
    """Bytes to go on by, and memory, of the value at ``at``. Only the head of a list or a map."""
    code = document[at]
    if code in _EXTENSIONS:
        return 2 + _EXTENSIONS[code], _PLACE + _ARRAY + _EXTENSIONS[code]
    if code in _TEXTS:
        length = int.from_bytes(document[at + 1 : at + 1 + _TEXTS[code]], "big")
        return 1 + _TEXTS[code] + length, _PLACE + _TEXT + min(length, end - at)
    if code in _SIZED:
        width, more = _SIZED[code]
        length = int.from_bytes(document[at + 1 : at + 1 + width], "big")
        return 1 + width + more + length, _PLACE + _ARRAY + min(length, end - at)
    if code in _COUNTED:
        width = _COUNTED[code]
        count = min(int.from_bytes(document[at + 1 : at + 1 + width], "big"), end - at)
        return 1 + width, _PLACE + (_MAP + _ENTRY * count if code >= 0xDE else _LIST)
    return end - at, 0  # cut, or no MessagePack: the decoder says so
