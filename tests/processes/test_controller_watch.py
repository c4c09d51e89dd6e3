"""The controller's watch over itself: stalls, reports on demand, and the limits that it must not mistake for one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from streamrl.base.errors import RunStalled
from streamrl.base.messages import EngineLoad
from streamrl.base.run_events import StallSeen
from streamrl.base.stage_messages import RolloutStatistics
from streamrl.control.events import RunBegan
from streamrl.control.settings import ControlSettings
from streamrl.control.state import ControlState
from streamrl.observe.report.run_waits import RunWaits
from streamrl.observe.report.wait_reason import ShellView
from streamrl.recipe.scheduling import RoundKind, StalePolicy
from streamrl.recipe.sections import (
    Engines,
    Launch,
    Model,
    Prompts,
    Recipe,
    Reward,
    Run,
    Transport,
    TransportKind,
    Weights,
)
from streamrl.supervise.watch.controller_watch import REPORT_SIGNAL, ControllerWatch, stall_limit_s

QUICK = Recipe(
    model=Model(path="model"),
    prompts=Prompts(train="train.jsonl"),
    rewards=(Reward(function="m:f", timeout_s=0.01, backoff_s=0.01),),
    run=Run(stall_timeout_s=0.2),
    engines=Engines(start_timeout_s=0.05, progress_timeout_s=0.01),
    weights=Weights(push_timeout_s=0.01),
)


def test_the_limit_is_beyond_every_other_one() -> None:
    assert stall_limit_s(QUICK) == 0.2
    assert stall_limit_s(replace(QUICK, run=Run(stall_timeout_s=0.0))) == 0.0
    assert stall_limit_s(replace(QUICK, weights=Weights(push_timeout_s=1000))) == 1500
    slow = Reward(function="m:f", timeout_s=300, retries=3, backoff_s=100)
    assert stall_limit_s(replace(QUICK, rewards=(slow,))) == 1.5 * 4 * 400


def control() -> ControlState:
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
    state = ControlState(settings)
    state.handle(RunBegan())
    return state


class Trial:
    def __init__(self, run_directory: Path, recipe: Recipe = QUICK) -> None:
        self.told: list[StallSeen] = []
        self.tokens = self.answers = 0
        self.watch = ControllerWatch(recipe, run_directory, self.tell)
        self.state = control()
        self.waits = RunWaits(anyio.current_time, ShellView)
        self.waits.look(self.state)

    async def tell(self, seen: StallSeen) -> None:
        self.told.append(seen)

    def follow(self) -> None:
        def rollout() -> RolloutStatistics:
            return RolloutStatistics(launched=4, finished=1, running=3, busy_seconds=0.0, generated_tokens=self.tokens)

        load = EngineLoad(running=3, waiting=0, kv_cache_usage=0.0, generated_tokens=0)
        self.watch.follow(self.state, rollout, lambda: load, lambda: 0, lambda: self.answers, self.waits)


@pytest.mark.asyncio
async def test_a_run_that_stands_still_ends_with_what_it_waits_for(tmp_path: Path) -> None:
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
                assert not trial.told
                await anyio.sleep(60)
    stalled = raised.value.subgroup(RunStalled)
    assert stalled is not None
    [seen] = trial.told
    assert seen.waits[0].startswith("the run waits for prompts, for ")
    assert seen.waits[1].startswith("control waits for 2 prompts, for ")
    text = (tmp_path / "stalls").joinpath(Path(seen.file).name).read_text()
    assert "'tokens': 7" in text and "test_a_run_that_stands_still" in text


@pytest.mark.asyncio
async def test_a_signal_asks_where_everything_stands_and_nothing_ends(tmp_path: Path) -> None:
    trial = Trial(tmp_path, replace(QUICK, run=Run(stall_timeout_s=0.0)))
    async with anyio.create_task_group() as nursery:
        nursery.start_soon(trial.watch.run)
        trial.follow()
        with anyio.fail_after(20):
            while signal.getsignal(REPORT_SIGNAL) in (signal.SIG_DFL, None):
                await anyio.sleep(0.005)
            with trial.watch.waits.waiting_for("engine-0 to stage version 7", who="publisher"):
                os.kill(os.getpid(), REPORT_SIGNAL)
                while not list((tmp_path / "stalls").glob("*.txt")):
                    await anyio.sleep(0.005)
        trial.watch.end()
    [report] = (tmp_path / "stalls").glob("*.txt")
    assert "publisher waits for engine-0 to stage version 7" in report.read_text()
    assert trial.told == [] and trial.watch.take_loop_lag() >= 0.0


@pytest.mark.asyncio
async def test_a_person_who_starts_a_process_may_take_their_time(tmp_path: Path) -> None:
    by_hand = Transport(kind=TransportKind.TCP, engines=Launch.EXTERNAL)
    trial = Trial(tmp_path, replace(QUICK, transport=by_hand, run=Run(stall_timeout_s=0.05)))
    async with anyio.create_task_group() as nursery:
        nursery.start_soon(trial.watch.run)
        await anyio.sleep(0.4)  # of a limit of 0.1
        trial.watch.end()
    assert trial.told == []
