"""The journal's files: an acknowledged record is there after any kill, and with ``fsync`` after a power cut.

    journal = JournalFile(run / "journal")            # blocks: locks, checks and repairs what is there
    for record in journal.found.records(): ...    # the newest base, then the records after it
    nursery.start_soon(journal.run)               # writes until it is cancelled; raises JournalFailed
    journal.begin_segment([state, ...])           # first of all, and after every checkpoint
    sequence = journal.append(record)             # never blocks
    await journal.durable(sequence)               # until it is on the disk
    await journal.room()                          # back-pressure: before producing more
    await journal.close()

A journal is a directory of segments, ``000001.journal`` and so on. A segment begins with a *base*: records that stand
for everything before it. So the newest segment alone is enough to resume; the one before it stays as a second chance.

::

    segment   header, frames
    header    "SRLJRNL2", where the base ends (u64), CRC-32 of both
    frame     "\\xf5JF\\n", bytes of the body (u32), CRC-32 (u32), body
    body      records, each with its bytes (u32) before it

Integers are little-endian. The CRC of a frame starts from its offset: a copy of a frame in a body is no frame. A frame
is one group of records, written and flushed before the next is begun: after a crash at most the last one is torn. It is
cut off when the journal is opened, unless a whole frame follows it: then the journal is damaged."""

from __future__ import annotations

import asyncio
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO
from zlib import crc32

import anyio
import msgspec
from anyio import to_thread

from streamrl.base.atomic_files import flush_directory, hold_lock
from streamrl.run.journal.log_errors import JournalDamaged, JournalFailed, JournalRefused, failing

GROUP_BYTES = 8 << 20
"""A group is closed when its records have this many bytes."""

RECORD_LIMIT = 256 << 20
"""Largest record, in bytes."""

WAITING_BYTES = 64 << 20
"""``JournalFile.room`` waits while more wait for the disk."""

INTERVAL_S = 0.005
"""Pause between two groups, so that a fast disk does not make many small groups of a stream of records."""

SUFFIX = ".journal"
UNFINISHED = ".unfinished"
LOCK = "lock"

_MAGIC = b"SRLJRNL2"
_HEADER = struct.Struct("<8sQI")
_FRAME_MAGIC = b"\xf5JF\n"
_FRAME = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")
_SEARCH_BYTES = 1 << 20


# ---- reading -------------------------------------------------------------------------------------


class Found(msgspec.Struct, frozen=True):
    """Content of a journal. ``segments``: paths, oldest first, without a gap; ``last_frame``, ``end``: offsets in the
    last of them; what follows ``end`` there is torn."""

    segments: tuple[Path, ...] = ()
    last_frame: int = 0
    end: int = 0

    def records(self, segment: int = -1) -> Iterator[bytes]:
        """The base of ``segments[segment]``, then every record since, without the bases of later segments. Raises
        ``JournalDamaged``, ``JournalFailed``."""
        for place, path in enumerate(self.segments[segment:] if self.segments else ()):
            for offset, body, is_base in _frames(path, may_be_torn=path == self.segments[-1]):
                if not (place and is_base):
                    yield from _records(path, offset, body)


def read_journal(directory: Path) -> Found:
    """Check the newest segment of a journal, without changing it; a run may be writing it. Raises ``JournalDamaged``,
    ``JournalRefused`` for another format, ``JournalFailed``."""
    with failing(directory, "listing"):
        numbers = {n for name in os.listdir(directory) if (n := _segment_number(name)) is not None}
    if not numbers:
        return Found()
    first = last = max(numbers)
    while first - 1 in numbers:
        first -= 1
    newest = _segment_path(directory, last)
    last_frame = end = _HEADER.size
    for offset, body, _ in _frames(newest, may_be_torn=True):
        last_frame = offset
        end = offset + _FRAME.size + len(body)
    return Found(tuple(_segment_path(directory, n) for n in range(first, last + 1)), last_frame, end)


