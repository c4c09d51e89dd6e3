"""Reading segments: frames in their order, the end of the last segment, and records from a beginning on.

How a torn tail is told from damage. Frames are written in groups, and a group is acknowledged once it is on the disk.
A crash leaves any part of the groups that were not: some sectors, zeros, garbage. So the valid frames up to the first
bad one count, and the rest is cut, *unless* something vouches for the bad place: the header, for all up to its
``initial_end``; or any whole mark behind it (a mark is written after its group came to the disk and before that is
told to anybody), for all up to the offset that it names. Then it is damage. In a segment that has a successor, the
successor's header vouches for all up to its ``previous_end``, and nothing behind that is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from streamrl.journal.journal_disk import Disk
from streamrl.journal.journal_errors import JournalDamaged, failing
from streamrl.journal.journal_format import (
    HEAD_BYTES,
    HEADER_BYTES,
    MARK_BYTES,
    Durability,
    FrameError,
    Role,
    SegmentHeader,
    decode_head,
    decode_mark,
    decode_payload,
    find_mark,
)

READ_BYTES = 1024 * 1024
"""Read at once; a longer frame is read whole."""


class Record(NamedTuple):
    """One record. That of a ``base`` has no number of its own: ``sequence`` is that of the last record before it."""

    sequence: int
    kind: int
    payload: bytes
    base: bool = False


class Frame(NamedTuple):
    """A whole frame, at ``offset`` of its segment."""

    role: Role
    kind: int
    sequence: int
    payload: bytes
    offset: int


class Segment(msgspec.Struct, frozen=True):
    """A segment on the disk. ``end``: where its frames end; ``seed``: where their checks start from."""

    path: Path
    header: SegmentHeader
    seed: int
    end: int


class SegmentReader:
    """Frames of one segment, in order. ``offset`` and ``next_sequence``: of what is due next."""

    def __init__(self, disk: Disk, descriptor: int, segment: Segment) -> None:
        self.offset = HEADER_BYTES
        self.next_sequence = segment.header.first_sequence
        self._disk = disk
        self._descriptor = descriptor
        self._segment = segment
        self._base_left = segment.header.base_count

    def frames(self) -> Iterator[Frame]:
        """Raises ``FrameError`` where the frame that is due at ``offset`` is not there."""
        window, start, seed = b"", self.offset, self._segment.seed
        while self.offset < self._segment.end:
            at = self.offset - start
            if len(window) - at < HEAD_BYTES:
                window, start, at = self._read(READ_BYTES), self.offset, 0
            head = decode_head(window, at, seed)
            if len(window) - at < head.length:
                window, start, at = self._read(max(READ_BYTES, head.length)), self.offset, 0
            payload = decode_payload(window, at, head, seed)
            self._in_order(head.role, head.sequence, payload)
            frame = Frame(head.role, head.kind, head.sequence, payload, self.offset)
            self.offset += head.length
            yield frame

    def _read(self, count: int) -> bytes:
        with failing(self._segment.path, f"reading at byte {self.offset}"):
            return self._disk.read(self._descriptor, min(count, self._segment.end - self.offset), self.offset)

    def _in_order(self, role: Role, sequence: int, payload: bytes) -> None:
        if self._base_left:
            due = self._segment.header.base_count - self._base_left
            if role is not Role.BASE or sequence != due:
                raise FrameError(f"base frame {due} is due, here is {role.name.lower()} {sequence}")
            self._base_left -= 1
        elif role is Role.RECORD:
            if sequence != self.next_sequence:
                raise FrameError(f"record {self.next_sequence} is due, here is record {sequence}")
            self.next_sequence += 1
        elif role is Role.BASE:
            raise FrameError("a base frame behind the base")
        elif sequence != self.next_sequence - 1 or decode_mark(payload) > self.offset:
            raise FrameError("a mark that is not of this place")

    @property
    def base_is_whole(self) -> bool:
        """Whether every frame of the base was read."""
        return not self._base_left


class Tail(msgspec.Struct, frozen=True):
    """How the last segment ends. Frames are valid up to ``end``, and something vouches for those up to
    ``synced_end``; ``unsynced``: the records between, which may be lost yet. ``last_sequence``: of all records."""

    end: int
    synced_end: int
    last_sequence: int
    unsynced: tuple[Record, ...]


def read_tail(disk: Disk, segment: Segment) -> Tail:
    """Read the last segment, whose ``end`` is the size of its file. Raises ``JournalDamaged``, ``JournalFailed``."""
    synced_end = segment.header.initial_end
    refuse_cut(segment, segment.end, synced_end)
    unsynced: list[tuple[int, Record]] = []
    with _opened(disk, segment.path) as descriptor:
        reader = SegmentReader(disk, descriptor, segment)
        try:
            for frame in reader.frames():
                if frame.role is Role.MARK:
                    synced_end = max(synced_end, decode_mark(frame.payload))
                    unsynced = [(at, record) for at, record in unsynced if at >= synced_end]
                elif frame.offset >= synced_end:
                    unsynced.append((frame.offset, Record(frame.sequence, frame.kind, frame.payload)))
        except FrameError as error:
            _refuse_damage(disk, descriptor, segment, reader.offset, error.reason)
        if reader.offset < synced_end or not reader.base_is_whole:
            raise JournalDamaged(segment.path, reader.offset, "its header promises more frames than there are")
    records = tuple(record for _, record in unsynced)
    return Tail(reader.offset, synced_end, reader.next_sequence - 1, records)


def _refuse_damage(disk: Disk, descriptor: int, segment: Segment, offset: int, reason: str) -> None:
    """Raise ``JournalDamaged`` where something vouches for the bad frame at ``offset``."""
    if offset < segment.header.initial_end:
        raise JournalDamaged(segment.path, offset, f"{reason}, and it was written before the segment got its name")
    start = offset
    while start < segment.end:
        with failing(segment.path, f"reading at byte {start}"):
            window = disk.read(descriptor, READ_BYTES + MARK_BYTES, start)
        mark = find_mark(window, 0, segment.seed, offset)
        if mark >= 0:
            where = "on the disk"
            if segment.header.durability is Durability.PROCESS:
                where = "written (with durability 'process': a power cut can do this as well)"
            raise JournalDamaged(
                segment.path, offset, f"{reason}, and the mark at byte {start + mark} says that it was {where}"
            )
        start += READ_BYTES


def check_segment(disk: Disk, segment: Segment, next_sequence: int) -> None:
    """Read a segment that has a successor, whose first sequence number is ``next_sequence``. Raises
    ``JournalDamaged``, ``JournalFailed``."""
    for _ in _read_whole(disk, segment, next_sequence):
        pass


def read_records(disk: Disk, segments: list[Segment]) -> Iterator[Record]:
    """The base of the first segment, then the records of all. Raises ``JournalDamaged``, ``JournalFailed``."""
    for place, segment in enumerate(segments):
        following = segments[place + 1 :]
        due = following[0].header.first_sequence if following else None
        before = segment.header.first_sequence - 1
        for frame in _read_whole(disk, segment, due):
            if frame.role is Role.RECORD:
                yield Record(frame.sequence, frame.kind, frame.payload)
            elif frame.role is Role.BASE and not place:
                yield Record(before, frame.kind, frame.payload, base=True)


def _read_whole(disk: Disk, segment: Segment, next_sequence: int | None) -> Iterator[Frame]:
    with _opened(disk, segment.path) as descriptor:
        with failing(segment.path, "asking for its size"):
            refuse_cut(segment, disk.size(descriptor), segment.end)
        reader = SegmentReader(disk, descriptor, segment)
        try:
            yield from reader.frames()
        except FrameError as error:
            raise JournalDamaged(segment.path, reader.offset, f"{error.reason}, and frames follow it") from error
        if not reader.base_is_whole or next_sequence not in (None, reader.next_sequence):
            raise JournalDamaged(
                segment.path, reader.offset, f"record {reader.next_sequence} is due, what follows begins with another"
            )


def refuse_cut(segment: Segment, size: int, promised: int) -> None:
    """Raise ``JournalDamaged`` where a file is shorter than what was on the disk."""
    if size < promised:
        raise JournalDamaged(segment.path, size, f"the file ends here, and {promised} bytes of it were on the disk")


class _opened:
    """A segment's file for reading."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._path = disk, path

    def __enter__(self) -> int:
        with failing(self._path, "opening"):
            self._descriptor = self._disk.open(self._path)
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        self._disk.close(self._descriptor)
