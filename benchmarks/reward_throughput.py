"""How many completions a second go through rewards, end to end: the reward stage, ZeroMQ, a worker process, a trivial
function (trusted in the worker's loop; untrusted in one process of its own), and back.

    python benchmarks/reward_throughput.py [--completions 20000] [--rounds 3] [--looks 500] [--programs 400]

``pool``: what a reward worker alone does with its orders (token ids are decoded, arguments chosen, the function called,
the value combined), without streams. ``alone``: one completion at a time, from when it reaches the stage to when its
reward leaves it. ``programs``: programs a second in the sandbox of the code reward, one test case each."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import tokenizers
from cpu_time import CpuTree

from streamrl.base.types import (
    FinishReason,
    Prompt,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
    float_array,
    token_array,
)
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.sections import Model, Prompts, Recipe
from streamrl.rewards.calls.reward_set import RewardSet
from streamrl.rewards.calls.worker import run_reward_worker
from streamrl.rewards.reward_exchange import score_message
from streamrl.rewards.reward_messages import RewardOrder, RewardResult, ScoreGroups
from streamrl.rewards.sandbox.reward import CODE
from streamrl.stages.reward import ORDERS_WINDOW, RewardSettings, RewardStage, wait_ready

ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789"
TOKENS = 64
GROUP = 8
AT_ONCE = 256
WINDOW = 1024  # completions that wait before the stage, as the slots of a run would let them
WANTED = {"trusted": 10_000, "untrusted": 2_000}
FUNCTIONS = """
async def trusted(completion, *, answer):
    return 1.0 if completion == answer else 0.0


def untrusted(completion, *, answer):
    return 1.0 if completion == answer else 0.0
"""


_lines = itertools.count()


def write_model(directory: Path) -> None:
    """A model directory with nothing but a tokenizer of characters."""
    vocabulary = {text: index for index, text in enumerate(["<unk>", "<eos>", *ALPHABET])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 1}))


def make_trajectories(count: int) -> list[Trajectory]:
    """Completions of 64 tokens, 8 to a prompt."""
    ids = token_array(2 + (i * 7) % len(ALPHABET) for i in range(TOKENS))
    prompt = [
        Prompt(prompt_id=f"p{i}", token_ids=token_array(range(2, 34)), columns={"answer": "abc", "level": 3})
        for i in range(count // GROUP + 1)
    ]
    segment = Segment(token_ids=ids, trained=True, behavior_logprobs=float_array([-0.5] * TOKENS))
    return [
        Trajectory(
            id=TrajectoryId(prompt_id=f"p{i // GROUP}", group_id=i // GROUP, sample=i % GROUP),
            prompt=prompt[i // GROUP],
            segments=(segment,),
            finish_reason=FinishReason.STOP,
        )
        for i in range(count)
    ]


async def through_pool(directory: Path, reward: Reward, trajectories: list[Trajectory], rounds: int) -> list[float]:
    """Completions a second of a worker's functions alone, an order each, at most ``AT_ONCE`` at a time."""
    rates = []
    async with asyncio.TaskGroup() as tasks:
        limits = RewardLimits(processes=1, concurrency=AT_ONCE)
        rewards = RewardSet([reward], limits, load_tokenizer(directory), tasks)
        await rewards.open()
        await rewards.score(trajectories[:64])
        messages = [score_message([trajectory]) for trajectory in trajectories]
        for _ in range(rounds):
            started = time.perf_counter()
            places = asyncio.Semaphore(AT_ONCE)

            async def score(message: ScoreGroups, places: asyncio.Semaphore = places) -> None:
                (given,) = await rewards.begin(message.groups[0], message.prompts).finish()
                assert given.kind is None, given
                places.release()

            async with asyncio.TaskGroup() as scoring:
                for message in messages:
                    await places.acquire()
                    scoring.create_task(score(message))
            rates.append(len(trajectories) / (time.perf_counter() - started))
        await rewards.aclose()
    return rates


class Line:
    """The stage with one worker process, ready to score."""

    def __init__(self) -> None:
        self.stage: RewardStage
        self.worker = CpuTree(os.getpid())

    async def rate(self, trajectories: list[Trajectory]) -> tuple[float, float, float]:
        """Completions a second; microseconds of CPU for each in this process, and in the worker's processes."""
        started, here, there = time.perf_counter(), time.process_time(), self._worker_s()
        async with anyio.create_task_group() as scoring:
            for trajectory in trajectories:
                scoring.start_soon(self._score, trajectory)
        seconds = time.perf_counter() - started
        each = 1e6 / len(trajectories)
        return (len(trajectories) / seconds, (time.process_time() - here) * each, (self._worker_s() - there) * each)

    def _worker_s(self) -> float:
        return sum(self.worker.read().values())

    async def _score(self, trajectory: Trajectory) -> None:
        scored = await self.stage.score(trajectory, GROUP)
        assert isinstance(scored.outcome, ScoredTrajectory), scored

    async def alone(self, trajectories: list[Trajectory]) -> tuple[float, float]:
        """Milliseconds that a completion waits for its reward when nothing else does: median and 95th percentile."""
        waited = []
        for trajectory in trajectories:
            await anyio.sleep(0.002)  # so that every process has gone to sleep
            started = time.perf_counter()
            await self._score(trajectory)
            waited.append(1e3 * (time.perf_counter() - started))
        return statistics.median(waited), statistics.quantiles(waited, n=20)[-1]


