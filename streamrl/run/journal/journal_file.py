"""The journal's files. An acknowledged record survives any kill, and with ``fsync`` also a power cut.

The controller process has a ``JournalFile``; ``streamrl show`` reads journals with ``read_journal``.

    journal = JournalFile(run / "journal")                # blocks: locks, checks and repairs the files
    for record in journal.initial_content.records(): ...  # the newest base, then the records after it
    nursery.start_soon(journal.run)                       # writes until it is cancelled; raises JournalFailed
    journal.begin_segment([state, ...])                   # before the first record, and after every checkpoint
    sequence = journal.append(record)                     # never blocks
    await journal.durable(sequence)                       # until the record is on the disk
    await journal.room()                                  # back-pressure: before producing more
    await journal.close()

A journal is a directory of segments, ``000001.journal`` and so on. A segment begins with a *base*: records that replace
everything before them. Therefore the newest segment alone is enough to resume. The segment before it is kept for the
case that the checkpoint of the newest one is damaged.

::

    segment   header, frames
    header    "SRLJRNL2", where the base ends (u64), CRC-32 of both
    frame     "\\xf5JF\\n", bytes of the body (u32), CRC-32 (u32), body
    body      records, each with its bytes (u32) before it

Integers are little-endian. The CRC of a frame starts from its offset, so that a copy of a frame in a body is no frame.
A frame is one group of records, written and flushed before the next one is begun. Therefore a crash tears at most the
last frame. A torn frame is cut off when the journal is opened, unless an intact frame follows it: then the journal is
damaged."""

from __future__ import annotations

import asyncio
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO
from zlib import crc32

import anyio
from anyio import to_thread
from msgspec import Struct

from streamrl.base.atomic_files import flush_directory, hold_lock
from streamrl.base.notifier import Notifier
from streamrl.run.journal.log_errors import JournalDamaged, JournalFailed, JournalRefused, failing

GROUP_BYTES = 8 << 20
"""Number of bytes of records with which a group is closed."""

RECORD_LIMIT = 256 << 20
"""Largest record, in bytes."""

WAITING_BYTES = 64 << 20
"""Number of unwritten bytes above which ``JournalFile.room`` waits."""

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


class JournalContent(Struct, frozen=True):
    """Content of a journal.

    ``segments``: paths, oldest first, without a gap;
    ``last_frame``: offset of the last frame in the newest segment;
    ``end``: offset of its end; bytes after it are torn."""

    segments: tuple[Path, ...] = ()
    last_frame: int = 0
    end: int = 0

    def records(self, segment: int = -1) -> Iterator[bytes]:
        """Yield the base of ``segments[segment]``, then every record after it, without the bases of later segments.
        Raises ``JournalDamaged``, ``JournalFailed``."""
        for place, path in enumerate(self.segments[segment:]):
            for offset, body, is_base in _frames(path, may_be_torn=path == self.segments[-1]):
                if not (place and is_base):
                    yield from _records(path, offset, body)


def read_journal(directory: Path) -> JournalContent:
    """Check the newest segment of a journal, without changing it; a run may be writing it. Raises ``JournalDamaged``,
    ``JournalRefused`` for another format, ``JournalFailed``."""
    with failing(directory, "listing"):
        names = os.listdir(directory)
    numbers = {number for number in map(_segment_number, names) if number is not None}
    if not numbers:
        return JournalContent()
    first = last = max(numbers)
    while first - 1 in numbers:
        first -= 1
    newest = _segment_path(directory, last)
    last_frame = end = _HEADER.size
    for offset, body, _ in _frames(newest, may_be_torn=True):
        last_frame = offset
        end = offset + _FRAME.size + len(body)
    segments = tuple(_segment_path(directory, number) for number in range(first, last + 1))
    return JournalContent(segments, last_frame, end)


