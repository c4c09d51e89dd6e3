"""The bytes of a journal: header of a segment, frames, and how a frame is known to be whole. Pure.

A journal is a directory of segments (``000001.journal``, ...). A segment is one header and frames behind it::

    header   128 bytes: magic, format, durability, run id, segment number, epoch, first sequence number, number of
             base frames, ``previous_end``, ``initial_end``, check
    frame    28 bytes (magic, length, role, kind, 0, sequence number, payload check, check), then the payload

Integers are little-endian. ``length`` counts the whole frame, so it is never 0 and zeros are never a frame (the
CRC-32 of nothing is 0). Both checks of a frame are CRC-32 that start from the header's check: it covers run id,
epoch and segment number, so that a frame of another place is not a frame here; its sequence number is in its head.

``previous_end``  where the segment before ends: what is behind it there was cut at a recovery, or never counted
``initial_end``   the header, the base and the records carried over from the segment before: they were on the disk
                  before the segment got its name

Roles: ``BASE`` frames come first and number from 0, ``RECORD`` frames number on without a gap from the header's first
sequence number, a ``MARK`` says up to which offset of its segment everything was on the disk when it was written.

Decoding is total: whatever the bytes, the outcome is a value or ``FrameError``, and no length is believed before
its check and the limit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

import msgspec

from streamrl.base.errors import StreamRLError

Buffer = bytes | bytearray | memoryview

JOURNAL_FORMAT = 1
"""Version of these bytes. Raise it when an older streamrl would misread what this one writes."""

RECORD_LIMIT = 256 * 1024 * 1024
"""Bytes that one payload may have."""

RUN_ID_BYTES = 64

_SEGMENT_MAGIC = b"SRLJRNL\n"
_HEADER = struct.Struct("<8sHBBI5Q64s4x")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size

FRAME_MAGIC = b"\xf5JF\n"
_FRAME = struct.Struct("<4sIBBHQI")
_HEAD = struct.Struct("<4sIBBHQII")
HEAD_BYTES = _HEAD.size
_MARK = struct.Struct("<Q")
MARK_BYTES = HEAD_BYTES + _MARK.size


class Role(IntEnum):
    """What a frame is."""

    RECORD = 1
    BASE = 2
    MARK = 3


class Durability(IntEnum):
    """What an acknowledged record survives: ``PROCESS`` any kill of the process, ``FSYNC`` a power cut as well."""

    PROCESS = 1
    FSYNC = 2


class FrameError(StreamRLError):
    """These bytes are not a header, or not a frame of this segment. ``reason`` in a few words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NewerFormat(FrameError):
    """The header of a segment that a later streamrl wrote."""


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First bytes of a segment. Offsets are bytes from the beginning of a segment."""

    run_id: str
    segment: int
    epoch: int
    first_sequence: int
    previous_end: int = 0
    initial_end: int = HEADER_BYTES
    base_count: int = 0
    durability: Durability = Durability.FSYNC

    @property
    def begins(self) -> bool:
        """True where nothing before this segment is needed."""
        return self.base_count > 0 or self.segment == 1


class FrameHead(NamedTuple):
    """A frame whose head is whole; ``length`` counts head and payload, ``check`` is that of the payload."""

    role: Role
    kind: int
    sequence: int
    length: int
    check: int


_ROLES = {int(role): role for role in Role}
_DURABILITIES = {int(durability): durability for durability in Durability}
_HEAD_ROOM = HEAD_BYTES - _CHECK.size


def encode_header(header: SegmentHeader) -> bytes:
    """The header as bytes. Raises ``FrameError`` for a run id of more than 64 bytes."""
    run_id = header.run_id.encode()
    if len(run_id) > RUN_ID_BYTES:
        raise FrameError(f"the run id {header.run_id!r} has {len(run_id)} bytes, a journal takes {RUN_ID_BYTES}")
    body = _HEADER.pack(
        _SEGMENT_MAGIC,
        JOURNAL_FORMAT,
        header.durability,
        len(run_id),
        header.base_count,
        header.segment,
        header.epoch,
        header.first_sequence,
        header.previous_end,
        header.initial_end,
        run_id,
    )
    return body + _CHECK.pack(crc32(body))


def decode_header(raw: Buffer) -> SegmentHeader:
    """Read the first ``HEADER_BYTES`` of a segment. Raises ``FrameError``, ``NewerFormat`` for a later format."""
    raw = bytes(raw[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES:
        raise FrameError(f"a segment begins with a header of {HEADER_BYTES} bytes, here are {len(raw)}")
    fields = _HEADER.unpack_from(raw)
    magic, form, durability, id_bytes, base_count, segment, epoch, first, previous_end, initial_end, run_id = fields
    if magic != _SEGMENT_MAGIC:
        raise FrameError(f"a segment begins with {_SEGMENT_MAGIC!r}, this one with {magic!r}")
    if form > JOURNAL_FORMAT:
        raise NewerFormat(f"journal format {form}, this streamrl reads {JOURNAL_FORMAT}")
    if crc32(raw[: _HEADER.size]) != header_seed(raw):
        raise FrameError("the header does not match its checksum")
    if form != JOURNAL_FORMAT or durability not in _DURABILITIES or id_bytes > RUN_ID_BYTES:
        raise FrameError(f"format {form}, durability {durability}, {id_bytes} bytes of run id: not a header")
    if not (segment and epoch and first) or initial_end < HEADER_BYTES:
        raise FrameError(f"segment {segment}, epoch {epoch}, first sequence number {first}: they begin at 1")
    try:
        name = run_id[:id_bytes].decode()
    except UnicodeDecodeError as error:
        raise FrameError("the run id is not text") from error
    return SegmentHeader(
        run_id=name,
        segment=segment,
        epoch=epoch,
        first_sequence=first,
        previous_end=previous_end,
        initial_end=initial_end,
        base_count=base_count,
        durability=_DURABILITIES[durability],
    )


def header_seed(raw: Buffer) -> int:
    """Where the checks of a segment's frames start from: the check of its header, ``raw``."""
    seed: int = _CHECK.unpack_from(raw, _HEADER.size)[0]
    return seed


