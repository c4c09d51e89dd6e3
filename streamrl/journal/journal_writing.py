"""Writing segments: groups of records behind the last, and new segments. Synchronous; the first failure is final."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from streamrl.journal.journal_disk import Disk
from streamrl.journal.journal_errors import JournalFailed, JournalRefused
from streamrl.journal.journal_format import (
    HEADER_BYTES,
    Durability,
    Role,
    SegmentHeader,
    append_frame,
    append_mark,
    base_bytes,
    encode_header,
    header_seed,
)
from streamrl.journal.journal_reading import Record, Segment

SUFFIX = ".journal"
UNFINISHED = ".unfinished"
_BLOCK_BYTES = 4 * 1024 * 1024


def segment_path(directory: Path, number: int) -> Path:
    """Where segment ``number`` of a journal is."""
    return directory / f"{number:06d}{SUFFIX}"


def segment_number(name: str) -> int | None:
    """Number of the segment with this file name; None for another file."""
    stem = name.removesuffix(SUFFIX)
    named = name.endswith(SUFFIX) and stem.isascii() and stem.isdigit()
    return int(stem) if named and name == segment_path(Path(), int(stem)).name else None


class SegmentWriter:
    """Appends to one journal. Every method returns once what it did survives what ``durability`` says, and raises
    ``JournalFailed`` where a call on the disk fails, and from then on always: after a failed flush nobody knows what
    is on the disk, and a second flush would say that all is well."""

    def __init__(self, disk: Disk, directory: Path, run_id: str, epoch: int, durability: Durability) -> None:
        self.failure: JournalFailed | None = None
        self.segment = 0
        self._disk = disk
        self._directory = directory
        self._header = SegmentHeader(run_id=run_id, segment=1, epoch=epoch, first_sequence=1, durability=durability)
        self._descriptor: int | None = None
        self._beginnings: set[int] = set()
        self._seed = 0
        self._sequence = 0
        self._end = 0
        self._synced_end = 0

    @property
    def _synced(self) -> bool:
        return self._header.durability is Durability.FSYNC

    @property
    def path(self) -> Path:
        """The segment that is written."""
        return segment_path(self._directory, self.segment)

    def start(
        self,
        number: int = 1,
        *,
        last_sequence: int = 0,
        previous_end: int = 0,
        carried: Sequence[Record] = (),
        beginnings: Iterable[int] = (),
    ) -> Segment:
        """Begin segment ``number`` of a journal that was recovered: its last record is ``last_sequence``, of which the
        ``carried`` are written again, its last segment counts up to ``previous_end``, and the segments ``beginnings``
        begin with a base."""
        self.segment, self._synced_end = number - 1, previous_end
        self._sequence = last_sequence
        self._beginnings.update(beginnings)
        self._begin((), carried)
        return Segment(self.path, self._header, self._seed, self._header.initial_end)

    def append(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Write records ``(kind, payload)`` as one group."""
        parts: list[bytes] = []
        end, sequence = self._end, self._sequence
        for kind, payload in records:
            sequence += 1
            end += append_frame(parts, self._seed, Role.RECORD, kind, sequence, payload)
        mark: list[bytes] = []
        append_mark(mark, self._seed, sequence, end)
        with self._final(f"writing {end - self._end} bytes", self.path):
            if self._synced:
                self._write(parts)
                self._flush()
                # Not flushed: the next group's flush does it. It is there before anybody hears of this group.
                self._write(mark)
            else:
                self._write(parts + mark)
        self._synced_end, self._sequence = end, sequence

    def begin_segment(self, base: Sequence[tuple[int, bytes]]) -> int:
        """Go on in a new segment that begins with ``base``, and return its number."""
        self._begin(base, ())
        self._beginnings.add(self.segment)
        return self.segment

    def forget_before(self, number: int) -> None:
        """Remove the segments before ``number``. Raises ``JournalRefused`` as ``refuse_needed``."""
        self.refuse_needed(number)
        with self._final("removing old segments", self._directory):
            names = self._disk.names(self._directory)
            # The oldest first: what is left is always the end of the chain.
            for old in sorted(old for name in names if (old := segment_number(name)) is not None and old < number):
                self._disk.remove(segment_path(self._directory, old))
                self._beginnings.discard(old)
            if self._synced:
                self._disk.flush_directory(self._directory)

    def refuse_needed(self, number: int) -> None:
        """Raise ``JournalRefused`` where segment ``number`` does not begin with a base: it needs those before it."""
        if number not in self._beginnings:
            raise JournalRefused(
                f"segment {number} of {self._directory} does not begin with a base: the segments before it are needed; "
                "forget what is before one that begin_segment made"
            )

    def close(self) -> None:
        """Bring the last mark to the disk and give the descriptor back. Raises ``JournalFailed`` once at most."""
        try:
            if self.failure is None and self._synced and self._descriptor is not None:
                with self._final("flushing", self.path):
                    self._flush()
        finally:
            self._close()

    def _begin(self, base: Sequence[tuple[int, bytes]], carried: Sequence[Record]) -> None:
        number, path = self.segment + 1, segment_path(self._directory, self.segment + 1)
        unfinished = path.with_name(path.name + UNFINISHED)
        header = msgspec.structs.replace(
            self._header,
            segment=number,
            first_sequence=self._sequence + 1 - len(carried),
            previous_end=self._synced_end,
            initial_end=HEADER_BYTES + base_bytes(base) + base_bytes((r.kind, r.payload) for r in carried),
            base_count=len(base),
        )
        with self._final("beginning a segment", path):
            self._close()
            self._descriptor, self._end = self._disk.create(unfinished), 0
            self._write_initial(header, base, carried)
            if self._synced:
                self._flush()
            # Under its name it is whole: a crash before leaves the chain as it was, and a file that the next recovery
            # replaces, since it begins the segment of this number.
            self._disk.rename(unfinished, path)
            if self._synced:
                self._disk.flush_directory(self._directory)
        self.segment, self._synced_end, self._header = number, self._end, header

    def _write_initial(
        self, header: SegmentHeader, base: Sequence[tuple[int, bytes]], carried: Sequence[Record]
    ) -> None:
        raw = encode_header(header)
        self._seed, parts, waiting = header_seed(raw), [raw], len(raw)
        frames = [(Role.BASE, kind, place, payload) for place, (kind, payload) in enumerate(base)]
        frames += [(Role.RECORD, record.kind, record.sequence, record.payload) for record in carried]
        for role, kind, sequence, payload in frames:
            waiting += append_frame(parts, self._seed, role, kind, sequence, payload)
            if waiting >= _BLOCK_BYTES:
                self._write(parts)
                parts, waiting = [], 0
        self._write(parts)

    def _write(self, parts: list[bytes]) -> None:
        assert self._descriptor is not None
        block = b"".join(parts)
        while block:
            written = self._disk.write(self._descriptor, block, self._end)
            self._end += written
            block = block[written:]

    def _flush(self) -> None:
        assert self._descriptor is not None
        self._disk.flush(self._descriptor)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):  # Linux gives the descriptor back in any case, and what counts was flushed
                self._disk.close(descriptor)

    @contextmanager
    def _final(self, doing: str, path: Path) -> Iterator[None]:
        if self.failure is not None:
            raise self.failure.again()
        try:
            yield
        except OSError as error:
            self.failure = JournalFailed(path, doing, error)
            self._close()
            raise self.failure from error