def _frames(path: Path, *, may_be_torn: bool) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the offset and body of each frame, and whether the frame belongs to the base."""
    with failing(path, "reading"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        base_end = _read_header(path, file.read(_HEADER.size))
        at = _HEADER.size
        while at < size:
            body = _read_body(file, at, size)
            if body is None:
                if at < base_end or not may_be_torn:
                    raise JournalDamaged(path, at, "a frame does not match its checksum")
                intact_frame = _intact_frame_after(file, at + 1, size)
                if intact_frame is not None:
                    raise JournalDamaged(
                        path, at, f"a frame does not match its checksum, that at byte {intact_frame} does"
                    )
                return
            yield at, body, at < base_end
            at += _FRAME.size + len(body)
        if at < base_end:
            raise JournalDamaged(path, at, f"the file ends here, and its base has {base_end} bytes")


def _read_header(path: Path, raw: bytes) -> int:
    """Return the offset at which the base ends."""
    magic, base_end, check = _HEADER.unpack(raw) if len(raw) == _HEADER.size else (b"", 0, 0)
    if magic[:7] == _MAGIC[:7] and magic != _MAGIC:
        raise JournalRefused(f"{path} has another format; resume with the streamrl that wrote it")
    if magic != _MAGIC or check != crc32(raw[:16]):
        raise JournalDamaged(path, 0, "it does not begin with the header of a segment")
    return int(base_end)


def _read_body(file: BinaryIO, at: int, size: int) -> bytes | None:
    """Return the body of the frame that begins at ``at``; None where there is no intact frame."""
    file.seek(at)
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    magic, length, check = _FRAME.unpack(head)
    if magic != _FRAME_MAGIC or length > size - at - _FRAME.size:
        return None
    body = file.read(length)
    if len(body) != length or _check(body, at) != check:
        return None
    return body


def _check(body: bytes, at: int) -> int:
    """Return the CRC-32 of a frame. It starts from the offset ``at`` of the frame, and includes the length."""
    return crc32(body, crc32(_LENGTH.pack(len(body)), at & 0xFFFFFFFF))


def _intact_frame_after(file: BinaryIO, at: int, size: int) -> int | None:
    """Return the offset of the first intact frame that begins at ``at`` or after it."""
    while at < size:
        file.seek(at)
        window = file.read(_SEARCH_BYTES)
        place = window.find(_FRAME_MAGIC)
        if place < 0:
            at += max(len(window) - len(_FRAME_MAGIC) + 1, 1)  # a magic number may begin at the end of the window
        elif _read_body(file, at + place, size) is not None:
            return at + place
        else:
            at += place + 1
    return None


def _records(path: Path, offset: int, body: bytes) -> Iterator[bytes]:
    """Yield the records in the body of the frame at ``offset`` of ``path``."""
    place = 0
    while place < len(body):
        start = place + _LENGTH.size
        length = _LENGTH.unpack_from(body, place)[0] if start <= len(body) else len(body)
        place = start + length
        if place > len(body):
            raise JournalDamaged(path, offset, "a frame whose records do not fill it")
        yield body[start:place]


def writer_of(directory: Path) -> int | None:
    """Return the id of the process on this machine that writes the journal; None: there is none. A lock file outlives
    its process and ids are used again, so that the process must have the file open."""
    lock = (directory / LOCK).resolve()
    with suppress(OSError, ValueError):
        process = int(lock.read_text())
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(FileNotFoundError):  # the descriptor was closed meanwhile
                if os.readlink(descriptor) == str(lock):
                    return process
    return None


def _segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}{SUFFIX}"


def _segment_number(name: str) -> int | None:
    """Return the number of the segment with the file name ``name``; None for another file."""
    stem = name.removesuffix(SUFFIX)
    if not (name.endswith(SUFFIX) and stem.isascii() and stem.isdigit()):
        return None
    number = int(stem)
    return number if name == _segment_path(Path(), number).name else None


# ---- writing -------------------------------------------------------------------------------------


class JournalFile:
    """A journal that is open for writing. ``initial_content``: content when it was opened. After a failure every method
    except ``close`` raises ``JournalFailed``, ``run`` included."""

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        """Open the journal in ``directory``, which is made if missing. Blocking. ``fsync``: whether records survive a
        power cut, and not only kills. Raises ``JournalRefused`` while another process writes the journal, and the
        errors of ``read_journal``."""
        self._files = _SegmentFiles(directory, fsync)
        self.initial_content = self._files.content
        self._queue: deque[bytes | tuple[bytes, ...]] = deque()  # a tuple is the base of a new segment
        self._last = 0  # sequence number of the newest item
        self._written = 0  # sequence number of the newest item on the disk
        self._waiting_bytes = 0
        self._failure: JournalFailed | None = None
        self._closed = False
        self._has_items = asyncio.Event()
        self._progress = Notifier()
        self._writing = asyncio.Lock()

    def append(self, record: bytes) -> int:
        """Queue one record and return its sequence number. Never blocks. Raises ``JournalRefused`` for a record over
        ``RECORD_LIMIT`` and after ``close``; ``JournalFailed``."""
        return self._enqueue(record, len(record), len(record))

    def begin_segment(self, base: Iterable[bytes]) -> int:
        """Queue a new segment with ``base``: records that replace everything before. Once it is on the disk, only the
        segment before it is kept, so that anything else that the base needs (a checkpoint) must be durable. Never
        blocks. Returns and raises as ``append``."""
        records = tuple(base)
        sizes = [len(record) for record in records]
        return self._enqueue(records, sum(sizes), max(sizes, default=0))

    async def durable(self, sequence: int) -> None:
        """Return once the record ``sequence`` and all before it are on the disk. Raises ``JournalFailed``."""
        while self._written < sequence:
            self._refuse_failed()
            await self._progress.wait()

    async def room(self) -> None:
        """Return once at most ``WAITING_BYTES`` are unwritten. Raises ``JournalFailed``."""
        while self._waiting_bytes > WAITING_BYTES:
            self._refuse_failed()
            await self._progress.wait()

    async def run(self) -> None:
        """Write queued records in groups until cancelled. Raises ``JournalFailed``."""
        while True:
            await self._has_items.wait()
            await self._write_queue()
            await anyio.sleep(INTERVAL_S)

    async def close(self) -> None:
        """Write the queue and release the directory, also when the caller is cancelled. Idempotent. Raises
        ``JournalFailed``, unless another method has raised it."""
        with anyio.CancelScope(shield=True):
            self._closed = True
            try:
                if self._failure is None:
                    await self._write_queue()
            finally:
                self.release()

    def release(self) -> None:
        """Release the directory without writing the queue. Idempotent."""
        self._files.close()

    def _enqueue(self, item: bytes | tuple[bytes, ...], size: int, largest: int) -> int:
        self._refuse_failed()
        if self._closed:
            raise JournalRefused("the journal was closed; open it again")
        if largest > RECORD_LIMIT:
            raise JournalRefused(f"a journal record of {largest} bytes is over the limit of {RECORD_LIMIT}; split it")
        self._queue.append(item)
        self._waiting_bytes += size
        self._last += 1
        self._has_items.set()
        return self._last

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _write_queue(self) -> None:
        async with self._writing:
            self._has_items.clear()
            last = self._last  # later items are written by the next call
            while self._written < last:
                first = self._queue[0]
                if isinstance(first, bytes):
                    group: Sequence[bytes] = next(_groups(self._queue))
                    write: Callable[[Sequence[bytes]], None] = self._append
                else:
                    group = first
                    write = self._begin
                try:
                    await to_thread.run_sync(write, group)
                except JournalFailed as failure:
                    self._failure = failure
                    raise
                finally:
                    self._progress.notify()
                self._waiting_bytes -= sum(map(len, group))

    # These two run in a thread, and remove from the queue what they have written: the next call does not write it again
    # if the waiting task is cancelled meanwhile.

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
    """Yield records in lists of about ``GROUP_BYTES``, up to the first item that is the base of a segment."""
    group = []
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
    """The files of a journal that is open for writing. Blocking. The first failure is final: after a failed flush the
    content of the disk is unknown, and Linux would report a second flush as successful."""

    def __init__(self, directory: Path, fsync: bool) -> None:
        self._directory = directory
        self._fsync = fsync
        self._file = -1
        self._end = 0
        self._lock = _take_lock(directory)
        try:
            self.content = read_journal(directory)
            self._number = int(self.content.segments[-1].stem) if self.content.segments else 0
            self._repair()
        except BaseException:
            self.close()
            raise

    def append(self, records: Sequence[bytes]) -> None:
        """Write one group after the last one."""
        with failing(_segment_path(self._directory, self._number), "writing"):
            self._write(_frame(records, self._end))
            self._flush()

    def begin(self, base: Sequence[bytes]) -> None:
        """Begin a new segment, and remove all segments but it and the one before it."""
        path = _segment_path(self._directory, self._number + 1)
        unfinished = path.with_name(path.name + UNFINISHED)
        groups = list(_groups(base))
        frame_sizes = [_FRAME.size + sum(_LENGTH.size + len(record) for record in group) for group in groups]
        base_end = _HEADER.size + sum(frame_sizes)
        with failing(path, "beginning a segment"):
            self._close_file()
            self._end = 0
            self._file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            header = _HEADER.pack(_MAGIC, base_end, 0)[:16]
            self._write(header + _LENGTH.pack(crc32(header)))
            for group in groups:
                self._write(_frame(group, self._end))
            self._flush()
            os.rename(unfinished, path)  # a segment with this name is complete, and a crash before changes nothing
            self._flush_directory()
            self._number += 1
            for name in os.listdir(self._directory):
                number = _segment_number(name)
                if number is not None and number < self._number - 1:
                    os.unlink(self._directory / name)

    def close(self) -> None:
        """Close the file and release the lock."""
        self._close_file()
        self._lock.close()

    def _repair(self) -> None:
        """Cut off a torn frame, and flush what a process that died may have left in the cache."""
        for leftover in self._directory.glob(f"*{UNFINISHED}"):
            with failing(leftover, "removing"):
                leftover.unlink()
        for path in self.content.segments:
            with failing(path, "opening"):
                self._close_file()
                self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
                if path == self.content.segments[-1]:
                    os.ftruncate(self._file, self.content.end)
                    # The last frame is written again: after a failed flush Linux has it in the cache, marks it as clean
                    # and never writes it.
                    self._end = self.content.last_frame
                    self._write(os.pread(self._file, self.content.end - self._end, self._end))
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
            with suppress(OSError):  # Linux closes the descriptor in any case, and the data were flushed before
                os.close(file)


def _frame(records: Sequence[bytes], at: int) -> bytes:
    """Return the bytes of a frame at the offset ``at``."""
    parts: list[bytes] = []
    for record in records:
        parts += (_LENGTH.pack(len(record)), record)
    body = b"".join(parts)
    return _FRAME.pack(_FRAME_MAGIC, len(body), _check(body, at)) + body


def _take_lock(directory: Path) -> IO[bytes]:
    """Lock the journal for this process until the returned file is closed."""
    with failing(directory, "making the directory"):
        directory.mkdir(mode=0o700, exist_ok=True)
        flush_directory(directory.parent)
    remedy = "end that run first, or wait until it ended"
    with failing(directory / LOCK, "locking"):
        return hold_lock(
            directory / LOCK,
            lambda holder: JournalRefused(f"journal {directory} is being written by process {holder}; {remedy}"),
        )
