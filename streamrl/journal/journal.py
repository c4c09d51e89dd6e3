"""The journal of a run: what was acknowledged is there after any kill, and with ``fsync`` after a power cut.

    journal, recovered = open_journal(run / "journal", run_id=run_id)   # blocks: call it in a thread
    for record in recovered.records(): ...                              # the newest base, then what came after it
    sequence = journal.append(KIND, payload)                            # never blocks
    await journal.durable(sequence)                                     # on the disk
    await journal.room()                                                # before producing more: back-pressure
    segment = journal.begin_segment(base)                               # at a checkpoint
    await journal.begun(segment)
    await journal.forget_before(segment)                                # once the checkpoint is durable
    await journal.close()

Records are opaque bytes with a kind of one byte. A thread of its own writes them in groups, one flush for each group;
the event loop only puts them into a queue. There is no timeout: a slow disk makes ``durable`` and ``room`` wait.
``journal_format`` has the bytes, ``journal_reading`` tells a torn tail from damage, ``journal_recovery`` opens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from streamrl.journal.journal_disk import Disk, LocalDisk
from streamrl.journal.journal_errors import JournalDamaged, JournalFailed, JournalRefused
from streamrl.journal.journal_format import HEAD_BYTES, RECORD_LIMIT, Durability, base_bytes
from streamrl.journal.journal_progress import Lane, Progress, WriterThread
from streamrl.journal.journal_reading import Record
from streamrl.journal.journal_recovery import Beginning, Recovered, read_only, recover, take_lock
from streamrl.journal.journal_writing import SegmentWriter

__all__ = [
    "Beginning",
    "Journal",
    "JournalDamaged",
    "JournalFailed",
    "JournalRefused",
    "Record",
    "Recovered",
    "open_journal",
    "read_journal",
]

GROUP_BYTES = 8 * 1024 * 1024
"""Payload bytes after which a group is written; what waits on top of that is the next group."""

WAITING_BYTES = 64 * 1024 * 1024
"""Bytes that may wait for the disk before ``room`` waits."""

INTERVAL_S = 0.005
"""Between the beginnings of two groups, at least."""

MakeLane = Callable[[Callable[[], bool]], Lane]


class _Begin(msgspec.Struct, frozen=True):
    base: tuple[tuple[int, bytes], ...]
    cost: int


class _Forget(msgspec.Struct, frozen=True):
    segment: int
    order: int


class Journal:
    """The writing end; ``open_journal`` makes it. All methods but ``durable_now`` are for one thread, that of the event
    loop. After a failure every method but ``close`` raises ``JournalFailed``; the run has to end then."""

    def __init__(
        self, writer: SegmentWriter, release: Callable[[], None], last_sequence: int, waiting_bytes: int, lane: MakeLane
    ) -> None:
        self._writer = writer
        self._release = release
        self._waiting_limit = waiting_bytes
        self._orders: deque[tuple[int, bytes] | _Begin | _Forget] = deque()
        self._last = last_sequence
        self._last_segment = writer.segment
        self._forgets = 0
        self._taken_bytes = 0
        self._closing = False
        self._failure: JournalFailed | None = None
        self._failure_of_closing: JournalFailed | None = None
        self._durable = Progress(last_sequence)
        self._begun = Progress(writer.segment)
        self._forgotten = Progress()
        self._settled_bytes = Progress()
        self._ended = Progress()
        self._lane = lane(self._work)

    @property
    def durable_now(self) -> int:
        """Sequence number up to which all records are on the disk."""
        return self._durable.value

    @property
    def segment(self) -> int:
        """Number of the segment that the next record goes to."""
        return self._last_segment

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for the disk. More than the limit: ``room`` waits."""
        return self._taken_bytes - self._settled_bytes.value

    def append(self, kind: int, payload: bytes) -> int:
        """Take one record (``kind`` 0 to 255) and return its sequence number; the first of a run is 1. Never blocks.
        Raises ``JournalFailed``; ``JournalRefused`` for a record over ``RECORD_LIMIT``, and after ``close``."""
        self._refuse_unusable()
        _check_record(kind, payload)
        self._take((kind, payload), HEAD_BYTES + len(payload))
        self._last += 1
        return self._last

    async def durable(self, sequence: int) -> None:
        """Return once this record and all before it are on the disk. Raises ``JournalFailed``."""
        if sequence > self._last:
            raise JournalRefused(f"record {sequence} was not appended, the last one is {self._last}")
        await self._durable.reached(sequence)

    async def room(self) -> None:
        """Return once less than the limit waits for the disk. Await it before anything that leads to records:
        ``append`` itself takes whatever comes. Raises ``JournalFailed``."""
        await self._settled_bytes.reached(self._taken_bytes - self._waiting_limit)

    def begin_segment(self, base: Iterable[tuple[int, bytes]]) -> int:
        """Let the records from now on go to a new segment that begins with ``base``: ``(kind, payload)`` that stand for
        everything before. Returns its number; ``begun`` says when it is on the disk. Never blocks. The older segments
        stay: until the new one is whole under its name, a recovery begins with the one before. Raises as ``append``;
        ``JournalRefused`` for an empty base."""
        self._refuse_unusable()
        records = tuple(base)
        if not records:
            raise JournalRefused("a base of no records says nothing about the state; give the whole control state")
        for kind, payload in records:
            _check_record(kind, payload)
        cost = base_bytes(records)
        self._take(_Begin(records, cost), cost)
        self._last_segment += 1
        return self._last_segment

    async def begun(self, segment: int) -> None:
        """Return once this segment's base is on the disk: from then on a recovery begins with it. Raises
        ``JournalFailed``."""
        await self._begun.reached(segment)

    async def forget_before(self, segment: int) -> None:
        """Remove the segments before this one, after everything that was asked for before. ``segment`` begins with a
        base, and whatever else a recovery from it needs (a checkpoint) is durable. Raises ``JournalFailed``;
        ``JournalRefused`` where it does not begin with a base."""
        self._refuse_unusable()
        await self.begun(segment)
        self._writer.refuse_needed(segment)
        self._forgets += 1
        self._take(_Forget(segment, self._forgets), 0)
        await self._forgotten.reached(self._forgets)

    async def close(self) -> None:
        """Write what waits, and give the directory free. Can be called again. Raises ``JournalFailed`` where that
        fails; a failure that was told before is not told again."""
        self._closing = True
        self._lane.wake()
        await self._ended.reached(1)
        self._lane.join()  # it has nothing more to do
        if (failure := self._failure_of_closing) is not None:
            self._failure_of_closing = None
            raise failure

    def _refuse_unusable(self) -> None:
        if self._failure is not None:
            raise self._failure.again()
        if self._closing:
            raise JournalRefused("the journal was closed; open it again")

    def _take(self, order: tuple[int, bytes] | _Begin | _Forget, cost: int) -> None:
        self._taken_bytes += cost
        self._orders.append(order)
        self._lane.wake()

    # From here on: in the lane.

    def _work(self) -> bool:
        """Carry out what waits. True when it was the last time."""
        try:
            while self._failure is None and self._orders:
                self._carry_out()
        except JournalFailed as failure:
            self._fail(failure)
        except Exception as error:  # noqa: BLE001 - whatever it was, nothing is acknowledged from here on
            self._fail(JournalFailed(self._writer.path, "writing", error))
        if self._closing and (self._failure is not None or not self._orders):
            self._end()
            return True
        return False

    def _carry_out(self) -> None:
        group: list[tuple[int, bytes]] = []
        cost = 0
        while self._orders and cost < GROUP_BYTES:
            order = self._orders[0]
            if not isinstance(order, tuple):
                break
            self._orders.popleft()
            group.append(order)
            cost += HEAD_BYTES + len(order[1])
        if group:
            self._writer.append(group)
            self._durable.advance(self._durable.value + len(group))
            self._settled_bytes.advance(self._settled_bytes.value + cost)
            return
        order = self._orders.popleft()
        if isinstance(order, _Begin):
            self._begun.advance(self._writer.begin_segment(order.base))
            self._settled_bytes.advance(self._settled_bytes.value + order.cost)
        elif isinstance(order, _Forget):
            self._writer.forget_before(order.segment)
            self._forgotten.advance(order.order)

    def _fail(self, failure: JournalFailed) -> None:
        self._failure = failure
        self._orders.clear()
        for progress in (self._durable, self._begun, self._forgotten, self._settled_bytes):
            progress.fail(failure)

    def _end(self) -> None:
        told = self._failure is not None
        try:
            self._writer.close()
        except JournalFailed as failure:
            self._fail(failure)
        if not told:
            self._failure_of_closing = self._failure
        self._release()
        self._ended.advance(1)


