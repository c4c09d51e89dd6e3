"""What is measured of rounds leads to another set of engines, which takes over in the right order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest

from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineLoad
from streamrl.base.types import TrajectoryId
from streamrl.elastic.engine_sets import EngineSet, SetPlan
from streamrl.elastic.engine_switch import SWITCH, EngineSwitch, PreparedEngines

pytestmark = pytest.mark.asyncio

WIDE = EngineSet(name="2x1", engines=2, tensor_parallel_size=1, kv_tokens=2_000)
DEEP = EngineSet(name="1x2", engines=1, tensor_parallel_size=2, kv_tokens=5_000)
SETS = (
    PreparedEngines(engine_set=WIDE, engines=("engine-0", "engine-1")),
    PreparedEngines(engine_set=DEEP, engines=("engine-2",)),
)


class World:
    """Pool, hosts and pushes that only say what was asked of them; and the time."""

    def __init__(self, *, steps: int = 100, start_timeout_s: float = 5.0) -> None:
        self.told: list[str] = []
        self.now = 0.0
        self.state = EngineLoad(running=0, waiting=0, kv_cache_usage=0.0, generated_tokens=0)
        self.never: anyio.Event | None = None
        self.starting = anyio.Event()
        self.switch = EngineSwitch(
            self,
            SETS,
            publisher=self,
            hosts=self,
            steps=steps,
            start_s=12.0,
            start_timeout_s=start_timeout_s,
            clock=lambda: self.now,
        )

    # of the pool
    def withdraw(self, names: Sequence[str], *, by: str) -> None:
        assert by == SWITCH
        self.told.append(f"withdraw {' '.join(names)}")

    async def drain(self, name: str, *, by: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.told.append(f"drain {name}")

    def readmit(self, name: str, *, by: str) -> None:
        assert by == SWITCH
        self.told.append(f"readmit {name}")

    def load(self) -> EngineLoad:
        return self.state

    # of the pushes
    async def leave(self, engine: Any) -> None:
        self.told.append(f"leave {engine}")

    async def admit(self, engine: Any, policy_version: int) -> None:
        self.told.append(f"admit {engine} at {policy_version}")

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

    async def round(self, version: int, seconds: float, preemptions: int) -> SetPlan | None:
        ids = [TrajectoryId(prompt_id="p", group_id=version, sample=n) for n in range(8)]
        plan = self.switch.launched("synchronous", ids[:4], 10, version)
        if plan is not None:
            await self.switch.carry_out(plan, version)
        assert self.switch.launched("synchronous", ids[4:], 10, version) is None, "once a round"
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
                self.switch.ended(identity, 400)
        self.switch.ended(ids[0], 400)  # told twice: it counts once
        self.switch.round_closed()
        self.now += 50.0  # training is no part of a round
        return plan


async def test_rounds_that_preempt_lead_to_the_other_set_and_its_engines_take_over_in_order() -> None:
    world = World()
    plans = [await world.round(version, 100.0, 5) for version in range(4)]
    assert plans == [None] * 4 and world.told == []
    assert world.switch.figures["engines/set"] == 0
    plan = await world.round(4, 40.0, 0)
    assert plan is not None and plan.because is not None and plan.engine_set == "1x2"
    figures = plan.because.figures
    assert (figures["preemptions"], figures["switch_s"], figures["kv_usage"]) == (5, 12.0, 0.97)
    assert figures["seconds"] == pytest.approx(100.0), "of rounds alone"
    assert world.told[0] == "withdraw engine-0 engine-1", "before the round's requests are ordered"
    assert sorted(world.told[1:7]) == [f"{what} engine-{n}" for what in ("drain", "leave", "stop") for n in (0, 1)]
    assert world.told[7:] == ["start engine-2", "admit engine-2 at 4", "readmit engine-2"]
    assert world.switch.figures == {
        "engines/set": 1,
        "engines/serving": 1,
        "engines/switches_total": 1,
        "time/engine_switch_s": 10.0,
    }
    assert world.switch.figures["time/engine_switch_s"] == 0, "of one step"
    assert [await world.round(version, 40.0, 0) for version in range(5, 12)] == [None] * 7


async def test_what_a_switch_took_is_what_the_next_is_taken_to_cost() -> None:
    world = World()
    for version in range(5):
        await world.round(version, 100.0, 5)
    assert world.switch._switch_s == 10.0 and world.switch.current == "1x2"
    assert world.switch._sets["1x2"].engine_set.kv_tokens == 5_500, "as its engines said"


async def test_nothing_changes_shortly_before_the_end_or_once_the_run_ends() -> None:
    short = World(steps=5)
    for version in range(5):
        await short.round(version, 10.0, 5)
    assert short.told == [], "it would not pay any more"
    ending = World()
    for version in range(4):
        await ending.round(version, 100.0, 5)
    ending.switch.give_up()
    await ending.round(4, 100.0, 5)
    assert ending.told == []


async def test_an_engine_that_is_not_ready_in_time_or_given_up_is_named() -> None:
    world = World(start_timeout_s=0.02)
    world.never = anyio.Event()
    for version in range(4):
        await world.round(version, 100.0, 5)
    with pytest.raises(EngineError, match=r"engine-2: not ready within 0.02 s .* \(engines.advanced.start_timeout_s\)"):
        await world.round(4, 100.0, 5)
    given_up = World()
    given_up.never = anyio.Event()
    for version in range(4):
        await given_up.round(version, 100.0, 5)
    plan = given_up.switch.launched("synchronous", [TrajectoryId(prompt_id="p", group_id=9, sample=0)], 10, 4)
    assert plan is not None
    async with anyio.create_task_group() as group:
        group.start_soon(given_up.switch.carry_out, plan, 4)
        await given_up.starting.wait()
        given_up.switch.give_up()
    assert given_up.told[-1] == "give up engine-2" and given_up.switch.current == "2x1"
