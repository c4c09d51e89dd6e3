"""Waits with names, stalls with stacks, and a loop that does not answer."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import anyio
import pytest

from streamrl.base.errors import RunStalled
from streamrl.base.run_events import StallSeen
from streamrl.base.waits import Waits
from streamrl.supervise.watch.loop_watch import ABORT_AFTER_S, BEAT_S, STACKS_AFTER_S, WARN_AFTER_S, LoopWatch
from streamrl.supervise.watch.stall_watch import StallWatch
from streamrl.supervise.watch.task_stacks import task_stacks, thread_stacks


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_waits_are_open_while_they_last_and_the_longest_comes_first() -> None:
    clock = Clock()
    waits = Waits(clock)
    with waits.waiting_for("engine-0 to stage version 7", who="publisher"):
        clock.now_s += 2
        with waits.waiting_for("12 prompts"):
            clock.now_s += 1
            assert waits.lines() == [
                "publisher waits for engine-0 to stage version 7, for 3.0 s",
                "control waits for 12 prompts, for 1.0 s",
            ]
    with pytest.raises(ValueError, match="planted"), waits.waiting_for("nothing"):
        raise ValueError("planted")
    assert waits.open() == []


class Trial:
    """A stall watch with a clock and a progress clock of its own."""

    def __init__(self, directory: Path, stall_timeout_s: float = 10.0) -> None:
        self.clock = Clock()
        self.waits = Waits(self.clock)
        self.progress = 0
        self.told: list[StallSeen] = []
        self.texts: list[str] = []
        self.order: list[str] = []
        self.watch = StallWatch(
            directory,
            stall_timeout_s=stall_timeout_s,
            progress=lambda: self.progress,
            waits=self.waits.lines,
            tell=self.tell,
            others=self.others,
            clock=self.clock,
        )

    async def tell(self, seen: StallSeen) -> None:
        self.texts.append(Path(seen.file).read_text())  # noqa: ASYNC240 - it is written before anybody is told
        self.told.append(seen)

    def others(self) -> list[int]:
        self.order.append("others")
        return [4711]

    def passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.watch.look()


@pytest.mark.asyncio
async def test_a_stall_says_who_waits_for_whom_with_stacks_and_ends_the_run(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "stalls")
    trial.watch.look()
    stuck = anyio.Event()

    async def wait_for_engine() -> None:
        with trial.waits.waiting_for("engine-0 to stage version 7", who="publisher"):
            await stuck.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for_engine)
        await anyio.lowlevel.checkpoint()
        for _ in range(5):
            trial.passes(2.0)
        with pytest.raises(RunStalled, match=r"10 s .*publisher waits for engine-0 to stage version 7"):
            await trial.watch.run()
        stuck.set()
    [seen], [text] = trial.told, trial.texts
    assert seen.waits[0].startswith("publisher waits for engine-0 to stage version 7")
    assert "wait_for_engine" in text and "stuck.wait()" in text, "the stack of the coroutine that waits"
    assert "processes 4711 were asked" in text and "progress clock: 0" in text
    assert trial.order == ["others"]


def test_any_progress_starts_the_clock_again(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.watch.look()
    for _ in range(4):
        trial.passes(4.0)
        trial.passes(4.0)
        assert trial.watch.still_s == 8.0
        trial.progress += 1
        trial.passes(0.0)
    assert trial.watch.still_s == 0.0


def test_time_in_which_the_process_stood_still_is_nobodys_fault(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.watch.look()
    trial.passes(3.0)
    trial.passes(3600.0)  # a laptop that slept, SIGSTOP
    assert trial.watch.still_s == 3.0


@pytest.mark.asyncio
async def test_stacks_of_coroutines_go_down_to_where_they_wait() -> None:
    gate = anyio.Event()

    async def inner_most() -> None:
        await gate.wait()

    async def outer() -> None:
        await inner_most()

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(outer, name="five-of-them")
        await anyio.lowlevel.checkpoint()
        text = task_stacks()
        gate.set()
    assert "5 x five-of-them" in text, "alike ones are told once"
    places = [text.index(part) for part in ("await inner_most()", "await gate.wait()")]
    assert places == sorted(places)
    assert "test_stacks_of_coroutines_go_down" in thread_stacks()


def test_the_loop_watch_warns_writes_stacks_once_and_aborts() -> None:
    clock, reports, aborts = Clock(), list[float](), list[float]()
    watch = LoopWatch(reports.append, aborts.append, clock=clock)

    def passes(seconds: float) -> None:
        for _ in range(round(seconds / BEAT_S)):
            clock.now_s += BEAT_S
            watch.look(clock.now_s, BEAT_S)

    watch.beaten(clock.now_s)
    passes(WARN_AFTER_S + 0.1)
    watch.beaten(clock.now_s)
    assert watch.take_worst() == pytest.approx(WARN_AFTER_S + 0.05) and watch.take_worst() == 0.0
    passes(STACKS_AFTER_S + 1)
    assert len(reports) == 1 and not aborts
    passes(ABORT_AFTER_S - STACKS_AFTER_S)
    assert len(reports) == 1 and aborts[0] >= ABORT_AFTER_S - BEAT_S
    watch.beaten(clock.now_s)
    before = len(aborts), len(reports)
    watch.look(clock.now_s + 3600, 3600.0)  # the whole process was stopped
    assert (len(aborts), len(reports)) == before


@pytest.mark.asyncio
async def test_a_blocked_loop_is_seen_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.supervise.watch.loop_watch.STACKS_AFTER_S", 0.02)
    seen = threading.Event()
    stacks: list[str] = []

    def report(_: float) -> None:
        stacks.append(thread_stacks())
        seen.set()

    with LoopWatch(report, lambda _: None) as watch:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.beat)
            await asyncio.sleep(0)
            assert seen.wait(20), "this blocks the loop"
            tasks.cancel_scope.cancel()
    assert "this blocks the loop" in stacks[0]
