"""The reward worker: over memory streams here, and as a real process over ZeroMQ where it may have to end itself."""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from builders.files import EXAMPLES

from streamrl.base.errors import RecipeError, StreamBroken, StreamEnded
from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE
from streamrl.base.types import FinishReason, RewardFailureKind, Segment, Trajectory, token_array
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.comm.wire import WireCodec
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rewards import Reward
from streamrl.recipe.sections import Recipe
from streamrl.rewards.calls.worker import run_reward_worker
from streamrl.rewards.reward_exchange import OrderMessage, score_message
from streamrl.rewards.reward_messages import (
    CloseRewardSet,
    GroupScored,
    GroupsScored,
    LoadRewardSet,
    RewardOrder,
    RewardResult,
    RewardSetLoaded,
    RewardWorkerReady,
    ScoreGroups,
)
from tests.rewards.conftest import KILLERS

MakeTrajectory = Callable[..., Trajectory]
MakeRecipe = Callable[..., Recipe]
WORKER = Path(__file__).parent / "worker_process.py"
EXAMPLE = EXAMPLES / "custom_reward.py"


async def answers_of(recipe: Recipe, *groups: tuple[Trajectory, ...]) -> dict[int, GroupScored]:
    send_order, orders = memory_stream(64)
    results, receive_result = memory_stream(64)
    answers: dict[int, GroupScored] = {}
    async with asyncio.TaskGroup() as tasks:
        tokenizer = load_tokenizer(recipe.model.path)
        tasks.create_task(run_reward_worker(recipe, tokenizer, 0, orders, results, owns_process=False))
        assert await receive_result.receive() == RewardWorkerReady(worker=0)
        for number, group in enumerate(groups):
            await send_order.send(order(number, *group))
        await send_order.aclose()
        while len(answers) < len(groups):
            answer = await receive_result.receive()
            assert isinstance(answer, GroupsScored)
            answers |= {scored.order_id: scored for scored in answer.groups}
    return answers


async def message_answers(recipe: Recipe, orders: ScoreGroups) -> list[list[GroupScored]]:
    """What a worker sends for one message with many orders, message by message."""
    send_order, taken = memory_stream(1)
    results, receive_result = memory_stream(64)
    async with asyncio.TaskGroup() as tasks:
        tokenizer = load_tokenizer(recipe.model.path)
        tasks.create_task(run_reward_worker(recipe, tokenizer, 0, taken, results, owns_process=False))
        assert await receive_result.receive() == RewardWorkerReady(worker=0)
        await send_order.send(orders)
        await send_order.aclose()
        messages: list[list[GroupScored]] = []
        while sum(map(len, messages)) < len(orders.groups):
            answer = await receive_result.receive()
            assert isinstance(answer, GroupsScored)
            messages.append(list(answer.groups))
    await results.aclose()
    with pytest.raises(StreamEnded):  # nothing was answered twice
        await receive_result.receive()
    return messages


def one_message(*trajectories: Trajectory) -> ScoreGroups:
    message = OrderMessage()
    for number, trajectory in enumerate(trajectories):
        message.add(number, [trajectory], reward_version=0, rank=number)
    return message.message()


