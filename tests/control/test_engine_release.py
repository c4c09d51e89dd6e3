"""Engines are freed and readmitted under a running stage, on simulated engines."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from streamrl.comm.memory_stream import memory_stream
from streamrl.control.engine_planning import PlanningSettings
from streamrl.control.engine_release import EngineRelease
from streamrl.engines.engine_pool import EnginePool
from streamrl.engines.simulated_engine import InstantClock, LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.messages import EngineLoad
from streamrl.stage_messages import FinishedTrajectory, LaunchTrajectory
from streamrl.stages.rollout import RolloutStage
from streamrl.types import Prompt, TrajectoryId, token_array

pytestmark = pytest.mark.asyncio


class PacedEngine(SimulatedEngine):
    """Says that a token takes a second, of the real clock: what runs has no token yet, as far as is known."""

    def __init__(self, index: int, *, pace: float = 1.0) -> None:
        clock = InstantClock()
        lengths = LengthMixture(median=60.0, sigma=0.6, long_share=0.0)
        options = SimulationOptions(name=f"engine-{index}", lengths=lengths, policy_version=0)
        super().__init__(options, clock=clock.now, sleep=clock.sleep)
        self.pace = pace

    def load(self) -> EngineLoad:
        return msgspec.structs.replace(super().load(), token_s=self.pace)


class Round:
    """32 trajectories on four engines; ``during`` runs once a quarter of them have ended."""

    def __init__(self, pace: float = 1.0) -> None:
        self.engines = [PacedEngine(index, pace=pace) for index in range(4)]
        self.pool = EnginePool(self.engines)
        self.release = EngineRelease(
            self.pool,
            kv_tokens=4_000,
            block_tokens=16,
            max_running=32,
            cap=300,
            settings=PlanningSettings(least_lengths=4),
        )
        for tokens in range(20, 120, 2):
            self.release.completed("long", tokens)
        self.finished: list[FinishedTrajectory] = []
        self.reasons: list[str] = []

    async def run(self) -> None:
        give, orders = memory_stream(64)
        outcomes, take = memory_stream(64)
        await self.pool.start()
        stage = RolloutStage(self.pool, max_tokens=300, temperature=1.0, top_p=1.0)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(stage.run, orders, outcomes)
                self.finished, self.reasons = [], []
                self.release.begin_round()
                for number in range(32):
                    identity = TrajectoryId(prompt_id="p", group_id=number // 4, sample=number % 4)
                    prompt = Prompt(prompt_id="p", token_ids=token_array([2, 3 + number // 4]))
                    await give.send(LaunchTrajectory(id=identity, prompt=prompt, group_size=4, seed=number))
                await give.aclose()
                async for outcome in take:
                    self.finished.append(outcome)
                    because = await self.release.look("long", finished=len(self.finished), launched=32)
                    if because is not None:
                        self.reasons.append(because.reason)
                        for name in self.release.freed:
                            assert not self.pool.served()[name]


async def test_half_of_the_engines_are_freed_once_and_everything_ends_on_the_others() -> None:
    work = Round()
    await work.run()
    assert len(work.release.freed) == 2 and len(work.reasons) == 1
    assert work.reasons[0].startswith("7 of 32 are finished (22%)")
    assert len({o.trajectory.id for o in work.finished}) == len(work.finished) == 32
    for name in work.release.freed:
        assert work.engines[int(name[-1])].load().running == 0
    before = [engine.load().generated_tokens for engine in work.engines]
    await work.run()  # the next round begins on all of them
    assert all(engine.load().generated_tokens > count for engine, count in zip(work.engines, before, strict=True))


async def test_without_a_pace_nothing_is_freed() -> None:
    work = Round(pace=0.0)
    await work.run()
    assert work.release.freed == () and not work.reasons
