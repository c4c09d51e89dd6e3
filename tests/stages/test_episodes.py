"""The life of a trajectory: how an episode ends, and what goes on beside it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from builders import InstantClock, ZeroRewards

from streamrl.base.stage_messages import LaunchTrajectory, Scored, TrajectoryLost, TrajectoryOutcome
from streamrl.base.types import Prompt, Trajectory, TrajectoryId, token_array
from streamrl.contracts import Journal
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.recipe.sections import Sampling
from streamrl.stages.episodes import EpisodeCancelled, EpisodeModel, Episodes, one_completion


class Rewards(ZeroRewards):
    """Rewards that come when they are let through, and what was heard of siblings that are lost."""

    def __init__(self) -> None:
        self.through, self.waiting, self.lost_ones = anyio.Event(), 0, list[TrajectoryId]()

    async def score(self, trajectory: Trajectory, group_size: int) -> Scored:
        self.waiting += 1
        await self.through.wait()
        return await super().score(trajectory, group_size)

    async def lost(self, trajectory: TrajectoryId, group_size: int) -> None:
        self.lost_ones.append(trajectory)


class Bench:
    def __init__(self, **options: Any) -> None:
        clock, lengths = InstantClock(), LengthMixture(median=200, sigma=0.01, long_share=0.0)
        self.engine = SimulatedEngine(SimulationOptions(lengths=lengths), clock=clock.now, sleep=clock.sleep)
        self.rewards, self.heard = Rewards(), list[TrajectoryOutcome]()
        self.episodes = Episodes(self.engine, Sampling(max_tokens=300), self.rewards, Journal(), **options)

    def launch(self, sample: int) -> TrajectoryId:
        identity = TrajectoryId(prompt_id="p", group_id=0, sample=sample)
        prompt = Prompt(prompt_id="p", token_ids=token_array([2, 3]))
        order = LaunchTrajectory(id=identity, prompt=prompt, group_size=2, seed=sample)
        self.episodes.launch(order, self.take)
        return identity

    async def take(self, outcome: TrajectoryOutcome) -> None:
        self.heard.append(outcome)


async def samples_nothing(model: EpisodeModel) -> None: ...


async def survives_its_end(model: EpisodeModel) -> None:
    try:
        await model.sample()
    except EpisodeCancelled:
        with pytest.raises(EpisodeCancelled):
            await model.sample()


@pytest.mark.parametrize("episode", [one_completion, survives_its_end, samples_nothing])
async def test_an_episode_without_a_whole_completion_is_lost_once_and_its_siblings_hear_of_it(episode: Any) -> None:
    bench = Bench(episode=episode)
    await bench.engine.start()
    async with bench.episodes.running():
        identity = bench.launch(0)
        while episode is not samples_nothing and bench.engine.load().generated_tokens < 20:
            await anyio.lowlevel.checkpoint()
        bench.episodes.cancel([identity])
    [lost] = bench.heard
    assert isinstance(lost, TrajectoryLost) and lost.id == identity and lost.cancelled
    assert (lost.tokens >= 20) == (episode is not samples_nothing)
    assert bench.rewards.lost_ones == [identity] and bench.rewards.waiting == 0
    assert bench.engine.load().running == bench.episodes.statistics().running == 0


async def test_a_trajectory_that_waits_for_its_reward_holds_no_engine() -> None:
    bench = Bench(one_at_a_time=True)
    await bench.engine.start()
    async with bench.episodes.running():
        ids = [bench.launch(0), bench.launch(1)]
        while bench.rewards.waiting < 2:  # the second is sampled although the first has no reward yet
            await anyio.lowlevel.checkpoint()
        assert bench.episodes.statistics().running == 0 and not bench.heard
        bench.episodes.cancel(ids)  # too late: what is scored has its outcome
        bench.rewards.through.set()
    assert all(isinstance(outcome, Scored) for outcome in bench.heard) and len(bench.heard) == 2


async def test_what_is_cancelled_after_its_last_token_is_lost_with_all_of_them() -> None:
    sampled, ends = anyio.Event(), anyio.Event()

    async def works_on(model: EpisodeModel) -> None:
        await model.sample()
        sampled.set()
        await ends.wait()

    bench = Bench(episode=works_on)
    await bench.engine.start()
    async with bench.episodes.running():
        identity = bench.launch(0)
        await sampled.wait()
        bench.episodes.cancel([identity])
        ends.set()
    [lost] = bench.heard
    assert isinstance(lost, TrajectoryLost) and lost.cancelled and lost.tokens == bench.engine.load().generated_tokens
    assert bench.rewards.lost_ones == [identity] and bench.rewards.waiting == 0
