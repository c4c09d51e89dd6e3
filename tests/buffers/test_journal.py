"""The journal on an event loop: nothing blocks it, who waits is woken or told, memory is bounded."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from streamrl.journal.journal import (
    Beginning,
    Journal,
    JournalFailed,
    JournalRefused,
    Record,
    Recovered,
    open_journal,
    read_journal,
)
from streamrl.journal.journal_disk import LocalDisk
from streamrl.journal.journal_format import HEAD_BYTES, RECORD_LIMIT
from streamrl.journal.journal_progress import WriterThread

FIRST = "000001.journal"


class SlowDisk(LocalDisk):
    """A flush takes until ``go`` is set, and then fails where ``error`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.flushing = threading.Event()
        self.error: OSError | None = None
        self.flushes = 0

    def flush(self, descriptor: int) -> None:
        self.flushes += 1
        self.flushing.set()
        self.go.wait()
        if self.error:
            raise self.error
        super().flush(descriptor)

    def stop(self) -> None:
        self.go.clear()
        self.flushing.clear()


def opened(directory: Path, disk: LocalDisk | None = None, waiting_bytes: int = 1000) -> tuple[Journal, Recovered]:
    return open_journal(directory / "journal", run_id="r", disk=disk, waiting_bytes=waiting_bytes, interval_s=0)


async def stuck(journal: Journal, disk: SlowDisk) -> None:
    """Return once the writer hangs in a flush."""
    disk.stop()
    journal.append(1, b"held up")
    assert await asyncio.to_thread(disk.flushing.wait, 10), "nothing was flushed"


@pytest.mark.asyncio
async def test_records_and_bases_come_back(tmp_path: Path) -> None:
    journal, recovered = opened(tmp_path)
    assert (recovered.epoch, recovered.last_sequence, list(recovered.records())) == (1, 0, [])
    assert [journal.append(kind, payload) for kind, payload in [(0, b""), (255, b"x" * 5000)]] == [1, 2]
    await journal.durable(2)
    assert journal.durable_now == 2
    segment = journal.begin_segment((kind, payload) for kind, payload in [(7, b"a"), (8, b"b")])
    assert journal.segment == segment == 2
    third = journal.append(1, b"third")
    await journal.begun(segment)
    await journal.durable(third)
    await journal.forget_before(segment)
    await journal.close()
    await journal.close()
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == ["000002.journal", "lock"]
    expected = [Record(2, 7, b"a", True), Record(2, 8, b"b", True), Record(3, 1, b"third")]
    assert list(read_journal(tmp_path / "journal").records()) == expected
    journal, recovered = opened(tmp_path)
    assert list(recovered.records()) == expected and recovered.epoch == 2 and journal.durable_now == 3
    await journal.close()


@pytest.mark.asyncio
async def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    await journal.close()
    modes = {name: stat.S_IMODE(os.stat(tmp_path / "journal" / name).st_mode) for name in (".", FIRST, "lock")}
    assert modes == {".": 0o700, FIRST: 0o600, "lock": 0o600}


@pytest.mark.asyncio
async def test_a_slow_disk_holds_up_who_waits_for_it_and_nobody_else(tmp_path: Path) -> None:
    disk = SlowDisk()
    journal, _ = opened(tmp_path, disk)
    await stuck(journal, disk)
    flushes = disk.flushes
    waiting = asyncio.Event()

    async def wait_for(what: Coroutine[Any, Any, None]) -> None:
        waiting.set()
        await what
        arrived.append(what.__name__)

    arrived: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        await journal.room()
        for _ in range(10):
            last = journal.append(1, bytes(100))
        given_up = tasks.create_task(wait_for(journal.durable(last)))
        tasks.create_task(wait_for(journal.durable(last)))
        tasks.create_task(wait_for(journal.room()))
        await waiting.wait()
        assert journal.waiting_bytes == 11 * HEAD_BYTES + 1007 > 1000
        assert journal.durable_now == 0 and not arrived
        given_up.cancel()
        disk.go.set()
    assert sorted(arrived) == ["durable", "room"]
    assert disk.flushes == flushes + 1, "ten records, one flush"
    assert journal.waiting_bytes == 0
    await journal.close()


def test_work_that_comes_while_the_writer_looks_is_done() -> None:
    calls = []

    def work() -> bool:
        calls.append(thread)
        if len(calls) < 3:
            thread.wake()  # after it has looked: it saw nothing
        return len(calls) == 3

    thread = WriterThread(work, interval_s=0)
    thread.wake()
    thread._thread.join(10)
    assert len(calls) == 3


@pytest.mark.asyncio
async def test_a_failure_reaches_everybody_who_waits(tmp_path: Path) -> None:
    disk = SlowDisk()
    journal, _ = opened(tmp_path, disk)
    await stuck(journal, disk)
    last = journal.append(1, bytes(2000))
    segment = journal.begin_segment([(1, b"state")])
    disk.error = OSError(5, "Input/output error")
    told: list[JournalFailed] = []

    async def expect(call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with pytest.raises(JournalFailed, match="dmesg says how") as failure:
            await call()
        told.append(failure.value)

    async with asyncio.TaskGroup() as tasks:
        for call in (
            lambda: journal.durable(1),
            lambda: journal.durable(last),
            journal.room,
            lambda: journal.begun(segment),
            lambda: journal.forget_before(segment),
        ):
            tasks.create_task(expect(call))
        await asyncio.sleep(0)
        disk.go.set()
    assert len(told) == 5 and {failure.errno for failure in told} == {5}
    assert {failure.path.name for failure in told} == {"000001.journal"}
    flushes = disk.flushes
    with pytest.raises(JournalFailed):
        journal.append(1, b"")
    await journal.close()
    assert disk.flushes == flushes, "a flush was tried again"
    disk.error = None
    journal, recovered = opened(tmp_path)
    assert recovered.epoch == 2
    await journal.close()


@pytest.mark.asyncio
async def test_whatever_stops_the_writer_is_told(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    journal.append(1, "text")  # type: ignore[arg-type]
    with pytest.raises(JournalFailed, match="TypeError"):
        await journal.durable(1)
    await journal.close()


@pytest.mark.asyncio
async def test_closing_writes_what_waits(tmp_path: Path) -> None:
    disk = SlowDisk()
    journal, _ = opened(tmp_path, disk)
    await stuck(journal, disk)
    journal.append(1, b"second")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(journal.close())
        await asyncio.sleep(0)
        with pytest.raises(JournalRefused, match="closed"):
            journal.append(1, b"third")
        disk.go.set()
    assert [record.payload for record in read_journal(tmp_path / "journal").records()] == [b"held up", b"second"]


@pytest.mark.asyncio
async def test_what_cannot_be_recorded_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return RECORD_LIMIT + 1

    journal, recovered = opened(tmp_path)
    for kind, payload, said in [
        (256, b"", "kind 256"),
        (-1, b"", "kind -1"),
        (1, Huge(), "over the limit of 268435456"),
    ]:
        with pytest.raises(JournalRefused, match=said):
            journal.append(kind, payload)
        with pytest.raises(JournalRefused, match=said):
            journal.begin_segment([(kind, payload)])
    with pytest.raises(JournalRefused, match="base of no records"):
        journal.begin_segment([])
    with pytest.raises(JournalRefused, match="record 1 was not appended, the last one is 0"):
        await journal.durable(1)
    assert journal.append(1, b"first") == 1
    await journal.durable(1)
    with pytest.raises(JournalRefused, match="no beginning of this journal"):
        recovered.records(Beginning(5, 1, 1))
    await journal.close()


@pytest.mark.asyncio
async def test_recovery_streams(tmp_path: Path) -> None:
    """24 MB in frames of 1 byte to 3 MB; what is held at once is a frame and what surrounds it."""
    journal, _ = opened(tmp_path)
    sizes = [1, 3_000_000, 1_048_576, 1_048_548, 500_000] * 4
    for size in sizes:
        last = journal.append(1, bytes(size))
        await journal.durable(last)
    await journal.close()
    tracemalloc.start()
    try:
        journal, recovered = opened(tmp_path)
        assert [len(record.payload) for record in recovered.records()] == sizes
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    await journal.close()
    assert peak < 10_000_000, f"{peak} bytes at once"
