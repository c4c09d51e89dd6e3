"""The reward stage alone: replaced reward workers, whole groups, other functions while trajectories flow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import repeat
from typing import Any

import anyio
import anyio.abc
import msgspec
import pytest
from builders.base import trajectory

from streamrl.base.errors import RecipeError, StreamEnded
from streamrl.base.stage_messages import Scored
from streamrl.base.types import Prompt, RewardFailure, RewardFailureKind, ScoredTrajectory, Trajectory, token_array
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.wire import WireCodec
from streamrl.recipe.rewards import Reward
from streamrl.rewards.reward_messages import (
    CloseRewardSet,
    CompletionToScore,
    GroupScored,
    GroupsScored,
    LoadRewardSet,
    RewardOrder,
    RewardSetLoaded,
    RewardWorkerReady,
    SampleReward,
    ScoreGroups,
)
from streamrl.stages.reward import RewardSettings, RewardStage

Script = Callable[[Any, Any], Awaitable[None]]


class Scores:
    """What a stage has answered, as trajectories come to it."""

    def __init__(self, stage: RewardStage, group: anyio.abc.TaskGroup) -> None:
        self.stage, self.outcomes, self._group = stage, list[Scored](), group

    def come(self, done: Trajectory, group_size: int) -> None:
        self._group.start_soon(self._score, done, group_size)

    async def _score(self, done: Trajectory, group_size: int) -> None:
        self.outcomes.append(await self.stage.score(done, group_size))


@asynccontextmanager
async def scoring(settings: RewardSettings, lives: Iterable[Script], *, most_orders: int = 8) -> AsyncIterator[Scores]:
    """Run the stage with one worker whose successive lives follow ``lives``."""
    scripts = iter(lives)

    @asynccontextmanager
    async def open_worker() -> AsyncIterator[Any]:
        orders_in, orders_out = memory_stream(most_orders)
        results_in, results_out = memory_stream(8)
        group.start_soon(next(scripts), orders_out, results_in)
        yield orders_in, results_out

    async with anyio.create_task_group() as group:
        stage = RewardStage(settings, [open_worker])
        async with stage.running(), anyio.create_task_group() as waiting:
            yield Scores(stage, waiting)


async def score(settings: RewardSettings, scripts: list[Script], count: int) -> list[Scored]:
    """Score ``count`` siblings that come at once."""
    async with scoring(settings, scripts) as scores:
        for sample in range(count):
            scores.come(trajectory(sample), count)
    return scores.outcomes


async def answer_everything(orders: Any, results: Any) -> None:
    await results.send(RewardWorkerReady(worker=0))
    async for order in orders:
        await results.send(scored_as(order, lambda completion: float(completion.sample)))
    await results.aclose()


def scored_as(order: Any, reward: Callable[[CompletionToScore], float]) -> GroupsScored:
    assert isinstance(order, ScoreGroups)
    return GroupsScored(
        groups=tuple(
            GroupScored(order_id=g.order_id, rewards=tuple(SampleReward(reward=reward(c)) for c in g.completions))
            for g in order.groups
        )
    )


def settings(*, per_group: bool = False, timeout_s: float = 300.0, concurrency: int = 2) -> RewardSettings:
    return RewardSettings(functions="f", per_group=per_group, timeout_s=timeout_s, concurrency=concurrency)


async def test_a_successor_scores_unanswered_samples() -> None:
    """A successor scores the samples that a replaced worker had not answered."""

    async def die_at_once(orders: Any, results: Any) -> None:
        await orders.receive()
        await orders.abort("killed")
        await results.abort("killed")

    outcomes = await score(settings(), [die_at_once, answer_everything], 3)
    assert sorted(o.outcome.reward for o in outcomes if isinstance(o.outcome, ScoredTrajectory)) == [0.0, 1.0, 2.0]


async def test_no_successor_follows_a_last_answer() -> None:
    """A worker whose stream breaks after its last answer has no successor."""

    async def break_at_the_end(orders: Any, results: Any) -> None:
        await results.send(RewardWorkerReady(worker=0))
        async for order in orders:
            await results.send(scored_as(order, lambda completion: float(completion.sample)))
        await results.abort("its process had ended")

    assert len(await score(settings(), [break_at_the_end], 2)) == 2


async def test_calls_beyond_their_limit_are_timed_out() -> None:
    """A call that hung for longer than its limit is recorded as timed out."""

    async def hang_then_die(orders: Any, results: Any) -> None:
        await orders.receive()
        await anyio.sleep(0.05)
        await orders.abort("killed")
        await results.abort("killed")

    outcomes = await score(settings(timeout_s=0.01), [hang_then_die, answer_everything], 2)
    failures = [o.outcome for o in outcomes if isinstance(o.outcome, RewardFailure)]
    assert failures and all(f.kind is RewardFailureKind.TIMED_OUT for f in failures)
    assert len(outcomes) == 2


async def test_group_functions_get_whole_groups() -> None:
    """A function that scores groups gets whole groups, even when a sibling is lost."""
    seen: list[int] = []

    async def note_sizes(orders: Any, results: Any) -> None:
        await results.send(RewardWorkerReady(worker=0))
        async for order in orders:
            seen.extend(len(group.completions) for group in order.groups)
            await results.send(scored_as(order, lambda completion: 0.0))
        await results.aclose()

    async with scoring(settings(per_group=True), [note_sizes]) as scores:
        scores.come(trajectory(0), 2)
        scores.come(trajectory(1, group=1), 3)
        await scores.stage.lost(trajectory(0, group=1).id, 3)
        scores.come(trajectory(1), 2)
        scores.come(trajectory(2, group=1), 3)
    assert sorted(seen) == [2, 2] and len(scores.outcomes) == 4


async def test_an_answer_that_nobody_waits_for_any_more_ends_nothing() -> None:
    asked, answers = anyio.Event(), anyio.Event()

    async def answer_late(orders: Any, results: Any) -> None:
        async for order in orders:
            asked.set()
            await answers.wait()
            await results.send(scored_as(order, lambda completion: 1.0))
        await results.aclose()

    async with scoring(settings(), [answer_late]) as scores:
        async with anyio.create_task_group() as ending:
            ending.start_soon(scores.stage.score, trajectory(0), 2)
            await asked.wait()
            ending.cancel_scope.cancel()
        answers.set()
        scores.come(trajectory(1), 2)
    assert [outcome.outcome.trajectory.id.sample for outcome in scores.outcomes] == [1]


async def test_urgent_batches_travel_first_and_together() -> None:
    """Samples that come together travel together, and those that close a round soonest go first."""
    messages: list[list[tuple[int, int]]] = []
    many = anyio.Event()

    async def take_slowly(orders: Any, results: Any) -> None:
        while True:
            try:
                order = await orders.receive()
            except StreamEnded:
                break
            ranks = [group.rank for group in order.groups]
            assert ranks == sorted(ranks)
            messages.append([(c.group_id, c.sample) for group in order.groups for c in group.completions])
            await many.wait()
            await results.send(scored_as(order, lambda completion: 1.0))
        await results.aclose()

    sizes = {1: 5, 2: 2, 3: 1}
    async with scoring(settings(concurrency=64), repeat(take_slowly), most_orders=1) as scores:
        scores.come(trajectory(0, group=1), 5)
        await anyio.wait_all_tasks_blocked()
        assert messages == [[(1, 0)]], "the first one goes alone, at once"
        scores.come(trajectory(1, group=1), 5)
        await anyio.wait_all_tasks_blocked()  # it waits in the stream; what comes now gathers
        for number, sample in [(1, 2), (2, 0), (1, 3), (3, 0), (2, 1)]:
            scores.come(trajectory(sample, group=number), sizes[number])
            await anyio.wait_all_tasks_blocked()
        many.set()
    outcomes = scores.outcomes
    assert messages == [[(1, 0)], [(1, 1)], [(1, 2)], [(3, 0), (2, 0), (2, 1), (1, 3)]]
    assert len(outcomes) == len({str(o.outcome.trajectory.id) for o in outcomes}) == 7


async def test_samples_of_a_dead_worker_are_scored_once() -> None:
    """Each sample of a batch whose worker dies is scored once, and an answer counts once."""
    seen: list[list[int]] = []

    async def answer_half_twice_and_die(orders: Any, results: Any) -> None:
        order = await orders.receive()
        seen.append([c.sample for group in order.groups for c in group.completions])
        half = msgspec.structs.replace(order, groups=order.groups[: len(order.groups) // 2])
        for _ in range(2):
            await results.send(scored_as(half, lambda completion: 1.0))
        await results.abort("killed")
        await orders.abort("killed")

    async def answer_the_rest(orders: Any, results: Any) -> None:
        async for order in orders:
            seen.append([c.sample for group in order.groups for c in group.completions])
            for _ in range(2):
                await results.send(scored_as(order, lambda completion: 2.0))
        await results.aclose()

    outcomes = await score(settings(concurrency=64), [answer_half_twice_and_die, answer_the_rest], 12)
    rewards = {o.outcome.trajectory.id.sample: o.outcome.reward for o in outcomes}
    assert len(outcomes) == len(rewards) == 12
    first, rest = seen[0], [sample for batch in seen[1:] for sample in batch]
    assert len(first) > 2 and sorted(first[len(first) // 2 :] + [s for s in range(12) if s not in first]) == sorted(
        rest
    )
    assert {s for s, reward in rewards.items() if reward == 1.0} == set(first[: len(first) // 2])


COLUMNS_TOGETHER_TOO_LARGE: dict[str, object] = {
    "9 MB of text in each prompt": "x" * 9_000_000,
    "0.7 MB of small numbers in each prompt": [[i % 100 for i in range(1000)] for _ in range(700)],
    "0.1 MB of empty lists in each prompt": [[]] * 100_000,
}


@pytest.mark.long
@pytest.mark.parametrize("tests", COLUMNS_TOGETHER_TOO_LARGE.values(), ids=COLUMNS_TOGETHER_TOO_LARGE)
async def test_what_gathers_goes_in_messages_that_a_stream_takes(tests: object) -> None:
    """Orders gather while a worker is being replaced; together they may be more than one message holds."""
    codec: WireCodec[RewardOrder] = WireCodec(RewardOrder)
    messages: list[list[int]] = []

    async def take_from_a_wire(orders: Any, results: Any) -> None:
        async for order in orders:
            received = codec.decode(codec.encode(order))
            assert isinstance(received, ScoreGroups)
            messages.append([c.group_id for group in received.groups for c in group.completions])
            await results.send(scored_as(received, lambda completion: 1.0))
        await results.aclose()

    async with anyio.create_task_group() as group:

        @asynccontextmanager
        async def open_worker() -> AsyncIterator[Any]:
            orders_in, orders_out = memory_stream(8)
            results_in, results_out = memory_stream(8)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(take_from_a_wire, orders_out, results_in)
            yield orders_in, results_out

        stage = RewardStage(settings(concurrency=64), [open_worker])
        async with stage.running(), anyio.create_task_group() as waiting:
            scores = Scores(stage, waiting)
            for number in range(16):
                prompt = Prompt(prompt_id=f"p{number}", token_ids=token_array([2, 3]), columns={"tests": tests})
                for sample in range(4):
                    done = msgspec.structs.replace(trajectory(sample, group=number), prompt=prompt)
                    scores.come(done, 4)
    assert len(scores.outcomes) == 64
    assert 1 < len(messages) <= 16, "a prompt travels with all of its completions that wait"


# ---- other functions while trajectories flow ------------------------------------------------------


class VersionedWorker:
    """Scores with the number of the version that an order names, if it has loaded it."""

    def __init__(self) -> None:
        self.loaded = {0}
        self.closed: list[int] = []
        self.scored: list[tuple[int, int]] = []
        self.refuse = False

    async def run(self, orders: Any, results: Any) -> None:
        await results.send(RewardWorkerReady(worker=0))
        async for order in orders:
            match order:
                case LoadRewardSet():
                    if not self.refuse:
                        self.loaded.add(order.reward_version)
                    problems = ("planted",) if self.refuse else ()
                    await results.send(RewardSetLoaded(reward_version=order.reward_version, problems=problems))
                case CloseRewardSet():
                    self.loaded.discard(order.reward_version)
                    self.closed.append(order.reward_version)
                case ScoreGroups():
                    for group in order.groups:
                        assert group.reward_version in self.loaded, "scored by functions that are gone"
                        self.scored += [(c.sample, group.reward_version) for c in group.completions]
                    await results.send(scored_as(order, lambda completion: float(completion.sample)))
        await results.aclose()


async def test_one_version_of_a_function_scores_each_sample() -> None:
    """Functions are replaced between orders, and one version scores each sample."""
    worker = VersionedWorker()
    noted: list[int] = []
    async with scoring(settings(), repeat(worker.run)) as scores:
        stage = scores.stage

        async def flow(first: int) -> None:
            for number in range(first, first + 10):
                # Groups of two, each begun in one flow and completed in the next.
                done = trajectory(number, group=(number + 1) // 2)
                scores.come(done, 1 if number in (0, 29) else 2)
                await anyio.lowlevel.checkpoint()

        await flow(0)
        while len(scores.outcomes) < 3:
            await anyio.lowlevel.checkpoint()
        reward = Reward(function="other:function")
        async with anyio.create_task_group() as both:
            both.start_soon(flow, 10)
            both.start_soon(stage.load, 1, (reward,), lambda: noted.append(len(worker.scored)))
        worker.refuse = True
        with pytest.raises(RecipeError, match="planted"):
            await stage.load(2, (reward,), lambda: noted.append(-1))
        assert stage.reward_version == 1
        await flow(20)
    outcomes = scores.outcomes
    assert sorted(o.outcome.trajectory.id.sample for o in outcomes) == list(range(30))
    assert sorted(sample for sample, _ in worker.scored) == list(range(30))  # none twice, none by both
    assert {(o.outcome.trajectory.id.sample, o.outcome.reward_version) for o in outcomes} == set(worker.scored)
    assert {version for sample, version in worker.scored if sample >= 21} == {1}
    of_group: dict[int, set[int]] = {}
    for sample, version in worker.scored:
        of_group.setdefault((sample + 1) // 2, set()).add(version)
    assert all(len(versions) == 1 for versions in of_group.values()), "siblings that cannot be compared"
    assert sorted(worker.closed) == [0, 2]
    # What the log says holds: what was scored before the note was scored by the version before.
    assert [version for _, version in worker.scored[: noted[0]]] == [0] * noted[0]
    assert len(noted) == 1


@pytest.mark.parametrize("deadly_loads", [1, 100])
async def test_functions_that_end_processes_get_one_retry(deadly_loads: int) -> None:
    """Functions that end each process that loads them are refused after one retry. The first death may have had another
    reason: one successor is asked."""
    asked: list[int] = []

    async def die_of_loading(orders: Any, results: Any) -> None:
        async for order in orders:
            if isinstance(order, LoadRewardSet):
                asked.append(order.reward_version)
                if len(asked) <= deadly_loads:
                    await orders.abort("killed")
                    await results.abort("killed")
                    return
                await results.send(RewardSetLoaded(reward_version=order.reward_version))
            elif isinstance(order, ScoreGroups):
                await results.send(scored_as(order, lambda completion: 1.0))
        await results.aclose()

    async with scoring(settings(), repeat(die_of_loading)) as scores:
        if deadly_loads == 1:
            await scores.stage.load(1, (Reward(function="other:function"),), lambda: None)
        else:
            with pytest.raises(RecipeError, match="ended, 2 times, when they were to load function: see the log"):
                await scores.stage.load(1, (Reward(function="other:function"),), lambda: None)
        scores.come(trajectory(0), 1)
    (outcome,) = scores.outcomes
    assert asked == [1, 1]
    assert outcome.outcome.reward_version == (1 if deadly_loads == 1 else 0)