def _check_record(kind: int, payload: bytes) -> None:
    if not 0 <= kind <= 255:
        raise JournalRefused(f"record kind {kind} is not one byte; kinds are 0 to 255")
    if len(payload) > RECORD_LIMIT:
        raise JournalRefused(f"a journal record of {len(payload)} bytes is over the limit of {RECORD_LIMIT}; split it")


def open_journal(
    directory: Path,
    *,
    run_id: str,
    durability: Literal["fsync", "process"] = "fsync",
    waiting_bytes: int = WAITING_BYTES,
    interval_s: float = INTERVAL_S,
    disk: Disk | None = None,
    lane: MakeLane | None = None,
) -> tuple[Journal, Recovered]:
    """Open the journal in ``directory`` (made if missing; its parent is there) for writing, and tell what it holds.

    Everything from the newest base on is checked before anything is changed; then a new segment is begun under the
    next epoch. Blocks for about a second for each 300 MB. ``durability``: ``process`` does not flush, and survives
    kills but not a power cut. ``run_id``: of a new journal; one that is there keeps its own. ``waiting_bytes``: when
    ``room`` waits. ``interval_s``: between two groups, at least. ``disk`` and ``lane`` are for tests and simulations.

    Raises ``JournalRefused`` (another process writes it, a later streamrl wrote it), ``JournalDamaged`` and
    ``JournalFailed``.
    """
    disk = disk or LocalDisk()
    lock = take_lock(disk, directory)
    try:
        writer, recovered = recover(disk, directory, run_id, Durability[durability.upper()])
    except BaseException:
        disk.close(lock)
        raise
    lane = lane or partial(WriterThread, interval_s=interval_s)
    return Journal(writer, partial(disk.close, lock), recovered.last_sequence, waiting_bytes, lane), recovered


def read_journal(directory: Path, *, disk: Disk | None = None) -> Recovered:
    """What the journal in ``directory`` holds, changing nothing; its run may be going on. Raises as
    ``open_journal``."""
    return read_only(disk or LocalDisk(), directory)
