"""How many completions a second go through the reward runtime: a trivial trusted reward, and a trivial untrusted one
through a single worker process.

    python benchmarks/reward_throughput.py [--completions 20000] [--rounds 3]

What is measured is what a reward worker does with its orders: token ids are decoded to text, arguments are chosen,
the function is called (in the worker's loop, or in a process of its own), and the value becomes a scored trajectory.
``stage``: the same with the reward stage before it and a real worker process behind ZeroMQ, one order a completion.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import tokenizers

from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.config.recipe import Model, Prompts, Recipe
from streamrl.config.rewards import Reward, RewardLimits
from streamrl.rewards.reward_set import RewardSet, RewardsOf
from streamrl.rewards.worker import run_reward_worker
from streamrl.stage_messages import FinishedTrajectory, RewardOrder, RewardResult
from streamrl.stages.reward import RewardSettings, RewardStage, next_ready
from streamrl.tokenizer import load_tokenizer
from streamrl.types import (
    FinishReason,
    Prompt,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
    float_array,
    token_array,
)

ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789"
TOKENS = 64
GROUP = 8
FUNCTIONS = """
async def trusted(completion, *, answer):
    return 1.0 if completion == answer else 0.0


def untrusted(completion, *, answer):
    return 1.0 if completion == answer else 0.0
"""


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


async def through_set(
    directory: Path, reward: Reward, trajectories: list[Trajectory], rounds: int
) -> tuple[list[float], list[float]]:
    """Completions a second, and a CPU second of the worker, each round; an order a completion, 256 orders at once."""
    rates, cpu_rates = [], []
    async with asyncio.TaskGroup() as tasks:
        limits = RewardLimits(processes=1, concurrency=256)
        rewards = RewardSet(RewardsOf(version=0, rewards=(reward,), limits=limits), load_tokenizer(directory), tasks)
        await rewards.open()
        await rewards.score(trajectories[:64])
        for _ in range(rounds):
            left = iter(trajectories)

            async def score_some(left: object = left) -> None:
                for trajectory in left:  # type: ignore[attr-defined]
                    (outcome,) = await rewards.score([trajectory])
                    assert isinstance(outcome, ScoredTrajectory), outcome

            started, cpu_started = time.perf_counter(), time.process_time()
            async with asyncio.TaskGroup() as orders:
                for _ in range(256):
                    orders.create_task(score_some())
            rates.append(len(trajectories) / (time.perf_counter() - started))
            cpu_rates.append(len(trajectories) / (time.process_time() - cpu_started))
        await rewards.aclose()
    return rates, cpu_rates


async def through_stage(directory: Path, reward: Reward, trajectories: list[Trajectory]) -> tuple[float, float]:
    """Completions a second, and a CPU second of the controller, from the reward stage through ZeroMQ to a worker
    process and back."""
    recipe = Recipe(
        model=Model(path=str(directory)),
        prompts=Prompts(train="none.jsonl"),
        rewards=(reward,),
        reward_limits=RewardLimits(processes=1, concurrency=256),
    )
    recipe_file = directory / "recipe.json"
    recipe_file.write_bytes(msgspec.json.encode(recipe))
    at = [f"ipc://{directory}/orders", f"ipc://{directory}/results"]

    @asynccontextmanager
    async def open_worker() -> AsyncIterator[tuple[object, object]]:
        async with (
            zmq_sender(RewardOrder, at[0], bind=True, name="orders") as orders,
            zmq_receiver(RewardResult, at[1], bind=True, name="results") as results,
        ):
            process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--worker", str(recipe_file), *at)
            await next_ready(results)
            yield orders, results
            await process.wait()

    settings = RewardSettings(functions=reward.label, per_group=False, time_limit_s=30.0, concurrency=256)
    give, incoming = memory_stream(len(trajectories) + 1)
    scored, take = memory_stream(len(trajectories) + 1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(RewardStage(settings, [open_worker]).run, incoming, scored)  # type: ignore[list-item]
        for trajectory in trajectories[:64]:
            await give.send(FinishedTrajectory(trajectory=trajectory, group_size=GROUP))
        for _ in range(64):
            await take.receive()
        started, controller_s = time.perf_counter(), time.process_time()
        for trajectory in trajectories:
            await give.send(FinishedTrajectory(trajectory=trajectory, group_size=GROUP))
        for _ in trajectories:
            await take.receive()
        seconds = time.perf_counter() - started
        controller_s = time.process_time() - controller_s
        await give.aclose()
    return len(trajectories) / seconds, len(trajectories) / controller_s


async def serve(recipe: Recipe, *endpoints: str) -> None:
    """The worker process of ``through_stage``. ``endpoints``: of orders and results."""
    orders_at, results_at = endpoints
    async with (
        zmq_sender(RewardResult, results_at, bind=False, name="results") as results,
        zmq_receiver(RewardOrder, orders_at, bind=False, name="orders") as orders,
    ):
        await run_reward_worker(recipe, 0, orders, results)


async def measure(completions: int, rounds: int, stage: bool) -> None:
    """Prints a line for each kind."""
    with tempfile.TemporaryDirectory(prefix="srl", dir="/tmp") as name:
        directory = Path(name)
        write_model(directory)
        (directory / "trivial.py").write_text(FUNCTIONS)
        trajectories = make_trajectories(completions)
        for kind, wanted in (("trusted", 10_000), ("untrusted", 2_000)):
            reward = Reward(function=f"{directory}/trivial.py:{kind}", trusted=kind == "trusted")
            rates, per_cpu_s = await through_set(directory, reward, trajectories, rounds)
            shown, per_cpu_shown = (", ".join(f"{rate:,.0f}" for rate in r) for r in (rates, per_cpu_s))
            print(f"{kind:>9}: {shown} completions a second (wanted: {wanted:,})")
            print(f"{'':>11}({per_cpu_shown} a CPU second of the worker)")
            if stage:
                rate, per_cpu = await through_stage(directory, reward, trajectories)
                print(f"{'':>9}  {rate:,.0f} through stage, ZeroMQ and a worker process")
                print(f"{'':>11}({per_cpu:,.0f} a CPU second of the controller)")


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["--worker"]:
        recipe = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Recipe)
        anyio.run(serve, recipe, *sys.argv[3:5], backend_options={"use_uvloop": True})
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--completions", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-stage", action="store_true")
    given = parser.parse_args()
    anyio.run(measure, given.completions, given.rounds, not given.no_stage, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