def _frames(path: Path, *, may_be_torn: bool) -> Iterator[tuple[int, bytes, bool]]:
    """Offset and body of each frame, and whether it belongs to the base."""
    with failing(path, "reading"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        base_end = _read_header(path, file.read(_HEADER.size))
        at = _HEADER.size
        while at < size:
            body = _read_body(file, at, size)
            if body is None:
                if at < base_end or not may_be_torn:
                    raise JournalDamaged(path, at, "a frame does not match its checksum")
                if (whole := _whole_frame_after(file, at + 1, size)) is not None:
                    raise JournalDamaged(path, at, f"a frame does not match its checksum, that at byte {whole} does")
                return
            yield at, body, at < base_end
            at += _FRAME.size + len(body)
        if at < base_end:
            raise JournalDamaged(path, at, f"the file ends here, and its base has {base_end} bytes")


def _read_header(path: Path, raw: bytes) -> int:
    magic, base_end, check = _HEADER.unpack(raw) if len(raw) == _HEADER.size else (b"", 0, 0)
    if magic[:7] == _MAGIC[:7] and magic != _MAGIC:
        raise JournalRefused(f"{path} has another format; resume with the streamrl that wrote it")
    if magic != _MAGIC or check != crc32(raw[:16]):
        raise JournalDamaged(path, 0, "it does not begin with the header of a segment")
    return int(base_end)


def _read_body(file: BinaryIO, at: int, size: int) -> bytes | None:
    """Body of the frame that begins at ``at``; None where there is no whole one."""
    file.seek(at)
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    magic, length, check = _FRAME.unpack(head)
    if magic != _FRAME_MAGIC or length > size - at - _FRAME.size:
        return None
    body = file.read(length)
    return body if len(body) == length and _check(body, at) == check else None


def _check(body: bytes, at: int) -> int:
    return crc32(body, crc32(_LENGTH.pack(len(body)), at & 0xFFFFFFFF))


def _whole_frame_after(file: BinaryIO, at: int, size: int) -> int | None:
    while at < size:
        file.seek(at)
        window = file.read(_SEARCH_BYTES)
        place = window.find(_FRAME_MAGIC)
        if place < 0:
            at += max(len(window) - len(_FRAME_MAGIC) + 1, 1)
        elif _read_body(file, at + place, size) is not None:
            return at + place
        else:
            at += place + 1
    return None


def _records(path: Path, offset: int, body: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(body):
        start = place + _LENGTH.size
        length = _LENGTH.unpack_from(body, place)[0] if start <= len(body) else len(body)
        place = start + length
        if place > len(body):
            raise JournalDamaged(path, offset, "a frame whose records do not fill it")
        yield body[start:place]


def writer_of(directory: Path) -> int | None:
    """The process of this machine that writes this journal; None where none does."""
    lock = (directory / LOCK).resolve()
    with suppress(OSError, ValueError):
        process = int(lock.read_text())
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(descriptor) == str(lock):
                    return process
    return None


def _segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}{SUFFIX}"


def _segment_number(name: str) -> int | None:
    stem = name.removesuffix(SUFFIX)
    named = name.endswith(SUFFIX) and stem.isascii() and stem.isdigit()
    return int(stem) if named and name == _segment_path(Path(), int(stem)).name else None


# ---- writing -------------------------------------------------------------------------------------


class JournalFile:
    """The writing end. ``found``: what was there when it was opened. After a failure every method but ``close`` raises
    ``JournalFailed``, and so does ``run``."""

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        """Open the journal in ``directory`` (made if missing) for writing. Blocking. ``fsync`` False: records survive
        kills, but not a power cut. Raises ``JournalRefused`` while another process writes it, and as
        ``read_journal``."""
        self._files = _SegmentFiles(directory, fsync)
        self.found = self._files.found
        self._queue: deque[bytes | tuple[bytes, ...]] = deque()  # a tuple is the base of a new segment
        self._last = 0
        self._written = 0
        self._waiting_bytes = 0
        self._failure: JournalFailed | None = None
        self._closed = False
        self._wanted = asyncio.Event()
        self._progress = asyncio.Event()
        self._writing = asyncio.Lock()

    def append(self, record: bytes) -> int:
        """Take one record and return its sequence number. Never blocks. Raises ``JournalRefused`` for one over
        ``RECORD_LIMIT``, and after ``close``; ``JournalFailed``."""
        return self._take(record, len(record), len(record))

    def begin_segment(self, base: Iterable[bytes]) -> int:
        """Start a new segment with ``base``: records that stand for everything before. Segments older than the one
        before it are removed once it is on the disk, so whatever else the base needs (a checkpoint) must be durable.
        Never blocks. Returns a sequence number and raises as ``append``."""
        records = tuple(base)
        return self._take(records, sum(map(len, records)), max(map(len, records), default=0))

    async def durable(self, sequence: int) -> None:
        """Return once this record and all before it are on the disk. Raises ``JournalFailed``."""
        while self._written < sequence:
            self._refuse_failed()
            await self._progress.wait()

    async def room(self) -> None:
        """Return once at most ``WAITING_BYTES`` wait for the disk. Raises ``JournalFailed``."""
        while self._waiting_bytes > WAITING_BYTES:
            self._refuse_failed()
            await self._progress.wait()

    async def run(self) -> None:
        """Write what is appended, in groups, until cancelled. Raises ``JournalFailed``."""
        while True:
            await self._wanted.wait()
            await self._write_waiting()
            await anyio.sleep(INTERVAL_S)

    async def close(self) -> None:
        """Write what waits and release the directory, also when the caller is cancelled. Idempotent. Raises
        ``JournalFailed``, unless another method did."""
        with anyio.CancelScope(shield=True):
            self._closed = True
            try:
                if self._failure is None:
                    await self._write_waiting()
            finally:
                self.release()

    def release(self) -> None:
        """Release the directory without writing what waits. Idempotent."""
        self._files.close()

    def _take(self, item: bytes | tuple[bytes, ...], size: int, largest: int) -> int:
        self._refuse_failed()
        if self._closed:
            raise JournalRefused("the journal was closed; open it again")
        if largest > RECORD_LIMIT:
            raise JournalRefused(f"a journal record of {largest} bytes is over the limit of {RECORD_LIMIT}; split it")
        self._queue.append(item)
        self._waiting_bytes += size
        self._last += 1
        self._wanted.set()
        return self._last

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _write_waiting(self) -> None:
        async with self._writing:
            self._wanted.clear()
            last = self._last  # what comes meanwhile makes a group of its own, later
            while self._written < last:
                first = self._queue[0]
                group = next(_groups(self._queue)) if isinstance(first, bytes) else first
                write = self._append if isinstance(first, bytes) else self._begin
                try:
                    await to_thread.run_sync(write, group)
                except JournalFailed as failure:
                    self._failure = failure
                    raise
                finally:
                    done = self._progress
                    self._progress = asyncio.Event()
                    done.set()
                self._waiting_bytes -= sum(map(len, group))

    # In a thread. What is written leaves the queue there: a caller that is cancelled meanwhile does not see it again.

    def _append(self, group: Sequence[bytes]) -> None:
        self._files.append(group)
        for _ in group:
            self._queue.popleft()
        self._written += len(group)

    def _begin(self, base: Sequence[bytes]) -> None:
        self._files.begin(base)
        self._queue.popleft()
        self._written += 1


def _groups(items: Iterable[bytes | tuple[bytes, ...]]) -> Iterator[list[bytes]]:
    """Records, up to the first that is none, in lists of about ``GROUP_BYTES``."""
    group: list[bytes] = []
    size = 0
    for item in items:
        if not isinstance(item, bytes):
            break
        group.append(item)
        size += len(item)
        if size >= GROUP_BYTES:
            yield group
            group = []
            size = 0
    if group:
        yield group


class _SegmentFiles:
    """The files of a journal that is open for writing. Blocking; the first failure is final, for after a failed flush
    nobody knows what is on the disk, and a second flush would say that all is well."""

    def __init__(self, directory: Path, fsync: bool) -> None:
        self._directory = directory
        self._fsync = fsync
        self._file = -1
        self._end = 0
        self._lock = _take_lock(directory)
        try:
            self.found = read_journal(directory)
            self._number = int(self.found.segments[-1].stem) if self.found.segments else 0
            self._repair()
        except BaseException:
            self.close()
            raise

    def append(self, records: Sequence[bytes]) -> None:
        """Write one group behind the last."""
        with failing(_segment_path(self._directory, self._number), "writing"):
            self._write(_frame(records, self._end))
            self._flush()

    def begin(self, base: Sequence[bytes]) -> None:
        """Begin a new segment; remove those older than the one before it."""
        path = _segment_path(self._directory, self._number + 1)
        unfinished = path.with_name(path.name + UNFINISHED)
        groups = list(_groups(base))
        base_end = _HEADER.size + sum(_FRAME.size + sum(_LENGTH.size + len(r) for r in group) for group in groups)
        with failing(path, "beginning a segment"):
            self._close_file()
            self._end = 0
            self._file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            header = _HEADER.pack(_MAGIC, base_end, 0)[:16]
            self._write(header + _LENGTH.pack(crc32(header)))
            for group in groups:
                self._write(_frame(group, self._end))
            self._flush()
            os.rename(unfinished, path)  # whole under its name: a crash before leaves the journal as it was
            self._flush_directory()
            self._number += 1
            for name in os.listdir(self._directory):
                if (number := _segment_number(name)) is not None and number < self._number - 1:
                    os.unlink(self._directory / name)

    def close(self) -> None:
        """Give the files and the lock back."""
        self._close_file()
        self._lock.close()

    def _repair(self) -> None:
        """Cut a torn tail, and bring to the disk what was only in the cache of a process that died."""
        for leftover in self._directory.glob(f"*{UNFINISHED}"):
            with failing(leftover, "removing"):
                leftover.unlink()
        for path in self.found.segments:
            with failing(path, "opening"):
                self._close_file()
                self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                if path == self.found.segments[-1]:
                    os.ftruncate(self._file, self.found.end)
                    # After a failed flush Linux has the last frame in its cache, calls it clean and never writes it.
                    self._end = self.found.last_frame
                    self._write(os.pread(self._file, self.found.end - self._end, self._end))
                self._flush()
        with failing(self._directory, "flushing"):
            self._flush_directory()

    def _write(self, block: bytes) -> None:
        while block:
            written = os.pwrite(self._file, block, self._end)
            self._end += written
            block = block[written:]

    def _flush(self) -> None:
        if self._fsync:
            os.fdatasync(self._file)

    def _flush_directory(self) -> None:
        if self._fsync:
            flush_directory(self._directory)

    def _close_file(self) -> None:
        file = self._file
        self._file = -1
        if file >= 0:
            with suppress(OSError):  # Linux gives the descriptor back in any case, and what counts was flushed
                os.close(file)


def _frame(records: Sequence[bytes], at: int) -> bytes:
    body = b"".join(part for record in records for part in (_LENGTH.pack(len(record)), record))
    return _FRAME.pack(_FRAME_MAGIC, len(body), _check(body, at)) + body


def _take_lock(directory: Path) -> IO[bytes]:
    """Lock the journal for this writer until the returned file is closed."""
    with failing(directory, "making the directory"):
        directory.mkdir(mode=0o700, exist_ok=True)
        flush_directory(directory.parent)
    remedy = "end that run first, or wait until it ended"
    with failing(directory / LOCK, "locking"):
        return hold_lock(
            directory / LOCK,
            lambda holder: JournalRefused(f"journal {directory} is being written by process {holder}; {remedy}"),
        )
