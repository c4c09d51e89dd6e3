"""What is measured of rounds leads to another set of engines, which takes over in the right order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from streamrl.base.messages import EngineLoad
from streamrl.base.stage_messages import TrajectoryLost
from streamrl.base.types import Prompt, TrajectoryId, token_array
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.contracts import PushReport
from streamrl.control.actions import Decision, LaunchGroup, StepOptimizer
from streamrl.control.events import StopRequested
from streamrl.engines.elastic.elastic_engines import ElasticEngines
from streamrl.engines.elastic.engine_sets import SetChooser
from streamrl.engines.pool import UNAVAILABLE
from streamrl.recipe.topology import PreparedSet

WIDE = PreparedSet(count=2, tensor_parallel_size=1, kv_tokens=2_000)
DEEP = PreparedSet(count=1, tensor_parallel_size=2, kv_tokens=5_000, first=2)
CLOSE = StepOptimizer(batch_id=0, policy_version=1, groups=1, samples=8, trained_tokens=1)


def launch(ids: Sequence[TrajectoryId], version: int) -> LaunchGroup:
    return LaunchGroup(
        group_id=ids[0].group_id, ids=tuple(ids), policy_version=version, seed_base=0, round_kind="synchronous"
    )


class World:
    """Pool and hosts that only say what was asked of them; and the time."""

    figures: dict[str, float] = {}
    kv_tokens = 5_500

    def __init__(self, *, steps: int = 100) -> None:
        self.told: list[str] = []
        self.now = 0.0
        self.state = EngineLoad(running=0, waiting=0, kv_cache_usage=0.0, generated_tokens=0)
        self.never: anyio.Event | None = None
        self.decisions: list[Decision] = []
        self.chooser = SetChooser([WIDE, DEEP], steps=steps, switch_s=12.0)
        store = TrajectoryStore()
        store.add_prompts([Prompt(prompt_id="p", token_ids=token_array([1] * 10))])
        self.elastic = ElasticEngines(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self.chooser,
            store,
            on_decision=self.decided,
            clock=lambda: self.now,
        )

    async def decided(self, decision: Decision, step: int, shown: bool) -> None:
        assert shown
        self.decisions.append(decision)

    # of the pool
    def withdraw(self, names: Iterable[str], reason: str) -> None:
        assert reason == UNAVAILABLE
        self.told.append(f"withdraw {' '.join(names)}")

    def load(self) -> EngineLoad:
        return self.state

    # of the hosts
    async def use(self, names: Iterable[str]) -> None:
        await anyio.lowlevel.checkpoint()
        if self.never is not None:
            await self.never.wait()
        self.now += 10.0
        self.told.append(f"use {' '.join(names)}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Beside the rounds, until nothing is under way."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.elastic.run, print)
            yield
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()

    async def round(self, version: int, seconds: float, preemptions: int) -> Decision | None:
        """Why another set served it."""
        ids = [TrajectoryId(prompt_id="p", group_id=version, sample=n) for n in range(8)]
        before = len(self.decisions)
        async with self.running():
            await self.elastic.on_action(launch(ids[:4], version))
        decided = self.decisions[before:]
        async with self.running():
            await self.elastic.on_action(launch(ids[4:], version))
        assert self.decisions[before:] == decided, "once a round"
        for running, half in ((8, ids[:6]), (1, ids[6:])):  # steps take as long with few requests as with many
            self.now += seconds / 2
            self.state = msgspec.structs.replace(
                self.state,
                preemptions=self.state.preemptions + (preemptions if running > 1 else 0),
                kv_cache_usage=0.97 if running > 1 else 0.1,
                decode_steps=self.state.decode_steps + 250,
                decode_s=self.state.decode_s + seconds / 2,
                decode_tokens=self.state.decode_tokens + 250 * running,
            )
            for identity in half:
                self.chooser.note_end(identity, 400)
            self.elastic.on_outcome(TrajectoryLost(id=half[0], cancelled=True, reason="", tokens=0))
        await self.elastic.on_action(CLOSE)
        self.now += 50.0  # training is no part of a round
        return decided[0] if decided else None


async def test_preempting_rounds_switch_to_the_other_set() -> None:
    """Rounds that preempt lead to the other set, and its engines take over in order."""
    world = World()
    assert [await world.round(version, 100.0, 5) for version in range(4)] == [None] * 4 and world.told == []
    assert world.elastic.figures["engines/set"] == 0
    because = await world.round(4, 40.0, 0)
    assert because is not None
    figures = because.figures
    assert (figures["preemptions"], figures["switch_s"], figures["kv_usage"]) == (5, 12.0, 0.97)
    assert figures["seconds"] == pytest.approx(100.0), "of rounds alone"
    assert world.told == ["withdraw engine-0 engine-1", "use engine-2"], "before the round's requests are ordered"
    assert world.elastic.figures == {
        "engines/set": 1,
        "engines/serving": 1,
        "engines/switches_total": 1,
        "time/engine_switch_s": 10.0,
    }
    assert world.elastic.figures["time/engine_switch_s"] == 0, "of one step"
    assert world.chooser.switch_s == 10.0, "what a switch took is what the next is taken to cost"
    assert world.chooser.sets["1x2"].kv_tokens == 5_500, "as its engines said"
    assert [await world.round(version, 40.0, 0) for version in range(5, 12)] == [None] * 7


async def test_no_switch_happens_near_the_end() -> None:
    """The set does not change shortly before the end, nor once the run ends."""
    short, ending = World(steps=5), World()
    for version in range(5):
        await short.round(version, 10.0, 5)
    assert short.told == [], "it would not pay any more"
    for version in range(4):
        await ending.round(version, 100.0, 5)
    await ending.elastic.on_event(StopRequested(reason="drained"))
    await ending.round(4, 100.0, 5)
    assert ending.told == []


@pytest.mark.parametrize("how", ["stop", "end", "last version"])
async def test_a_switch_overtaken_by_the_end_is_not_awaited(how: str) -> None:
    """A switch that the end of the run overtakes is not waited for, but the last evaluation needs it."""
    world = World()
    for version in range(4):
        await world.round(version, 100.0, 5)
    world.never = anyio.Event()
    ids = [TrajectoryId(prompt_id="p", group_id=9, sample=0)]
    async with world.running():
        await world.elastic.on_action(launch(ids, 4))
        await anyio.wait_all_tasks_blocked()
        if how == "last version":
            await world.elastic.on_weights_live(PushReport(policy_version=5), last=True)
        elif how == "stop":
            await world.elastic.on_event(StopRequested(reason="drained"))
        else:
            world.elastic.end()
        await anyio.wait_all_tasks_blocked()
        world.never.set()
    switched = how == "last version"
    assert world.told == ["withdraw engine-0 engine-1", "use engine-2"][: 1 + switched]
    assert world.chooser.current == ("1x2" if switched else "2x1")


async def test_an_advance_round_is_measured_from_its_version() -> None:
    """A round that was submitted in advance is measured from the moment of its version."""
    world = World()
    await world.round(0, 10.0, 0)
    ids = [TrajectoryId(prompt_id="p", group_id=1, sample=n) for n in range(8)]
    await world.elastic.on_action(launch(ids, 1))
    world.now += 70.0
    await world.elastic.on_weights_live(PushReport(policy_version=1), last=False)
    world.now += 10.0
    await world.elastic.on_action(CLOSE)
    assert world.chooser._kinds["synchronous"].last.seconds == 10.0
