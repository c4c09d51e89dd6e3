"""The reward worker: over memory streams here, and as a real process over ZeroMQ where it may have to end itself."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.config.recipe import Recipe
from streamrl.errors import RecipeError, StreamBroken, StreamEnded
from streamrl.rewards.exit_codes import REWARD_RESTART_EXIT_CODE
from streamrl.rewards.worker import run_reward_worker
from streamrl.stage_messages import (
    GroupScored,
    GroupsScored,
    RewardOrder,
    RewardResult,
    RewardWorkerReady,
    ScoreGroup,
    ScoreGroups,
)
from streamrl.types import (
    FinishReason,
    RewardFailureKind,
    Segment,
    Trajectory,
    token_array,
)

MakeTrajectory = Callable[..., Trajectory]
MakeRecipe = Callable[..., Recipe]
WORKER = Path(__file__).parent / "worker_process.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward.py"


async def answers_of(recipe: Recipe, *groups: tuple[Trajectory, ...]) -> dict[int, GroupScored]:
    send_order, orders = memory_stream(64)
    results, receive_result = memory_stream(64)
    answers: dict[int, GroupScored] = {}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_reward_worker(recipe, 0, orders, results, owns_process=False))
        assert await receive_result.receive() == RewardWorkerReady(worker=0)
        for number, group in enumerate(groups):
            await send_order.send(order(number, *group))
        await send_order.aclose()
        while len(answers) < len(groups):
            answer = await receive_result.receive()
            assert isinstance(answer, GroupsScored)
            answers |= {scored.order_id: scored for scored in answer.groups}
    return answers


@pytest.mark.asyncio
async def test_every_order_is_answered_in_the_order_of_its_trajectories(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    groups = [tuple(make_trajectory("a" * (1 + (i + j) % 5), group=i, sample=j) for j in range(4)) for i in range(20)]
    answers = await answers_of(make_recipe("async_length", "length", trusted=True), *groups)
    assert set(answers) == set(range(20))
    for number, group in enumerate(groups):
        rewards = [(reward.kind, reward.reward) for reward in answers[number].rewards]
        assert rewards == [(None, 2 * ((number + t.id.sample) % 5 + 1)) for t in group]


@pytest.mark.asyncio
async def test_completion_is_the_text_of_the_trained_segments(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    base = make_trajectory(answer="abab")
    turns = (
        Segment(token_ids=token_array([3, 4]), trained=True),
        Segment(token_ids=token_array([5, 5, 5]), trained=False),
        Segment(token_ids=token_array([3, 4, 1]), trained=True),
    )
    answers = await answers_of(make_recipe("match", trusted=True), (msgspec.structs.replace(base, segments=turns),))
    assert [reward.reward for reward in answers[0].rewards] == [1.0]


@pytest.mark.asyncio
async def test_reward_that_does_not_load_raises(make_recipe: MakeRecipe) -> None:
    _, orders = memory_stream(1)
    results, _ = memory_stream(1)
    with pytest.raises(RecipeError, match="no_such_function"):
        await run_reward_worker(make_recipe("no_such_function"), 0, orders, results, owns_process=False)


@pytest.mark.asyncio
async def test_custom_reward_example(make_recipe: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    right, close = make_trajectory("abc", answer="abc"), make_trajectory("abd", answer="abc", sample=1)
    cut = msgspec.structs.replace(make_trajectory("abc", answer="abc", sample=2), finish_reason=FinishReason.LENGTH)
    without = make_trajectory("abc", answer="", sample=3)
    answers = await answers_of(make_recipe(f"{EXAMPLE}:similarity"), (right, close, cut, without))
    *scored, not_applicable = answers[0].rewards
    assert [reward.reward for reward in scored] == [1.0, pytest.approx(2 / 3), 0.0]
    assert not_applicable.kind is RewardFailureKind.WRONG_TYPE


class WorkerProcess:
    """A started worker with the controller's ends of its streams."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        orders: SendStream[RewardOrder],
        results: ReceiveStream[RewardResult],
    ) -> None:
        self.process = process
        self.orders = orders
        self.results = results
        self._answers: list[GroupScored] = []

    async def answer(self) -> GroupScored:
        if not self._answers:
            answer = await self.results.receive()
            assert isinstance(answer, GroupsScored), answer
            self._answers += answer.groups
        return self._answers.pop(0)


def write_recipe(directory: str, recipe: Recipe) -> Path:
    path = Path(directory, "recipe.json")
    path.write_bytes(msgspec.json.encode(recipe))
    return path


