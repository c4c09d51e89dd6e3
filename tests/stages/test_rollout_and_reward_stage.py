"""The two stages alone: cut and resumed trajectories, cancellations, replaced reward workers, whole groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from streamrl.comm.memory_stream import memory_stream
from streamrl.engines.simulated_engine import InstantClock, LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.messages import GroupScored, PauseMode, RewardWorkerReady, ScoreGroup
from streamrl.stage_messages import (
    CancelTrajectories,
    FinishedTrajectory,
    LaunchTrajectory,
    Scored,
    TrajectoryHeld,
    TrajectoryLost,
)
from streamrl.stages.reward import RewardSettings, RewardStage
from streamrl.stages.rollout import RolloutStage
from streamrl.types import (
    FinishReason,
    Prompt,
    RewardFailure,
    RewardFailureKind,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
    float_array,
    token_array,
)

pytestmark = pytest.mark.asyncio
PROMPT = Prompt(prompt_id="p", token_ids=token_array([2, 3]))
LONG = LengthMixture(median=200, sigma=0.01, long_share=0.0)


def launch(sample: int, size: int = 2, seed: int = 7) -> LaunchTrajectory:
    identity = TrajectoryId(prompt_id="p", group_id=0, sample=sample)
    return LaunchTrajectory(id=identity, prompt=PROMPT, group_size=size, seed=seed + sample)


def engine_with(lengths: LengthMixture) -> SimulatedEngine:
    clock = InstantClock()
    return SimulatedEngine(SimulationOptions(lengths=lengths, policy_version=3), clock=clock.now, sleep=clock.sleep)


async def roll(engine: SimulatedEngine, during: Callable[[RolloutStage, Any], Awaitable[None]]) -> list[Any]:
    """Launch two trajectories, let ``during`` interfere, and return both outcomes."""
    await engine.start()
    stage = RolloutStage(engine, max_tokens=300, temperature=1.0, top_p=1.0)
    give, orders = memory_stream(8)
    outcomes, take = memory_stream(8)
    async with anyio.create_task_group() as group:
        group.start_soon(stage.run, orders, outcomes)
        await give.send(launch(0))
        await give.send(launch(1))
        while engine.load().running < 2:
            await anyio.lowlevel.checkpoint()
        await during(stage, give)
        await give.aclose()
        return [outcome async for outcome in take]


async def test_a_pause_that_aborts_resumes_trajectories_from_their_tokens() -> None:
    engine = engine_with(LONG)

    async def during(stage: RolloutStage, give: Any) -> None:
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        await engine.pause(PauseMode.ABORT, clear_cache=True)
        await engine.resume()

    outcomes = await roll(engine, during)
    assert all(isinstance(o, FinishedTrajectory) for o in outcomes)
    for outcome in outcomes:
        [segment] = outcome.trajectory.segments
        assert 150 < len(segment.token_ids) == len(segment.behavior_logprobs) <= 300
        assert segment.version_spans[-1].end == len(segment.token_ids)
        assert outcome.trajectory.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_a_cancelled_trajectory_ends_once_as_lost() -> None:
    engine = engine_with(LONG)

    async def during(stage: RolloutStage, give: Any) -> None:
        await give.send(CancelTrajectories(ids=(launch(0).id, launch(5).id)))

    outcomes = await roll(engine, during)
    lost = [o for o in outcomes if isinstance(o, TrajectoryLost)]
    assert [(o.id.sample, o.cancelled) for o in lost] == [(0, True)]
    assert len(outcomes) == 2


def trajectory(sample: int, group: int = 0) -> Trajectory:
    segment = Segment(token_ids=token_array([5]), trained=True, behavior_logprobs=float_array([-1.0]))
    identity = TrajectoryId(prompt_id="p", group_id=group, sample=sample)
    return Trajectory(id=identity, prompt=PROMPT, segments=(segment,), finish_reason=FinishReason.STOP)


Script = Callable[[Any, Any], Awaitable[None]]


async def score(settings: RewardSettings, scripts: list[Script], incoming: list[Any]) -> list[Any]:
    """Run the stage with one worker whose successive lives follow ``scripts``."""
    lives = iter(scripts)
    async with anyio.create_task_group() as group:

        @asynccontextmanager
        async def open_worker() -> AsyncIterator[Any]:
            orders_in, orders_out = memory_stream(8)
            results_in, results_out = memory_stream(8)
            group.start_soon(next(lives), orders_out, results_in)
            yield orders_in, results_out

        give, trajectories = memory_stream(16)
        scored, take = memory_stream(16)
        group.start_soon(RewardStage(settings, [open_worker]).run, trajectories, scored)
        for item in incoming:
            await give.send(item)
        await give.aclose()
        return [outcome async for outcome in take]


async def answer_everything(orders: Any, results: Any) -> None:
    await results.send(RewardWorkerReady(worker=0))
    async for order in orders:
        outcomes = tuple(ScoredTrajectory(trajectory=t, reward=float(t.id.sample)) for t in order.trajectories)
        await results.send(GroupScored(order_id=order.order_id, outcomes=outcomes))
    await results.aclose()


def settings(*, per_group: bool = False, time_limit_s: float = 5.0) -> RewardSettings:
    return RewardSettings(functions="f", per_group=per_group, time_limit_s=time_limit_s, concurrency=2)


async def test_what_a_replaced_worker_had_not_overdone_is_scored_by_its_successor() -> None:
    async def die_at_once(orders: Any, results: Any) -> None:
        await orders.receive()
        await orders.abort("killed")
        await results.abort("killed")

    incoming = [FinishedTrajectory(trajectory=trajectory(i), group_size=3) for i in range(3)]
    outcomes = await score(settings(), [die_at_once, answer_everything], incoming)
    assert sorted(o.outcome.reward for o in outcomes if isinstance(o, Scored)) == [0.0, 1.0, 2.0]


async def test_what_hung_for_longer_than_its_limit_is_recorded_as_timed_out() -> None:
    async def hang_then_die(orders: Any, results: Any) -> None:
        await orders.receive()
        await anyio.sleep(0.05)
        await orders.abort("killed")
        await results.abort("killed")

    incoming = [FinishedTrajectory(trajectory=trajectory(i), group_size=1) for i in range(2)]
    outcomes = await score(settings(time_limit_s=0.01), [hang_then_die, answer_everything], incoming)
    failures = [o.outcome for o in outcomes if isinstance(o.outcome, RewardFailure)]
    assert failures and all(f.kind is RewardFailureKind.TIMED_OUT for f in failures)
    assert len(outcomes) == 2


async def test_a_function_that_scores_groups_gets_whole_groups_even_when_a_sibling_is_lost() -> None:
    seen: list[int] = []

    async def note_sizes(orders: Any, results: Any) -> None:
        await results.send(RewardWorkerReady(worker=0))
        async for order in orders:
            assert isinstance(order, ScoreGroup)
            seen.append(len(order.trajectories))
            outcomes = tuple(ScoredTrajectory(trajectory=t, reward=0.0) for t in order.trajectories)
            await results.send(GroupScored(order_id=order.order_id, outcomes=outcomes))
        await results.aclose()

    lost = TrajectoryLost(
        id=TrajectoryId(prompt_id="p", group_id=1, sample=0), group_size=3, cancelled=False, reason="planted"
    )
    incoming = [
        FinishedTrajectory(trajectory=trajectory(0), group_size=2),
        FinishedTrajectory(trajectory=trajectory(1, group=1), group_size=3),
        lost,
        FinishedTrajectory(trajectory=trajectory(1), group_size=2),
        FinishedTrajectory(trajectory=trajectory(2, group=1), group_size=3),
    ]
    outcomes = await score(settings(per_group=True), [note_sizes], incoming)
    assert sorted(seen) == [2, 2] and len(outcomes) == 5


async def test_a_held_trajectory_is_told_at_once_and_its_group_waits_for_it() -> None:
    held = TrajectoryHeld(id=TrajectoryId(prompt_id="p", group_id=0, sample=1), tokens=5)
    incoming = [
        FinishedTrajectory(trajectory=trajectory(0), group_size=2),
        held,
        FinishedTrajectory(trajectory=trajectory(1), group_size=2),
    ]
    outcomes = await score(settings(per_group=True), [answer_everything], incoming)
    assert outcomes[0] == held
    assert sorted(o.outcome.reward for o in outcomes[1:]) == [0.0, 1.0]
