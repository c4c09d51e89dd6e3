"""What is measured of rounds leads to another set of engines, which takes over in the right order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anyio
import msgspec
import pytest

from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineLoad
from streamrl.base.stage_messages import TrajectoryLost
from streamrl.base.types import TrajectoryId
from streamrl.control.actions import Decision
from streamrl.elastic.elastic_engines import OTHER_SET, ElasticEngines
from streamrl.elastic.sets import EngineSet, SetChooser, SetPlan

WIDE = EngineSet(name="2x1", engines=2, tensor_parallel_size=1, kv_tokens=2_000, hosts=("engine-0", "engine-1"))
DEEP = EngineSet(name="1x2", engines=1, tensor_parallel_size=2, kv_tokens=5_000, hosts=("engine-2",))


class World:
    """Pool, hosts and pushes that only say what was asked of them; and the time."""

    def __init__(self, *, steps: int = 100, start_timeout_s: float = 5.0) -> None:
        self.told: list[str] = []
        self.now = 0.0
        self.state = EngineLoad(running=0, waiting=0, kv_cache_usage=0.0, generated_tokens=0)
        self.never: anyio.Event | None = None
        self.starting = anyio.Event()
        self.decisions: list[Decision] = []
        self.chooser = SetChooser([WIDE, DEEP], steps=steps, switch_s=12.0)
        self.elastic = ElasticEngines(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            decided=self.decided,
            serve=lambda count: self.told.append(f"serve {count}"),
            chooser=self.chooser,
            hosts=self,  # type: ignore[arg-type]
            start_timeout_s=start_timeout_s,
            clock=lambda: self.now,
        )

    async def decided(self, decision: Decision, step: int, shown: bool) -> None:
        assert shown
        self.decisions.append(decision)

    # of the pool
    def withdraw(self, names: Iterable[str], reason: str) -> None:
        assert reason == OTHER_SET
        self.told.append(f"withdraw {' '.join(names)}")

    async def drain(self, name: str, reason: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.told.append(f"drain {name}")

    def readmit(self, name: str, reason: str) -> None:
        assert reason == OTHER_SET
        self.told.append(f"readmit {name}")

    def load(self) -> EngineLoad:
        return self.state

    # of the weight sync
    def remove(self, engine: Any) -> None:
        self.told.append(f"remove {engine}")

    async def admit(self, name: str, engine: Any) -> None:
        self.told.append(f"admit {engine}")

    # of the hosts
    def detach(self, name: str) -> Any:
        return name

    async def stop(self, name: str) -> None:
        self.now += 3.0
        self.told.append(f"stop {name}")

    async def start(self, name: str) -> Any:
        self.starting.set()
        if self.never is not None:
            await self.never.wait()
        self.now += 4.0
        self.told.append(f"start {name}")
        return name

    async def give_up(self, name: str) -> None:
        self.told.append(f"give up {name}")

    def kv_tokens(self, name: str) -> int:
        return 5_500

    async def round(self, version: int, seconds: float, preemptions: int) -> Decision | None:
        """Why another set served it."""
        ids = [TrajectoryId(prompt_id="p", group_id=version, sample=n) for n in range(8)]
        before = len(self.decisions)
        async with anyio.create_task_group() as group:
            await self.elastic.launched("synchronous", ids[:4], 10, version, group)
        decided = self.decisions[before:]
        async with anyio.create_task_group() as group:
            await self.elastic.launched("synchronous", ids[4:], 10, version, group)
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
                self.chooser.ended(identity, 400)
            self.elastic.ended(TrajectoryLost(id=half[0], group_size=8, cancelled=True, reason="", tokens=0))
        self.elastic.batch_closed()
        self.now += 50.0  # training is no part of a round
        return decided[0] if decided else None


async def test_rounds_that_preempt_lead_to_the_other_set_and_its_engines_take_over_in_order() -> None:
    world = World()
    assert [await world.round(version, 100.0, 5) for version in range(4)] == [None] * 4 and world.told == []
    assert world.elastic.figures["engines/set"] == 0
    because = await world.round(4, 40.0, 0)
    assert because is not None
    figures = because.figures
    assert (figures["preemptions"], figures["switch_s"], figures["kv_usage"]) == (5, 12.0, 0.97)
    assert figures["seconds"] == pytest.approx(100.0), "of rounds alone"
    assert world.told[0] == "withdraw engine-0 engine-1", "before the round's requests are ordered"
    assert sorted(world.told[1:7]) == [f"{what} engine-{n}" for what in ("drain", "remove", "stop") for n in (0, 1)]
    assert world.told[7:] == ["start engine-2", "admit engine-2", "readmit engine-2", "serve 1"]
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


async def test_nothing_changes_shortly_before_the_end_or_once_the_run_ends() -> None:
    short, ending = World(steps=5), World()
    for version in range(5):
        await short.round(version, 10.0, 5)
    assert short.told == [], "it would not pay any more"
    for version in range(4):
        await ending.round(version, 100.0, 5)
    ending.elastic.give_up()
    await ending.round(4, 100.0, 5)
    assert ending.told == []


async def test_an_engine_that_is_not_ready_in_time_is_named_and_one_that_is_given_up_is_ended() -> None:
    late, given_up = World(start_timeout_s=0.02), World()
    late.never = given_up.never = anyio.Event()
    plan = SetPlan(engine_set="1x2")
    with pytest.raises(EngineError, match=r"engine-2: not ready within 0.02 s .* \(engines.advanced.start_timeout_s\)"):
        await late.elastic.switch(plan)
    async with anyio.create_task_group() as group:
        group.start_soon(given_up.elastic.switch, plan)
        await given_up.starting.wait()
        given_up.elastic.give_up()
    assert given_up.told[-1] == "give up engine-2" and given_up.chooser.current == "2x1"
