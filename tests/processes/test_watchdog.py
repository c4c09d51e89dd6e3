"""The watchdog of the controller: open waits, stalls with stacks, a loop that does not answer, reports on demand."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import anyio
import pytest
from builders.base import SetClock
from builders.recipe import small_recipe
from msgspec.structs import replace

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import RunStalled
from streamrl.base.messages import EngineLoad
from streamrl.base.run_events import StallSeen
from streamrl.base.stage_messages import RolloutStatistics
from streamrl.base.waits import Waits
from streamrl.control.events import RunBegan
from streamrl.control.machine import Control
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import ControlSettings
from streamrl.processes import watchdog
from streamrl.processes.watchdog import (
    ABORT_AFTER_S,
    BEAT_S,
    REPORT_SIGNAL,
    STACKS_AFTER_S,
    WARN_AFTER_S,
    Watchdog,
    stall_limit_s,
    task_stacks,
)
from streamrl.recipe.scheduling import RoundKind, StalePolicy
from streamrl.recipe.sections import Engines, Recipe, Reward, Run, Weights
from streamrl.run.wait_reason import RunWaits, ShellView

QUICK = small_recipe(
    rewards=(Reward(function="m:f", timeout_s=0.01, backoff_s=0.01),),
    run=Run(stall_timeout_s=0.2),
    engines=Engines(start_timeout_s=0.05, progress_timeout_s=0.01),
    weights=Weights(push_timeout_s=0.01),
)


def control() -> Control:
    settings = ControlSettings(
        steps=3,
        batch_groups=2,
        group_size=2,
        rounds=RoundKind.SYNCHRONOUS,
        max_staleness=0,
        when_stale=StalePolicy.WAIT,
        dynamic_sampling=False,
        max_failed_share=1.0,
        failure_window=8,
    )
    made = make_control(settings)
    made.handle(RunBegan())
    return made


class Trial:
    """A watchdog over figures that the test moves."""

    def __init__(self, run_directory: Path, recipe: Recipe = QUICK, clock: SetClock | None = None) -> None:
        self.seen: list[StallSeen] = []
        self.tokens = self.answers = 0
        self.watch = Watchdog(recipe, run_directory, self.emit, **({"clock": clock} if clock else {}))
        self.state = control().state
        self.waits = RunWaits(anyio.current_time if clock is None else clock, ShellView)
        self.waits.update(self.state)

    async def emit(self, seen: StallSeen) -> None:
        self.seen.append(seen)

    def follow(self) -> None:
        def rollout() -> RolloutStatistics:
            return RolloutStatistics(launched=4, finished=1, running=3, busy_seconds=0.0, generated_tokens=self.tokens)

        load = EngineLoad(running=3, waiting=0, kv_cache_usage=0.0, generated_tokens=0)
        self.watch.follow(self.state, rollout, lambda: load, lambda: 0, lambda: self.answers, lambda: 0, self.waits)


def test_open_waits_are_listed_longest_first() -> None:
    """Waits are open while they last, and the longest comes first."""
    clock = SetClock(100.0)
    waits = Waits(clock)
    with waits.waiting_for("engine-0 to stage version 7", who="publisher"):
        clock.now += 2
        with waits.waiting_for("12 prompts"):
            clock.now += 1
            assert waits.lines() == [
                "publisher waits for engine-0 to stage version 7, for 3.0 s",
                "control waits for 12 prompts, for 1.0 s",
            ]
    with pytest.raises(ValueError, match="planted"), waits.waiting_for("nothing"):
        raise ValueError("planted")
    assert waits.open() == []


def test_the_limit_is_beyond_every_other_one() -> None:
    assert stall_limit_s(QUICK) == 0.2
    assert stall_limit_s(replace(QUICK, run=Run(stall_timeout_s=0.0))) == 0.0
    assert stall_limit_s(replace(QUICK, weights=Weights(push_timeout_s=1000))) == 1500
    slow = Reward(function="m:f", timeout_s=300, retries=3, backoff_s=100)
    assert stall_limit_s(replace(QUICK, rewards=(slow,))) == 1.5 * 4 * 400


async def test_a_stalled_run_ends_with_what_it_waits_for(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    with pytest.raises(ExceptionGroup) as raised:
        async with anyio.create_task_group() as nursery:
            nursery.start_soon(trial.watch.run)
            trial.follow()
            with trial.watch.waits.waiting_for("2 prompts"):
                for trial.tokens in range(8):  # one more token now and then is progress
                    await anyio.sleep(0.05)
                for trial.answers in range(8):  # so is a batch that is trained again
                    await anyio.sleep(0.05)
                assert not trial.seen
                await anyio.sleep(60)
    stalled = first_error(raised.value)
    assert isinstance(stalled, RunStalled) and "control waits for 2 prompts" in str(stalled)
    [seen] = trial.seen
    assert seen.waits[0].startswith("the run waits for prompts, for ")
    assert seen.waits[1].startswith("control waits for 2 prompts, for ")
    text = Path(seen.file).read_text()  # noqa: ASYNC240
    assert "'tokens': (7, 0)" in text and "test_a_stalled_run" in text
    assert "await anyio.sleep(60)" in text, "the stack of the coroutine that waits"


async def test_time_in_which_the_process_was_stopped_is_not_counted(tmp_path: Path) -> None:
    clock = SetClock(100.0)
    trial = Trial(tmp_path, replace(QUICK, run=Run(stall_timeout_s=10.0)), clock)
    trial.follow()
    for seconds, still_s in ((0.0, 0.0), (3.0, 3.0), (3600.0, 3.0), (4.0, 7.0)):  # a laptop that slept, SIGSTOP
        clock.now += seconds
        trial.watch.check()
        assert trial.watch.still_s == still_s
    trial.tokens += 1
    trial.watch.check()
    assert trial.watch.still_s == 0.0


async def test_a_signal_asks_where_everything_stands_and_nothing_ends(tmp_path: Path) -> None:
    trial = Trial(tmp_path, replace(QUICK, run=Run(stall_timeout_s=0.0)))
    async with anyio.create_task_group() as nursery:
        nursery.start_soon(trial.watch.run)
        trial.follow()
        while signal.getsignal(REPORT_SIGNAL) in (signal.SIG_DFL, None):
            await anyio.sleep(0.005)
        with trial.watch.waits.waiting_for("engine-0 to stage version 7", who="publisher"):
            os.kill(os.getpid(), REPORT_SIGNAL)
            while not list((tmp_path / "stalls").glob("*.txt")):
                await anyio.sleep(0.005)
        trial.watch.end()
    [report] = (tmp_path / "stalls").glob("*.txt")
    assert "publisher waits for engine-0 to stage version 7" in report.read_text()
    assert trial.seen == [] and trial.watch.take_loop_lag() >= 0.0


async def test_what_trackers_log_is_no_progress_of_a_start(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    watch = Trial(tmp_path).watch
    before = watch._starting()
    for name in ("tracker-wandb", "older-tracker-wandb"):
        (logs / f"{name}.log").write_text("retrying\n")
    assert watch._starting() == before
    (logs / "trainer-0.log").write_text("loading\n")
    assert watch._starting() != before


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
    assert "5 x five-of-them" in text, "alike ones are listed once"
    places = [text.index(part) for part in ("await inner_most()", "await gate.wait()")]
    assert places == sorted(places)


async def test_a_stuck_loop_is_lag_then_stacks_then_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that does not answer is reported as lag, then by its stacks once, then ended."""
    clock, ended = SetClock(100.0), list[int]()
    monkeypatch.setattr(watchdog.os, "_exit", ended.append)
    watch = Trial(tmp_path, clock=clock).watch

    def passes(seconds: float) -> None:
        for _ in range(round(seconds / BEAT_S)):
            clock.now += BEAT_S
            watch.look_at_loop(clock.now, BEAT_S)

    def stalls() -> int:
        return len(os.listdir(tmp_path / "stalls")) if (tmp_path / "stalls").exists() else 0

    watch.beat()
    passes(WARN_AFTER_S + 0.1)
    watch.beat()
    assert watch.take_loop_lag() == pytest.approx(WARN_AFTER_S + 0.05) and watch.take_loop_lag() == 0.0
    passes(STACKS_AFTER_S + 1)
    assert stalls() == 1 and not ended
    watch.look_at_loop(clock.now + 3600, 3600.0)  # the whole process was stopped
    clock.now += 3600
    assert stalls() == 1 and not ended
    passes(ABORT_AFTER_S + BEAT_S)
    assert ended[0] == 1
    assert (
        "RunStalled: the event loop of the controller has not answered for 60 s"
        in (tmp_path / "exit" / "controller.json").read_text()
    )


async def test_a_blocked_loop_is_seen_by_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STACKS_AFTER_S", 0.02)
    written = threading.Event()
    write = watchdog.write_stall

    def write_and_say(*arguments: object) -> Path:
        path = write(*arguments)  # type: ignore[arg-type]
        written.set()
        return path

    monkeypatch.setattr(watchdog, "write_stall", write_and_say)
    watch = Trial(tmp_path, replace(QUICK, run=Run(stall_timeout_s=0.0))).watch
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        await anyio.sleep(0.01)
        assert written.wait(300), "this blocks the loop"
        watch.end()
    reports = list((tmp_path / "stalls").iterdir())
    assert any("test_a_blocked_loop_is_seen" in path.read_text() for path in reports)
