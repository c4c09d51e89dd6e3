"""Power cuts and kills at any call, with every kind of half-written disk; failures of every call."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_world import DIRECTORY, World, now, power_cuts
from simulated_disk import PowerCut, SimulatedDisk

from streamrl.journal.journal import JournalFailed, JournalRefused
from streamrl.journal.journal_format import Durability
from streamrl.journal.journal_writing import SegmentWriter

PROGRAM = "agabgafrabaagbfag"
PROGRAMS = st.text("aaggbfr", min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.lists(PROGRAMS, min_size=1, max_size=4))
def test_what_was_acknowledged_survives_any_power_cut(seed: int, programs: list[str]) -> None:
    power_cuts(seed, programs, states=4)


def test_a_power_cut_at_every_call() -> None:
    """Every call of one run, several disks for each, and a record and a base after each recovery."""
    world = World(random.Random(3))
    world.open()
    world.go(PROGRAM)
    world.close()
    calls = len(world.disk.calls)
    assert calls > 60
    for cut in range(calls):
        for seed in range(3):
            world = World(random.Random(3))
            world.disk.cut_at = cut
            with pytest.raises(PowerCut):
                world.open()
                world.go(PROGRAM)
                world.close()
            world.seen()
            world.disk = world.disk.after_power_cut(random.Random(1000 * cut + seed))
            world.open()
            world.go("gba")
            world.seen()
            world.disk = world.disk.after_power_cut(random.Random(cut))
            world.open()


def calls_of(program: str) -> list[tuple[str, str]]:
    world = World(random.Random(4))
    world.open()
    world.go(program)
    world.close()
    return world.disk.calls


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_the_failure_of_any_call_is_final_and_loses_nothing(error: int) -> None:
    program = "agbgafrabga"
    calls = calls_of(program)
    assert {name for name, _ in calls} >= {"write", "flush", "create", "rename", "remove", "flush_directory", "open"}
    for number in range(len(calls)):
        world = World(random.Random(4))
        world.disk.fail_at = (number, error)
        with pytest.raises(JournalFailed) as told:
            world.open()
            world.go(program)
            world.close()
        assert told.value.errno == error
        assert str(DIRECTORY) in str(told.value)
        assert ("free space" if error == errno.ENOSPC else "repair or replace") in str(told.value)
        if calls[number][0] not in {"open", "read", "size"}:  # a failure to read what was recovered is the reader's
            refuses_everything(world)
        after_failure = world.disk.calls[number + 1 :]
        assert not {name for name, _ in after_failure} & {"write", "flush", "rename", "remove", "flush_directory"}
        assert not world.disk._locked or world.journal
        world.seen()
        # The process ends, and another one goes on with what the cache holds; then the power goes.
        world.disk.killed()
        world.open()
        world.append(2)
        world.seen()
        for seed in range(3):
            again = World(random.Random(5))
            again.disk = world.disk.after_power_cut(random.Random(seed))
            again.appended, again.acknowledged = list(world.appended), world.acknowledged
            again.open()


def refuses_everything(world: World) -> None:
    journal = world.journal
    if journal is None:
        return  # it could not be opened
    for call in (
        lambda: journal.append(1, b""),
        lambda: journal.begin_segment([(1, b"")]),
        lambda: now(journal.durable(journal.durable_now)),
        lambda: now(journal.room()),
        lambda: now(journal.begun(1)),
        lambda: now(journal.forget_before(1)),
    ):
        refuses(call)


def test_after_a_failure_the_writer_touches_nothing() -> None:
    for number in range(5, 9):
        disk = SimulatedDisk()
        writer = SegmentWriter(disk, DIRECTORY, "r", 1, Durability.FSYNC)
        writer.start()
        assert [name for name, _ in disk.calls] == ["create", "write", "flush", "rename", "flush_directory"]
        writer.append([(1, b"first")])
        segment = writer.begin_segment([(1, b"state")])
        disk.fail_at = (len(disk.calls) + number - 5, errno.EIO)
        for _ in range(2):
            with pytest.raises(JournalFailed):
                writer.begin_segment([(1, b"state")])
        calls = len(disk.calls)
        refuses(lambda writer=writer: writer.append([(1, b"second")]))
        refuses(lambda writer=writer: writer.begin_segment([(1, b"state")]))
        refuses(lambda writer=writer, segment=segment: writer.forget_before(segment))
        writer.close()
        assert len(disk.calls) == calls == disk.fail_at[0] + 1


def refuses(call: Callable[[], object]) -> None:
    with pytest.raises(JournalFailed):
        call()


def test_a_failed_open_gives_the_lock_back() -> None:
    world = World(random.Random(4))
    world.open()
    world.close()
    world.disk.calls.clear()
    world.open()
    opening = max(place for place, (name, _) in enumerate(world.disk.calls) if name == "flush_directory")
    for number in range(opening + 1):
        fresh = World(random.Random(4))
        fresh.open()
        fresh.close()
        fresh.disk.calls.clear()
        fresh.disk.fail_at = (number, errno.EIO)
        with pytest.raises(JournalFailed):
            fresh.open()
        fresh.disk.fail_at = None
        fresh.open()


def test_records_that_nothing_vouches_for_are_written_again() -> None:
    """After a failed flush the cache holds what never comes to the disk; it reads well until the power goes."""
    world = World(random.Random(6))
    world.open()
    world.append(1, 40)
    world.disk.calls.clear()
    world.disk.fail_at = (1, errno.EIO)
    with pytest.raises(JournalFailed):
        world.append(2, 40)
    world.seen()
    assert world.acknowledged == 1
    world.disk.killed()
    recovered = world.open()
    assert recovered.last_sequence == 3, "the cache has them"
    world.seen()
    for seed in range(20):
        again = World(random.Random(7))
        again.disk = world.disk.after_power_cut(random.Random(seed))
        again.appended, again.acknowledged = list(world.appended), 3
        again.open()


def test_in_durability_process_nothing_is_flushed_and_any_kill_is_survived() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        world = World(rng, "process")
        world.open()
        world.disk.cut_at = len(world.disk.calls) + rng.randrange(40)
        with suppress(PowerCut):
            world.go(PROGRAM)
        assert not {name for name, _ in world.disk.calls} & {"flush"}
        world.seen()
        world.disk.killed()
        world.open()


def test_records_without_flush_are_flushed_when_the_run_goes_on_with_fsync() -> None:
    world = World(random.Random(8), "process")
    world.open()
    world.go("gabga")
    world.close()
    world.durability = "fsync"
    world.disk.killed()
    world.open()
    world.seen()
    for seed in range(20):
        again = World(random.Random(7))
        again.disk = world.disk.after_power_cut(random.Random(seed))
        again.appended, again.acknowledged = list(world.appended), world.acknowledged
        again.acknowledged_base = world.acknowledged_base
        again.open()


def test_forgetting_needs_a_base_and_leaves_the_rest() -> None:
    world = World(random.Random(9))
    world.open()
    world.go("ga")
    assert world.journal
    with pytest.raises(JournalRefused, match="does not begin with a base"):
        now(world.journal.forget_before(1))
    world.go("rbabg")
    first, second = (segment for segment, _ in world.bases)
    now(world.journal.forget_before(first))
    assert segments(world.disk) == [first, second]
    world.reopen()
    assert [segment for segment, _ in world.bases] == [first, second]
    now(world.journal.forget_before(second))  # a base of the run before
    assert segments(world.disk) == [second, second + 1]
    with pytest.raises(JournalRefused, match="does not begin with a base"):
        now(world.journal.forget_before(second + 1))


def segments(disk: SimulatedDisk) -> list[int]:
    return sorted(int(Path(path).stem) for path in disk.entries if path.suffix == ".journal")