@asynccontextmanager
async def worker_process(recipe: Recipe) -> AsyncIterator[WorkerProcess]:
    with tempfile.TemporaryDirectory(prefix="srl", dir="/tmp") as directory:
        recipe_path = write_recipe(directory, recipe)
        endpoints = [f"ipc://{directory}/orders", f"ipc://{directory}/results"]
        async with (
            zmq_sender(RewardOrder, endpoints[0], bind=True, name="orders") as orders,
            zmq_receiver(RewardResult, endpoints[1], bind=True, name="results") as results,
        ):
            command = [sys.executable, str(WORKER), str(recipe_path), *endpoints]
            process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
            try:
                assert await results.receive() == RewardWorkerReady(worker=3)
                yield WorkerProcess(process, orders, results)
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()


def order(number: int, *trajectories: Trajectory) -> ScoreGroups:
    return ScoreGroups(groups=(ScoreGroup(order_id=number, trajectories=trajectories),))


@pytest.mark.asyncio
async def test_trusted_function_that_holds_the_interpreter_ends_the_process_with_75(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    async with worker_process(make_recipe("holds_interpreter", time_limit_s=0.3, trusted=True)) as worker:
        await worker.orders.send(order(1, make_trajectory()))
        with pytest.raises(StreamBroken):
            await worker.results.receive()
        assert await worker.process.wait() == REWARD_RESTART_EXIT_CODE == 75
        assert worker.process.stderr is not None
        assert "holds_interpreter" in (await worker.process.stderr.read()).decode()  # the log names what hung


@pytest.mark.asyncio
async def test_answers_before_the_end_are_not_lost(make_recipe: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    async with worker_process(make_recipe("blocks_on_z", time_limit_s=0.3, trusted=True)) as worker:
        for number in range(20):
            await worker.orders.send(order(number, make_trajectory("a")))
        answers = [await worker.answer() for _ in range(20)]
        await worker.orders.send(order(20, make_trajectory("z")))
        assert sorted(answer.order_id for answer in answers) == list(range(20))
        assert all(answer.rewards[0].kind is None for answer in answers)
        with pytest.raises(StreamBroken):
            await worker.results.receive()
        assert await worker.process.wait() == 75


@pytest.mark.asyncio
async def test_too_many_coroutines_left_behind_ends_the_process_when_idle(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    async with worker_process(make_recipe("never_ends_on_z", time_limit_s=0.3, trusted=True)) as worker:
        group = [make_trajectory("z", sample=i) for i in range(9)] + [make_trajectory("a", sample=9)]
        await worker.orders.send(order(1, *group))
        *hung, fine = (await worker.answer()).rewards
        assert [reward.kind for reward in hung] == [RewardFailureKind.TIMED_OUT] * 9
        assert fine.kind is None
        assert await worker.process.wait() == 75
        with pytest.raises(StreamBroken):  # not StreamEnded: orders may have been on their way
            await worker.results.receive()


@pytest.mark.asyncio
async def test_stuck_call_does_not_keep_the_worker_when_orders_end(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    async with worker_process(
        make_recipe("never_ends_on_z", "swallows_cancellation", time_limit_s=0.3, trusted=True)
    ) as worker:
        await worker.orders.send(order(1, make_trajectory("z")))
        await worker.orders.aclose()
        (reward,) = (await worker.answer()).rewards
        assert reward.kind is RewardFailureKind.TIMED_OUT
        with pytest.raises(StreamEnded):
            await worker.results.receive()
        assert await worker.process.wait() == 0


@pytest.mark.asyncio
async def test_worker_ends_with_its_controller(make_recipe: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    """A broken stream must end the process although a user's coroutine swallows its cancellation."""
    async with worker_process(make_recipe("never_ends_on_z", time_limit_s=30.0, trusted=True)) as worker:
        await worker.orders.send(order(1, make_trajectory("z")))
        await worker.orders.send(order(2, make_trajectory("a")))
        assert (await worker.answer()).order_id == 2
        await worker.results.aclose()
        await worker.orders.send(order(3, make_trajectory("a")))
        async with asyncio.timeout(10):
            assert await worker.process.wait() != 0


@pytest.mark.asyncio
async def test_user_code_that_ends_the_process_breaks_the_stream(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    async with worker_process(make_recipe("ends_process", trusted=True)) as worker:
        await worker.orders.send(order(1, make_trajectory()))
        with pytest.raises(StreamBroken):
            await worker.results.receive()
        assert await worker.process.wait() == 9


@pytest.mark.asyncio
async def test_killed_worker_takes_along_whatever_it_started(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    async with worker_process(make_recipe("fault_late", "fault_forks", time_limit_s=600.0)) as worker:
        await worker.orders.send(order(1, make_trajectory("z"), make_trajectory("a", sample=1)))
        root = psutil.Process(worker.process.pid)
        while len(started := root.children(recursive=True)) < 4:  # the server, two processes, and one that left them
            await asyncio.sleep(0.02)
        worker.process.kill()
        async with asyncio.timeout(10):
            while any(map(lives, started)):
                await asyncio.sleep(0.02)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
