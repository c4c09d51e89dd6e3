"""Opening a journal: the lock, the chain of segments, what is recovered, and the segment in which it goes on.

A recovery never appends to a segment it finds: it begins a new one under a new epoch, whose header says where the one
before ends. Records that nothing vouches for yet are written again into it. (After a failed flush Linux holds them in
its cache, calls them clean and never writes them: they can be read, and are lost with the next power cut.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from streamrl.journal.journal_disk import Disk
from streamrl.journal.journal_errors import JournalDamaged, JournalRefused, failing
from streamrl.journal.journal_format import (
    HEADER_BYTES,
    Durability,
    FrameError,
    NewerFormat,
    decode_header,
    header_seed,
)
from streamrl.journal.journal_reading import Record, Segment, Tail, check_segment, read_records, read_tail
from streamrl.journal.journal_writing import SegmentWriter, segment_number, segment_path

LOCK = "lock"


class Beginning(msgspec.Struct, frozen=True):
    """A segment from which the state can be rebuilt. ``sequence``: of the last record that its base contains (0: the
    run began here); ``base_records``: how many records its base has."""

    segment: int
    sequence: int
    base_records: int


class Recovered:
    """What a journal holds. ``epoch``: under which it goes on (for ``read_journal`` that of the last segment);
    ``last_sequence``: of the last record; ``cut_bytes``: of a torn tail; ``beginnings``: oldest first."""

    def __init__(self, disk: Disk, epoch: int, segments: list[Segment], tail: Tail, found: list[Segment]) -> None:
        self.epoch = epoch
        self.last_sequence = tail.last_sequence
        self.cut_bytes = found[-1].end - tail.end if found else 0
        self.beginnings = tuple(
            Beginning(segment.header.segment, segment.header.first_sequence - 1, segment.header.base_count)
            for segment in segments
            if segment.header.begins
        )
        self._disk = disk
        self._segments = segments

    def records(self, beginning: Beginning | None = None) -> Iterator[Record]:
        """Stream the records from a beginning on (the newest by default): its base first, then every record up to
        ``last_sequence``; bases that come later are left out. At any time and any number of times, until the segments
        are forgotten. Raises ``JournalDamaged``, ``JournalFailed``; ``JournalRefused`` for no beginning of these."""
        if beginning is None:
            beginning = self.beginnings[-1] if self.beginnings else None
        elif beginning not in self.beginnings:
            raise JournalRefused(f"{beginning} is no beginning of this journal; those are {self.beginnings}")
        first = beginning.segment if beginning else 0
        return read_records(self._disk, [part for part in self._segments if part.header.segment >= first])


def take_lock(disk: Disk, directory: Path) -> int:
    """Become the one writer of this journal; returns the descriptor that holds the lock. Raises ``JournalRefused``
    that names the process which is it, ``JournalFailed``."""
    path = directory / LOCK
    with failing(directory, "making the directory"):
        disk.make_directory(directory)
        disk.flush_directory(directory.parent)  # also where it exists: whoever made it may have failed here
    with failing(path, "locking"):
        try:
            return disk.lock(path, str(os.getpid()))
        except BlockingIOError as error:
            holder = _holder(disk, path)
            raise JournalRefused(
                f"journal {directory} is being written by process {holder}; end that run first, or wait until it ended"
            ) from error


def _holder(disk: Disk, path: Path) -> str:
    descriptor = disk.open(path)
    try:
        return disk.read(descriptor, 20, 0).decode("ascii", "replace").strip() or "(just starting)"
    finally:
        disk.close(descriptor)


def recover(disk: Disk, directory: Path, run_id: str, durability: Durability) -> tuple[SegmentWriter, Recovered]:
    """Check what a journal holds, and begin a new segment behind it. The lock is held. Raises ``JournalDamaged``,
    ``JournalRefused``, ``JournalFailed``."""
    chain = _read_chain(disk, directory)
    tail = _check_chain(disk, chain)
    if durability is Durability.FSYNC:
        _flush_unsynced(disk, chain)
    epoch = chain[-1].header.epoch + 1 if chain else 1
    writer = SegmentWriter(disk, directory, chain[-1].header.run_id if chain else run_id, epoch, durability)
    begun = writer.start(
        chain[-1].header.segment + 1 if chain else 1,
        last_sequence=tail.last_sequence,
        previous_end=tail.synced_end,
        carried=tail.unsynced,
        beginnings=(segment.header.segment for segment in chain if segment.header.begins),
    )
    return writer, Recovered(disk, epoch, [*_cut_at(chain, tail.synced_end), begun], tail, chain)


def read_only(disk: Disk, directory: Path) -> Recovered:
    """What a journal holds now, without a lock, without a change; somebody may be writing it. Raises as ``recover``."""
    chain = _read_chain(disk, directory)
    tail = _check_chain(disk, chain)
    return Recovered(disk, chain[-1].header.epoch if chain else 0, _cut_at(chain, tail.end), tail, chain)


def _cut_at(chain: list[Segment], end: int) -> list[Segment]:
    return [*chain[:-1], msgspec.structs.replace(chain[-1], end=end)] if chain else []


def _read_chain(disk: Disk, directory: Path) -> list[Segment]:
    """The segments without a gap up to the last one, oldest first; at least from the newest beginning on."""
    with failing(directory, "listing"):
        numbers = {n for name in disk.names(directory) if (n := segment_number(name)) is not None}
    chain: list[Segment] = []
    number = max(numbers, default=0)
    while number in numbers:
        try:
            segment = _read_segment(disk, directory, number, chain[0] if chain else None)
        except JournalDamaged:
            if any(later.header.begins for later in chain):
                break  # older than anything that is needed
            raise
        chain.insert(0, segment)
        number -= 1
    if chain and not any(segment.header.begins for segment in chain):
        raise JournalDamaged(segment_path(directory, number), 0, "the segment is missing, and a later one needs it")
    return chain


def _read_segment(disk: Disk, directory: Path, number: int, following: Segment | None) -> Segment:
    path = segment_path(directory, number)
    with failing(path, "reading its header"):
        descriptor = disk.open(path)
        try:
            size = disk.size(descriptor)
            raw = disk.read(descriptor, HEADER_BYTES, 0)
        finally:
            disk.close(descriptor)
    try:
        header = decode_header(raw)
    except NewerFormat as error:
        raise JournalRefused(
            f"{path}: {error.reason}; resume with the streamrl that wrote it, or a later one"
        ) from None
    except FrameError as error:
        raise JournalDamaged(path, 0, error.reason) from error
    if following and header.run_id != following.header.run_id:
        raise JournalDamaged(path, 0, f"it is of run {header.run_id!r}, what follows of {following.header.run_id!r}")
    if header.segment != number or (following and header.epoch > following.header.epoch):
        raise JournalDamaged(path, 0, f"it is segment {header.segment} of epoch {header.epoch} under another name")
    return Segment(path, header, header_seed(raw), following.header.previous_end if following else size)


def _check_chain(disk: Disk, chain: list[Segment]) -> Tail:
    """Read everything from the newest beginning on, and the tail."""
    if not chain:
        return Tail(0, 0, 0, ())
    newest = max(place for place, segment in enumerate(chain) if segment.header.begins)
    for place in range(newest, len(chain) - 1):
        check_segment(disk, chain[place], chain[place + 1].header.first_sequence)
    return read_tail(disk, chain[-1])


def _flush_unsynced(disk: Disk, chain: list[Segment]) -> None:
    """Bring segments to the disk that were written without flushing them."""
    for segment in chain:
        if segment.header.durability is Durability.PROCESS:
            with failing(segment.path, "flushing"):
                descriptor = disk.open(segment.path)
                try:
                    disk.flush(descriptor)
                finally:
                    disk.close(descriptor)
