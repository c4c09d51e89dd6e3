"""The journal's bytes: cut anywhere, flipped anywhere, half of a group on the disk; and its back-pressure."""

from __future__ import annotations

import errno
import os
import random
import shlex
import stat
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.run.journal import journal_file
from streamrl.run.journal.journal_file import JournalFile, read_journal
from streamrl.run.journal.log_errors import JournalDamaged, JournalFailed, JournalRefused

BASE, MORE = [b"the state", b"\xff" * 33], [[b"first"], [b"", b"a" * 40, b"\xf5JF\n" * 3], [b"the last"]]


@asynccontextmanager
async def writing(directory: Path, *, fsync: bool = False) -> AsyncIterator[JournalFile]:
    journal = JournalFile(directory / "journal", fsync=fsync)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.run)
        try:
            yield journal
        finally:
            await journal.close()
            tasks.cancel_scope.cancel()


async def write(directory: Path, base: Sequence[bytes], groups: Sequence[Sequence[bytes]]) -> Path:
    """A new segment of ``base`` and ``groups``; its path."""
    async with writing(directory) as journal:
        if base:
            await journal.durable(journal.begin_segment(base))
        for group in groups:
            await journal.durable([journal.append(record) for record in group][-1])
    return max((directory / "journal").glob("*.journal"))


def ends_of_frames(path: Path) -> list[int]:
    return [offset + 12 + len(body) for offset, body, _ in journal_file._frames(path, may_be_torn=False)]


def content(directory: Path) -> list[bytes]:
    return list(read_journal(directory / "journal").records())


def flat(groups: Sequence[Sequence[bytes]]) -> list[bytes]:
    return [record for group in groups for record in group]


async def test_records_and_bases_come_back(tmp_path: Path) -> None:
    async with writing(tmp_path, fsync=True) as journal:
        assert journal.initial_content.segments == () and list(journal.initial_content.records()) == []
        journal.begin_segment([b"nothing yet"])
        await journal.durable(journal.append(b"x" * 5000))
        await journal.durable(journal.begin_segment(BASE))
        assert content(tmp_path) == BASE, "it may be read while it is written"
        journal.append(b"more")
        journal.begin_segment([b"newer"])
    names = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "journal").iterdir()}
    assert names == {"000002.journal": 0o600, "000003.journal": 0o600, "lock": 0o600}, "for its user alone"
    assert content(tmp_path) == [b"newer"]
    found = read_journal(tmp_path / "journal")
    assert list(found.records(0)) == [*BASE, b"more"], "from the older base, without the newer one"
    await write(tmp_path, [], [[b"after"]])
    assert content(tmp_path) == [b"newer", b"after"]
    assert list(read_journal(tmp_path / "journal").records(0)) == [*BASE, b"more", b"after"]


async def test_a_cut_at_every_offset(tmp_path: Path) -> None:
    path = await write(tmp_path, BASE, MORE)
    whole, ends = path.read_bytes(), ends_of_frames(path)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        if size < ends[0]:
            with pytest.raises(JournalDamaged):
                JournalFile(path.parent)
            assert path.read_bytes() == whole[:size], "nothing was changed"
            continue
        groups = MORE[: sum(end <= size for end in ends) - 1]
        assert content(tmp_path) == BASE + flat(groups)
        await write(tmp_path, [], [[b"goes on"]])
        assert content(tmp_path) == [*BASE, *flat(groups), b"goes on"]


async def test_a_flipped_bit_at_every_offset(tmp_path: Path) -> None:
    path = await write(tmp_path, BASE, MORE)
    whole, ends = path.read_bytes(), ends_of_frames(path)
    for place in range(len(whole)):
        raw = bytearray(whole)
        raw[place] ^= 1 << (place % 8)
        path.write_bytes(raw)
        if place < ends[-2]:
            with pytest.raises(JournalRefused if place == 7 else JournalDamaged) as refused:
                content(tmp_path)
            if isinstance(refused.value, JournalDamaged):
                assert refused.value.offset <= place and str(path) in str(refused.value)
        else:  # damage of the last group is a torn tail
            assert content(tmp_path) == BASE + flat(MORE[:-1])