def append_frame(parts: list[bytes], seed: int, role: Role, kind: int, sequence: int, payload: bytes) -> int:
    """Append head and payload of one frame to ``parts``; returns its bytes."""
    length = HEAD_BYTES + len(payload)
    head = _FRAME.pack(FRAME_MAGIC, length, role, kind, 0, sequence, crc32(payload, seed))
    parts.append(head + _CHECK.pack(crc32(head, seed)))
    parts.append(payload)
    return length


def append_mark(parts: list[bytes], seed: int, sequence: int, synced_end: int) -> int:
    """Append a mark: all before ``synced_end`` is on the disk; ``sequence``: of the last record before the mark."""
    return append_frame(parts, seed, Role.MARK, 0, sequence, _MARK.pack(synced_end))


def base_bytes(base: Iterable[tuple[int, bytes]]) -> int:
    """Bytes of the frames of these ``(kind, payload)``."""
    return sum(HEAD_BYTES + len(payload) for _, payload in base)


def decode_head(buffer: Buffer, offset: int, seed: int) -> FrameHead:
    """The frame that begins at ``offset`` of ``buffer``, its payload unread. Raises ``FrameError``."""
    if offset < 0 or len(buffer) - offset < HEAD_BYTES:
        raise FrameError("it ends within the head of a frame")
    magic, length, role, kind, reserved, sequence, payload_check, check = _HEAD.unpack_from(buffer, offset)
    if crc32(buffer[offset : offset + _HEAD_ROOM], seed) != check or magic != FRAME_MAGIC:
        raise FrameError("what is there is not a frame of this segment")
    known = _ROLES.get(role)
    if known is None or reserved or not HEAD_BYTES <= length <= HEAD_BYTES + RECORD_LIMIT:
        raise FrameError(f"a frame of role {role} and {length} bytes")
    if known is Role.MARK and length != MARK_BYTES:
        raise FrameError(f"a mark of {length} bytes")
    return FrameHead(known, kind, sequence, length, payload_check)


def decode_payload(buffer: Buffer, offset: int, head: FrameHead, seed: int) -> bytes:
    """Payload of the frame at ``offset`` whose head is ``head``. Raises ``FrameError``."""
    payload = bytes(buffer[offset + HEAD_BYTES : offset + head.length])
    if len(payload) != head.length - HEAD_BYTES:
        raise FrameError("it ends within a frame")
    if crc32(payload, seed) != head.check:
        raise FrameError("a frame does not match its checksum")
    return payload


def decode_mark(payload: bytes) -> int:
    """The offset that a mark names. Raises ``FrameError``."""
    if len(payload) != _MARK.size:
        raise FrameError(f"a mark of {len(payload)} bytes")
    end: int = _MARK.unpack(payload)[0]
    return end


def find_mark(buffer: Buffer, start: int, seed: int, synced_past: int) -> int:
    """Where in ``buffer``, from ``start`` on, a whole mark of this segment says that more than the first
    ``synced_past`` bytes of the segment were on the disk; -1 where none does."""
    raw = bytes(buffer)
    wanted = FRAME_MAGIC + _CHECK.pack(MARK_BYTES) + bytes([Role.MARK])
    while (start := raw.find(wanted, start)) >= 0:
        try:
            head = decode_head(raw, start, seed)
            if decode_mark(decode_payload(raw, start, head, seed)) > synced_past:
                return start
        except FrameError:  # bytes that look like one
            pass
        start += 1
    return -1