@asynccontextmanager
async def open_line(directory: Path, reward: Reward) -> AsyncIterator[Line]:
    """Start a worker process for ``reward`` and the stage before it."""
    recipe = Recipe(
        model=Model(path=str(directory)),
        prompts=Prompts(train="none.jsonl"),
        rewards=(reward,),
        reward_limits=RewardLimits(processes=1, concurrency=AT_ONCE),
    )
    recipe_file = directory / "recipe.json"
    recipe_file.write_bytes(msgspec.json.encode(recipe))
    number = next(_lines)
    at = [f"ipc://{directory}/orders{number}", f"ipc://{directory}/results{number}"]
    line = Line()

    @asynccontextmanager
    async def open_worker() -> AsyncIterator[tuple[object, object]]:
        async with (
            zmq_sender(RewardOrder, at[0], bind=True, window=ORDERS_WINDOW, name="orders") as orders,
            zmq_receiver(RewardResult, at[1], bind=True, name="results") as results,
        ):
            process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--worker", str(recipe_file), *at)
            line.worker = CpuTree(process.pid)
            await wait_ready(orders, results)
            yield orders, results
            await process.wait()

    settings = RewardSettings(functions=reward.label, per_group=False, timeout_s=30.0, concurrency=AT_ONCE)
    line.stage = RewardStage(settings, [open_worker])  # type: ignore[list-item]
    async with line.stage.running():
        await line.rate(make_trajectories(512))
        yield line


async def programs_a_second(count: int) -> float:
    """Programs through the sandbox of the code reward, as many at once as there are CPUs."""
    reward = CODE()
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    tests = [{"input": "3 4", "output": "7"}]
    left: Iterator[int] = iter(range(count))

    async def judge_some() -> None:
        for _ in left:
            value = await reward(program, tests=tests)
            assert value == 1.0, value

    assert await reward(program, tests=tests) == 1.0
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2 * len(os.sched_getaffinity(0))):
            tasks.create_task(judge_some())
    seconds = time.perf_counter() - started
    await reward.aclose()  # type: ignore[attr-defined]
    return count / seconds


async def serve(recipe: Recipe, *endpoints: str) -> None:
    """The worker process of ``through_stage``. ``endpoints``: of orders and results."""
    orders_at, results_at = endpoints
    async with (
        zmq_sender(RewardResult, results_at, bind=False, name="results") as results,
        zmq_receiver(RewardOrder, orders_at, bind=False, name="orders") as orders,
    ):
        await run_reward_worker(recipe, load_tokenizer(recipe.model.path), 0, orders, results)


async def measure(given: argparse.Namespace) -> None:
    """Prints what was measured, a line for each kind and each way."""
    with tempfile.TemporaryDirectory(prefix="srl", dir="/tmp") as name:
        directory = Path(name)
        write_model(directory)
        (directory / "trivial.py").write_text(FUNCTIONS)
        trajectories = make_trajectories(given.completions)
        for kind, wanted in WANTED.items():
            reward = Reward(function=f"{directory}/trivial.py:{kind}", trusted=kind == "trusted")
            print(f"{kind} (wanted: {wanted:,} completions a second)")
            async with open_line(directory, reward) as line:
                for _ in range(given.rounds):
                    rate, here, there = await line.rate(trajectories)
                    print(f"  end to end {rate:>9,.0f}/s   CPU us each: {here:.0f} controller, {there:.0f} worker")
                if given.looks:
                    median, p95 = await line.alone(trajectories[: given.looks])
                    print(f"  alone      {median:>9.2f} ms median, {p95:.2f} ms P95, of {given.looks}")
            if not given.no_pool:
                rates = await through_pool(directory, reward, trajectories, given.rounds)
                print(f"  pool       {', '.join(f'{rate:,.0f}' for rate in rates):>9}/s")
    if given.programs:
        print(f"programs     {await programs_a_second(given.programs):>9,.0f}/s in the sandbox of the code reward")


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["--worker"]:
        recipe = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Recipe)
        anyio.run(serve, recipe, *sys.argv[3:5], backend_options={"use_uvloop": True})
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--completions", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--looks", type=int, default=500, help="completions that go alone; 0: none")
    parser.add_argument("--programs", type=int, default=400, help="in the sandbox; 0: none")
    parser.add_argument("--no-pool", action="store_true")
    anyio.run(measure, parser.parse_args(), backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