async def test_batches_are_answered_together_without_slow_calls(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    """Samples that are scored together are answered together, and wait for no slow call."""
    orders = one_message(*[make_trajectory("z" if i == 3 else "a" * (i + 1), group=i) for i in range(30)])
    *batches, slow = await message_answers(make_recipe("slow_on_z", trusted=True), orders)
    together = [group for batch in batches for group in batch]
    assert len(batches) < 10, "a message each"
    assert [(g.order_id, g.rewards[0].reward) for g in together] == [(i, i + 1.0) for i in range(30) if i != 3]
    assert [(g.order_id, g.rewards[0].reward) for g in slow] == [(3, 1.0)]


async def test_long_plain_functions_let_the_loop_run(make_recipe: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    """Plain functions that take long let the loop run between them."""
    orders = one_message(*[make_trajectory("a", group=i) for i in range(12)])
    messages = await message_answers(make_recipe("burns", trusted=True), orders)
    assert [g.order_id for groups in messages for g in groups] == list(range(12))
    assert len(messages) >= 3, "answers, heartbeat and everything else waited for all of them"


def test_a_message_has_each_prompt_once(make_trajectory: MakeTrajectory) -> None:
    """A message has each prompt once, and the sampled tokens only."""
    first = make_trajectory("ab", answer="x")
    sibling = msgspec.structs.replace(first, id=msgspec.structs.replace(first.id, sample=1, attempt=2))
    turns = (*first.segments, Segment(token_ids=token_array([7, 7]), trained=False), *first.segments)
    message = one_message(first, make_trajectory("c", group=1), msgspec.structs.replace(sibling, segments=turns), first)
    assert [prompt.prompt_id for prompt in message.prompts] == ["p0", "p1"]
    completions = [c for group in message.groups for c in group.completions]
    assert [(c.prompt, c.group_id, c.sample, c.attempt) for c in completions] == [
        (0, 0, 0, 0),
        (1, 1, 0, 0),
        (0, 0, 1, 2),
        (0, 0, 0, 0),
    ]
    sampled = first.segments[0].token_ids
    assert completions[2].token_ids == (sampled + sampled).tobytes()
    codec: WireCodec[RewardOrder] = WireCodec(RewardOrder)
    assert codec.decode(codec.encode(message)) == message


async def test_reward_that_does_not_load_raises(make_recipe: MakeRecipe) -> None:
    _, orders = memory_stream(1)
    results, _ = memory_stream(1)
    recipe = make_recipe("no_such_function")
    tokenizer = load_tokenizer(recipe.model.path)
    with pytest.raises(RecipeError, match="no_such_function"):
        await run_reward_worker(recipe, tokenizer, 0, orders, results, owns_process=False)


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
        self, process: asyncio.subprocess.Process, orders: SendStream[RewardOrder], results: ReceiveStream[RewardResult]
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
async def worker_process(recipe: Recipe, *, limit: Callable[[], None] | None = None) -> AsyncIterator[WorkerProcess]:
    """``limit``: what the process does to itself before it begins."""
    with tempfile.TemporaryDirectory(prefix="srl", dir="/tmp") as directory:
        recipe_path = write_recipe(directory, recipe)
        endpoints = [f"ipc://{directory}/orders", f"ipc://{directory}/results"]
        async with (
            zmq_sender(RewardOrder, endpoints[0], bind=True, name="orders") as orders,
            zmq_receiver(RewardResult, endpoints[1], bind=True, name="results") as results,
        ):
            command = [sys.executable, str(WORKER), str(recipe_path), *endpoints]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stderr=pipe, preexec_fn=limit)
            try:
                assert await results.receive() == RewardWorkerReady(worker=3)
                yield WorkerProcess(process, orders, results)
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()


def order(number: int, *trajectories: Trajectory) -> ScoreGroups:
    return score_message(trajectories, order_id=number)


@pytest.mark.long
async def test_a_trusted_function_that_blocks_ends_with_75(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    """A trusted function that holds the interpreter ends the process with exit code 75."""
    async with worker_process(make_recipe("holds_interpreter", timeout_s=0.3, trusted=True)) as worker:
        await worker.orders.send(order(1, make_trajectory()))
        with pytest.raises(StreamBroken):
            await worker.results.receive()
        assert await worker.process.wait() == REWARD_RESTART_EXIT_CODE == 75
        assert worker.process.stderr is not None
        assert "holds_interpreter" in (await worker.process.stderr.read()).decode()  # the log names what hung


@pytest.mark.seconds(30)
async def test_a_worker_without_an_exit_timer_says_so_and_scores(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    """A worker whose system has no timer left scores without one, and its log says what is not guarded."""

    def leave_no_timers() -> None:
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))  # each timer takes a queued signal

    async with worker_process(make_recipe("length", trusted=True), limit=leave_no_timers) as worker:
        await worker.orders.send(order(1, make_trajectory("abc")))
        assert (await worker.answer()).rewards[0].reward == 3.0
        await worker.orders.aclose()
        assert worker.process.stderr is not None
        said = (await worker.process.stderr.read()).decode()
        assert await worker.process.wait() == 0
    assert "no exit timer ([Errno 11] timer_create failed): user code that blocks the loop cannot be stopped" in said


@pytest.mark.long
async def test_the_loop_limit_follows_the_attached_rewards(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    """The time for which user code may hold the loop follows the rewards that are attached. Importing may take long, as
    it may at first; so may a function that was attached with a long limit; and what is attached with a short one is
    guarded by that."""
    module = tmp_path / "slow_import.py"
    module.write_text("import time\ntime.sleep(3.5)\ndef reward(completion):\n    time.sleep(3.5)\n    return 1.0\n")
    slow = Reward(function=f"{module}:reward", timeout_s=300.0, trusted=True)
    short = Reward(function=f"{KILLERS}:holds_interpreter", timeout_s=0.3, trusted=True)
    async with worker_process(make_recipe("length", timeout_s=0.3, trusted=True)) as worker:
        for version, reward in enumerate((slow, short), start=1):
            await worker.orders.send(LoadRewardSet(reward_version=version, rewards=(reward,)))
            assert await worker.results.receive() == RewardSetLoaded(reward_version=version)
            await worker.orders.send(CloseRewardSet(reward_version=version - 1))
            message = OrderMessage()
            message.add(version, [make_trajectory()], reward_version=version, rank=0)
            await worker.orders.send(message.message())
            if reward is slow:
                assert (await worker.answer()).rewards[0].reward == 1.0
        assert await worker.process.wait() == REWARD_RESTART_EXIT_CODE


async def test_answers_before_the_end_are_not_lost(make_recipe: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    async with worker_process(make_recipe("blocks_on_z", timeout_s=1.0, trusted=True)) as worker:
        for number in range(20):
            await worker.orders.send(order(number, make_trajectory("a")))
        answers = [await worker.answer() for _ in range(20)]
        await worker.orders.send(order(20, make_trajectory("z")))
        assert sorted(answer.order_id for answer in answers) == list(range(20))
        assert all(answer.rewards[0].kind is None for answer in answers)
        with pytest.raises(StreamBroken):
            await worker.results.receive()
        assert await worker.process.wait() == 75


async def test_too_many_abandoned_coroutines_end_an_idle_process(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    """Too many abandoned coroutines end the process once it is idle."""
    async with worker_process(make_recipe("never_ends_on_z", timeout_s=1.0, trusted=True)) as worker:
        group = [make_trajectory("z", sample=i) for i in range(9)] + [make_trajectory("a", sample=9)]
        await worker.orders.send(order(1, *group))
        *hung, fine = (await worker.answer()).rewards
        assert [reward.kind for reward in hung] == [RewardFailureKind.TIMED_OUT] * 9
        assert fine.kind is None
        assert await worker.process.wait() == 75
        with pytest.raises(StreamBroken):  # not StreamEnded: orders may have been on their way
            await worker.results.receive()


async def test_stuck_call_does_not_keep_the_worker_when_orders_end(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    async with worker_process(
        make_recipe("never_ends_on_z", "swallows_cancellation", timeout_s=0.3, trusted=True)
    ) as worker:
        await worker.orders.send(order(1, make_trajectory("z")))
        await worker.orders.aclose()
        (reward,) = (await worker.answer()).rewards
        assert reward.kind is RewardFailureKind.TIMED_OUT
        with pytest.raises(StreamEnded):
            await worker.results.receive()
        assert await worker.process.wait() == 0


async def test_worker_ends_with_its_controller(make_recipe: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    """A broken stream must end the process although a user's coroutine swallows its cancellation, and although nothing
    is left to be answered: one of two streams that breaks alone would be waited for on the other side."""
    async with worker_process(make_recipe("never_ends_on_z", timeout_s=300.0, trusted=True)) as worker:
        await worker.orders.send(order(1, make_trajectory("z")))
        await worker.orders.send(order(2, make_trajectory("a")))
        assert (await worker.answer()).order_id == 2
        await worker.results.aclose()
        assert await worker.process.wait() != 0


async def test_user_code_that_ends_the_process_breaks_the_stream(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    async with worker_process(make_recipe("ends_process", trusted=True)) as worker:
        await worker.orders.send(order(1, make_trajectory()))
        with pytest.raises(StreamBroken):
            await worker.results.receive()
        assert await worker.process.wait() == 9


async def test_killed_worker_takes_along_whatever_it_started(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    async with worker_process(make_recipe("fault_late", "fault_forks", timeout_s=600.0)) as worker:
        await worker.orders.send(order(1, make_trajectory("z"), make_trajectory("a", sample=1)))
        root = psutil.Process(worker.process.pid)
        while len(started := root.children(recursive=True)) < 4:  # the server, two processes, and one that left them
            await asyncio.sleep(0.02)
        worker.process.kill()
        while any(map(lives, started)):
            await asyncio.sleep(0.02)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
