"""Episodes keep what a race cancelled, and verifies it when the same draw is launched again."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from builders.base import InstantClock
from builders.stages import episodes_on

from streamrl.base.messages import PauseMode
from streamrl.base.stage_messages import LaunchTrajectory, Scored, TrajectoryLost, TrajectoryOutcome
from streamrl.base.types import Prompt, Trajectory, TrajectoryId, token_array
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions

PROMPT = Prompt(prompt_id="p", token_ids=token_array([2, 3]))
LONG = LengthMixture(median=200, sigma=0.01, long_share=0.0)


def launch(group: int, sample: int = 0, seed: int = 7, **changes: Any) -> LaunchTrajectory:
    identity = TrajectoryId(prompt_id="p", group_id=group, sample=sample)
    order = LaunchTrajectory(id=identity, prompt=PROMPT, group_size=2, seed=seed + sample)
    return msgspec.structs.replace(order, **changes)


class Rollout:
    """Episodes on a simulated engine in virtual time."""

    def __init__(self, *, verifies: bool = True) -> None:
        self.clock = InstantClock()
        self.engine = SimulatedEngine(
            SimulationOptions(lengths=LONG, policy_version=3), clock=self.clock.now, sleep=self.clock.sleep
        )
        self.stage = episodes_on(self.engine, verifies_deferred=verifies)
        self.outcomes: asyncio.Queue[TrajectoryOutcome] = asyncio.Queue()

    async def __aenter__(self) -> Rollout:
        await self.engine.start()
        self.running = self.stage.running()
        await self.running.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.running.__aexit__(None, None, None)

    async def finish(self, order: LaunchTrajectory) -> tuple[Trajectory, float]:
        """The whole trajectory, and the seconds that it took."""
        began = self.clock.now()
        self.stage.launch(order, self.outcomes.put)
        outcome = await self.outcomes.get()
        assert isinstance(outcome, Scored)
        return outcome.outcome.trajectory, self.clock.now() - began

    async def lose(self, order: LaunchTrajectory, tokens: int) -> int:
        """Cancelled once it has about so many tokens; returns how many it had."""
        before = self.engine.load().decode_tokens
        self.stage.launch(order, self.outcomes.put)
        while self.engine.load().decode_tokens < before + tokens:
            await anyio.lowlevel.checkpoint()
        self.stage.cancel([order.id])
        lost = await self.outcomes.get()
        assert isinstance(lost, TrajectoryLost)
        return lost.tokens


async def test_a_relaunched_deferred_prompt_continues() -> None:
    """A deferred prompt that is launched again continues from its tokens."""
    async with Rollout(verifies=False) as plain:
        expected, whole_s = await plain.finish(launch(0))
    async with Rollout() as rollout:
        had = await rollout.lose(launch(0), 120)
        await rollout.engine.pause(PauseMode.ABORT, clear_cache=True)
        rollout.engine._policy_version = 4
        await rollout.engine.resume()
        again, seconds = await rollout.finish(launch(5, seed=7))
        statistics = rollout.stage.statistics()
    [segment], [wanted] = again.segments, expected.segments
    assert segment.token_ids == wanted.token_ids
    assert [(span.start, span.end, span.policy_version) for span in segment.version_spans] == [
        (0, len(segment.token_ids), 4)
    ], "all of it is of the version that verified it"
    assert len(segment.behavior_logprobs) == len(segment.token_ids)
    assert statistics.verified_tokens == statistics.accepted_tokens == had
    assert statistics.generated_tokens == len(wanted.token_ids), "had, and the rest"
    assert seconds < 0.5 * whole_s


async def test_other_draws_and_replays_keep_no_tokens() -> None:
    """No tokens are kept of other draws, of evaluations, or where deferred prompts are replayed."""
    async with Rollout() as rollout:
        await rollout.lose(launch(0), 60)
        await rollout.lose(launch(1, seed=50, evaluation=True), 60)
        await rollout.finish(launch(2, seed=90))
        await rollout.finish(launch(3, seed=50, evaluation=True))
        assert rollout.stage.statistics().verified_tokens == 0
    async with Rollout(verifies=False) as rollout:
        await rollout.lose(launch(0), 60)
        await rollout.finish(launch(1))
        assert rollout.stage.statistics().verified_tokens == 0


async def test_a_complete_member_of_a_group_that_loses_is_kept_too() -> None:
    async with Rollout() as rollout:
        first, _ = await rollout.finish(launch(0))
        await rollout.lose(launch(0, sample=1), 60)
        rollout.stage.cancel([launch(0).id])
        again, _ = await rollout.finish(launch(4))
        statistics = rollout.stage.statistics()
    assert again.segments[0].token_ids == first.segments[0].token_ids
    assert again.finish_reason is first.finish_reason, "the engine comes to the end by itself"
    assert statistics.accepted_tokens == len(first.segments[0].token_ids) - 1


async def test_only_tokens_of_the_first_noise_are_kept() -> None:
    """What a drained engine cut goes on with a seed of its own, whose noise begins elsewhere."""
    async with Rollout() as rollout:
        rollout.stage.launch(launch(0), rollout.outcomes.put)
        while rollout.engine.load().decode_tokens < 50:
            await anyio.lowlevel.checkpoint()
        cut_at = rollout.engine.load().decode_tokens
        await rollout.engine.pause(PauseMode.ABORT, clear_cache=True)
        await rollout.engine.resume()
        while rollout.engine.load().decode_tokens < 90:
            await anyio.lowlevel.checkpoint()
        rollout.stage.cancel([launch(0).id])
        await rollout.outcomes.get()
        await rollout.finish(launch(1))
        assert cut_at <= rollout.stage.statistics().verified_tokens <= cut_at + 1