@pytest.mark.parametrize("tail", [bytes(100), b"\xf5JF\n" * 20, b"\xf5JF\n\xff\xff\xff\xff" + bytes(90)])
async def test_a_tail_that_was_never_written(tmp_path: Path, tail: bytes) -> None:
    path = await write(tmp_path, BASE, MORE)
    path.write_bytes(path.read_bytes() + tail)
    assert read_journal(path.parent).end == path.stat().st_size - len(tail)
    await write(tmp_path, [], [[b"goes on"]])
    assert content(tmp_path) == [*BASE, *flat(MORE), b"goes on"]


@settings(max_examples=60, deadline=None)
@given(sectors=st.lists(st.booleans(), min_size=8, max_size=8))
async def test_a_power_cut_in_the_middle_of_a_group(
    tmp_path_factory: pytest.TempPathFactory, sectors: list[bool]
) -> None:
    """Any of its sectors may be on the disk: the group counts whole or not at all, and never as damage."""
    directory = tmp_path_factory.mktemp("cut")
    group = [random.Random(n).randbytes(300) for n in range(12)]
    path = await write(directory, BASE, [*MORE, group])
    raw, begin = bytearray(path.read_bytes()), ends_of_frames(path)[-2]
    for number, written in enumerate(sectors):
        place = max(begin, (begin // 512 + number) * 512)
        end = min((begin // 512 + number + 1) * 512, len(raw))
        if not written and place < end:
            raw[place:end] = bytes(end - place)
    path.write_bytes(raw)
    assert content(directory) in ([*BASE, *flat(MORE)], [*BASE, *flat(MORE), *group])


async def test_frames_of_another_place_are_none(tmp_path: Path) -> None:
    path = await write(tmp_path, BASE, MORE)
    raw, ends = path.read_bytes(), ends_of_frames(path)
    path.write_bytes(raw + raw[ends[0] : ends[1]])
    assert content(tmp_path) == [*BASE, *flat(MORE)]
    await write(tmp_path, [], [[raw[ends[0] : ends[1]]]])  # in a record
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + b"?")
    assert content(tmp_path) == [*BASE, *flat(MORE)], "what is inside the torn frame does not vouch for it"


async def test_each_segment_alone(tmp_path: Path) -> None:
    older = await write(tmp_path, BASE, MORE)
    newer = await write(tmp_path, [b"newer"], [[b"last"]])
    older.write_bytes(older.read_bytes()[:-1])
    assert content(tmp_path) == [b"newer", b"last"], "the older one is not needed"
    with pytest.raises(JournalDamaged, match="000001"):
        list(read_journal(tmp_path / "journal").records(0))  # a torn frame with a segment behind it
    newer.rename(newer.with_name("000003.journal"))
    assert [path.stem for path in read_journal(tmp_path / "journal").segments] == ["000003"]


async def test_another_format_is_refused_and_damage_names_a_way_out(tmp_path: Path) -> None:
    path = await write(tmp_path, BASE, MORE)
    raw = path.read_bytes()
    path.write_bytes(b"SRLJRNL\n" + raw[8:])
    with pytest.raises(JournalRefused, match="another format; resume with the streamrl that wrote it"):
        JournalFile(path.parent)
    path.write_bytes(raw[:30])
    with pytest.raises(JournalDamaged) as damaged:
        JournalFile(path.parent)
    command = shlex.split(str(damaged.value).rpartition("again): ")[2])
    assert command[:3] == ["streamrl", "train", str(tmp_path / "recipe.toml")]
    path.write_bytes(raw)
    JournalFile(path.parent).release()  # what failed to open it holds no lock


async def test_what_a_crash_left_unfinished_is_removed(tmp_path: Path) -> None:
    path = await write(tmp_path, BASE, MORE)
    (path.parent / "000002.journal.unfinished").write_bytes(b"half a base")
    await write(tmp_path, [b"newer"], [])
    assert content(tmp_path) == [b"newer"] and not list(path.parent.glob("*.unfinished"))


async def test_the_last_group_is_written_again_on_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last group is written again when a journal is opened. After a failed flush Linux reads it from its cache and
    would never write it."""
    path = await write(tmp_path, BASE, MORE)
    raw, begin = path.read_bytes(), ends_of_frames(path)[-2]
    calls: list[tuple[str, bytes, int]] = []
    pwrite, flush = os.pwrite, os.fdatasync
    monkeypatch.setattr(os, "pwrite", lambda f, b, at: calls.append(("write", b, at)) or pwrite(f, b, at))
    monkeypatch.setattr(os, "fdatasync", lambda f: calls.append(("flush", b"", 0)) or flush(f))
    JournalFile(path.parent).release()
    assert calls[-2:] == [("write", raw[begin:], begin), ("flush", b"", 0)]


class HeldDisk:
    """Flushes wait for ``go``, and then fail where ``error`` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.flushes, self.error = threading.Event(), 0, 0
        monkeypatch.setattr(os, "fdatasync", self.flush)

    def flush(self, _: int) -> None:
        self.flushes += 1
        assert self.go.wait(10)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


async def test_a_slow_disk_holds_up_what_waits_for_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "WAITING_BYTES", 1000)
    disk, arrived = HeldDisk(monkeypatch), []

    async def wait_for(what: Coroutine[Any, Any, None]) -> None:
        await what
        arrived.append(what.__name__)

    async with writing(tmp_path, fsync=True) as journal:
        journal.begin_segment([b"state"])
        await anyio.sleep(0.02)
        await journal.room()
        last = [journal.append(bytes(200)) for _ in range(10)][-1]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for, journal.durable(last))
            tasks.start_soon(wait_for, journal.room())
            with anyio.move_on_after(0.05):
                await journal.durable(last)
            assert not arrived
            disk.go.set()
    assert sorted(arrived) == ["durable", "room"]
    assert disk.flushes == 2, "the base, and ten records with one flush"


async def test_a_failure_is_final_and_reaches_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await write(tmp_path, BASE, [])
    journal, disk = JournalFile(tmp_path / "journal"), HeldDisk(monkeypatch)
    disk.error = errno.EIO
    failed: list[JournalFailed] = []

    async def expect(call: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        with pytest.raises(JournalFailed, match="dmesg says how") as failure:
            await call(*arguments)
        failed.append(failure.value)

    async with anyio.create_task_group() as tasks:
        last = journal.append(b"lost")
        tasks.start_soon(expect, journal.run)
        tasks.start_soon(expect, journal.durable, last)
        await anyio.sleep(0.02)
        disk.go.set()
    assert [failure.errno for failure in failed] == [errno.EIO] * 2
    for call in (lambda: journal.append(b""), lambda: journal.begin_segment([b""])):
        with pytest.raises(JournalFailed):
            call()
    await journal.close()
    assert disk.flushes == 1, "a flush was tried again"


async def test_closing_writes_for_cancelled_callers_too(tmp_path: Path) -> None:
    """Closing writes the entries that wait, also for a caller that is cancelled."""
    await write(tmp_path, BASE, [])
    journal = JournalFile(tmp_path / "journal")
    journal.append(b"waits")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await journal.close()
    with pytest.raises(JournalRefused, match="closed"):
        journal.append(b"late")
    await journal.close()
    assert content(tmp_path) == [*BASE, b"waits"]


async def test_a_record_over_the_limit_is_refused_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "RECORD_LIMIT", 9)
    async with writing(tmp_path) as journal:
        for call in (lambda: journal.append(bytes(10)), lambda: journal.begin_segment([b"", bytes(10)])):
            with pytest.raises(JournalRefused, match="10 bytes is over the limit of 9; split it"):
                call()
        journal.begin_segment([bytes(9)])
    assert content(tmp_path) == [bytes(9)]


async def test_reading_streams(tmp_path: Path) -> None:
    """24 MB in groups of 1 byte to 3 MB; what is in memory at once is a group."""
    sizes = [1, 3_000_000, 1_048_576, 1_048_548, 500_000] * 4
    await write(tmp_path, [bytes(10)], [[bytes(size)] for size in sizes])
    tracemalloc.start()
    try:
        assert [len(record) for record in read_journal(tmp_path / "journal").records()] == [10, *sizes]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000, f"{peak} bytes at once"
