"""Runs that write a journal on a simulated disk, and what must hold after any end of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from simulated_disk import PowerCut, SimulatedDisk

from streamrl.journal.journal import Journal, Recovered, open_journal

DIRECTORY = Path("/run/journal")
RUN = "run-7"
BASE_KIND = 9


class InlineLane:
    """Works when it is woken, unless it is ``held``: then the records gather for one group."""

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = work
        self.held = False

    def wake(self) -> None:
        if not self.held:
            self._work()

    def join(self) -> None:
        pass


def now(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise AssertionError("it waits")


class Base(msgspec.Struct, frozen=True):
    """What a base says: how many records came before, and the sum of their bytes."""

    records: int
    digest: int


def digest(payloads: list[bytes]) -> int:
    return sum((place + 1) * sum(payload) for place, payload in enumerate(payloads))


class World:
    """One run after another on one disk. ``appended``: every record of the surviving history."""

    def __init__(self, rng: random.Random, durability: Literal["fsync", "process"] = "fsync") -> None:
        self.rng = rng
        self.disk = SimulatedDisk()
        self.disk.directories.add(DIRECTORY.parent)
        self.durability = durability
        self.appended: list[bytes] = []
        self.acknowledged = 0
        self.acknowledged_base = 0
        self.epoch = 0
        self.journal: Journal | None = None
        self.bases: list[tuple[int, int]] = []

    def open(self) -> Recovered:
        """Open, and compare what is recovered with what was acknowledged and appended."""
        self.lane: InlineLane | None = None

        def lane(work: Callable[[], bool]) -> InlineLane:
            self.lane = InlineLane(work)
            return self.lane

        self.journal, recovered = open_journal(
            DIRECTORY, run_id=RUN, durability=self.durability, disk=self.disk, lane=lane
        )
        self.verify(recovered)
        assert not [path.name for path in self.disk.entries if path.suffix == ".unfinished"], "a crash left a file"
        self.appended = self.appended[: recovered.last_sequence]
        assert recovered.epoch > self.epoch, "an epoch was used twice"
        self.epoch = recovered.epoch
        # Whoever opened it may act on what was recovered: that is acknowledged as well.
        self.acknowledged = recovered.last_sequence
        self.bases = [(b.segment, b.sequence) for b in recovered.beginnings if b.base_records]
        return recovered

    def verify(self, recovered: Recovered) -> None:
        last = recovered.last_sequence
        assert self.acknowledged <= last <= len(self.appended), (
            f"{self.acknowledged} were acknowledged, {last} came back"
        )
        assert recovered.beginnings[-1].sequence >= self.acknowledged_base, "the acknowledged base is gone"
        for beginning in recovered.beginnings[-2:]:
            records = list(recovered.records(beginning))
            start = beginning.sequence
            base = [record for record in records if record.base]
            assert len(base) == beginning.base_records
            if base:
                said = msgspec.msgpack.decode(b"".join(record.payload for record in base), type=Base)
                assert said == Base(start, digest(self.appended[:start]))
            rest = [record for record in records if not record.base]
            assert [record.sequence for record in rest] == list(range(start + 1, last + 1))
            assert [record.payload for record in rest] == self.appended[start:last]

    def append(self, count: int = 1, size: int | None = None) -> None:
        """One group of so many records."""
        assert self.journal and self.lane
        self.lane.held = True
        for _ in range(count):
            length = self.rng.choice([0, 1, 7, 40, 300, 700]) if size is None else size
            payload = bytes(self.rng.choices(range(256), k=length))
            self.appended.append(payload)  # before: a crash on the way may leave it whole
            assert self.journal.append(3, payload) == len(self.appended)
        self.lane.held = False
        self.lane.wake()
        now(self.journal.durable(len(self.appended)))
        self.acknowledged = len(self.appended)

    def begin(self) -> None:
        """A new segment. Its base is the state in two records."""
        assert self.journal
        state = msgspec.msgpack.encode(Base(len(self.appended), digest(self.appended)))
        segment = self.journal.begin_segment([(BASE_KIND, state[:2]), (BASE_KIND, state[2:])])
        now(self.journal.begun(segment))
        self.acknowledged_base = len(self.appended)
        self.bases.append((segment, len(self.appended)))

    def forget(self) -> None:
        """Everything before the newest base, or the one before."""
        assert self.journal
        if self.bases:
            now(self.journal.forget_before(self.rng.choice(self.bases[-2:])[0]))

    def reopen(self) -> None:
        """Close in good order, and go on."""
        self.close()
        self.open()

    def close(self) -> None:
        assert self.journal
        now(self.journal.close())
        self.journal = None

    def seen(self) -> int:
        """What was acknowledged when the run ended, however it ended."""
        if self.journal is not None:
            self.acknowledged = max(self.acknowledged, self.journal.durable_now)
            self.journal = None
        return self.acknowledged

    def go(self, program: str) -> None:
        """``a`` a record, ``g`` a group, ``b`` begin, ``f`` forget, ``r`` reopen."""
        for letter in program:
            {
                "a": self.append,
                "g": lambda: self.append(self.rng.randrange(2, 6)),
                "b": self.begin,
                "f": self.forget,
                "r": self.reopen,
            }[letter]()


def power_cuts(seed: int, programs: list[str], states: int) -> int:
    """Run the programs, each cut short at a random call, and recover from several of the states that the disk may
    have; go on from one of them. Returns how many were looked at."""
    rng = random.Random(seed)
    world = World(rng)
    looked_at = 0
    for program in programs:
        world.disk.cut_at = rng.randrange(4, 12 + 4 * len(program))
        world.disk.shortest = rng.choice([None, None, 100])
        before = len(world.appended)
        with suppress(PowerCut):
            world.open()
            world.go(program)
        world.seen()
        crashed = world.disk
        kept = (list(world.appended), world.acknowledged, world.acknowledged_base, world.epoch)
        for _ in range(states):
            killed = rng.random() < 0.1  # the process only: nothing of the cache is lost
            world.disk = crashed if killed else crashed.after_power_cut(rng)
            world.disk.killed()
            world.open()
            world.seen()
            looked_at += 1
            if killed:
                break
            last = world.disk
            world.appended, world.acknowledged, world.acknowledged_base, world.epoch = (list(kept[0]), *kept[1:])
        else:
            world.disk = last
        assert len(world.appended) >= min(before, world.acknowledged)
        # What was recovered is acknowledged: it must survive the next crash, too.
        world.disk.killed()
        world.open()
        world.seen()
        world.disk.killed()
    return looked_at
