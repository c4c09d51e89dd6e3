"""The whole loop in one process, of streamrl's kernel alone: what a run consists of, on a page.

    python one_process.py [synchronous | continuous] [DIRECTORY]

Two simulated engines sample random text, so only the second reward, the share of digits, tells completions apart: this
shows the parts, not learning. The weights of each step are pushed as in a run. `streamrl train recipe.toml` samples
from the policy, with vLLM and each part in a process of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import tokenizers
from msgspec.structs import replace

from streamrl.base.types import Prompt, ScoredTrajectory, TokenArray, token_array
from streamrl.base.waits import Waits
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.memory_stream import memory_stream
from streamrl.contracts import Engine, Evaluations, Journal, Observer, PushReport, RoundPolicy
from streamrl.control.machine import Control
from streamrl.control.plain_rounds import ContinuousRounds, SynchronousRounds
from streamrl.control.round_policy import FixedSize
from streamrl.control.settings import control_settings
from streamrl.engines.pool import EnginePool
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.simulated.engine import SimulatedEngine, SimulationOptions
from streamrl.engines.simulated.text import LengthMixture
from streamrl.learning.options import trainer_options
from streamrl.learning.trainer import TorchTrainer
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.rewards.calls.worker import run_reward_worker
from streamrl.run.checkpoints import CheckpointKeeper
from streamrl.run.controller import Controller, RunRecord
from streamrl.run.trainer_ranks import TrainerRanks
from streamrl.stages.episodes import Episodes
from streamrl.stages.reward import RewardSettings, RewardStage
from streamrl.stages.training import run_training
from streamrl.weights.publish.torch_tensors import start_publisher
from streamrl.weights.pull.replica import CheckpointReplica
from streamrl.weights.vllm.simulated_engine import SimulatedWeights

HERE = Path(__file__).resolve().parent
STEPS, ENGINES, WINDOW = 30, 2, 64


class SortTokenizer:
    """The tokenizer of the example's model, as a reward worker needs it."""

    def __init__(self) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(HERE / "model" / "tokenizer.json"))
        self.special_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> TokenArray:
        return token_array(self._backend.encode(text).ids)

    def decode(self, token_ids: TokenArray, skip_special: bool = True) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special))


class SortPrompts:
    """The rows of train.jsonl, each once."""

    def __init__(self, tokenizer: SortTokenizer) -> None:
        rows = (json.loads(line) for line in (HERE / "train.jsonl").read_text().splitlines())
        self._rows = (Prompt(f"row-{n}", tokenizer.encode(row["prompt"]), row) for n, row in enumerate(rows))

    async def draw(self, count: int, sets: Sequence[str] = ()) -> list[Prompt]:
        return list(islice(self._rows, count))


class StepLines(Observer):
    """Prints a line a step: what was trained, and the weights that each engine holds afterwards."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._reward = 0.0

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: dict[str, float]) -> None:
        self._reward = sum(trajectory.reward for trajectory in batch) / len(batch)

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        digests = [digest(await engine.checksums()) for engine in self._engines]
        print(json.dumps({"step": push.policy_version, "reward": round(self._reward, 3), "weights": digests}))


def digest(checksums: Mapping[str, str]) -> str:
    """One checksum of those of all tensors."""
    return sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()


def digits(completion: str, **_columns: object) -> float:
    """The share of digits in a completion."""
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)


def simulated_engine(model: Path) -> Engine:
    """Make an engine that samples without a model, and holds the weights that are pushed."""
    options = SimulationOptions(vocabulary=16, lengths=LengthMixture(median=8, long_median=16))
    return SimulatedEngine(options, weights=SimulatedWeights(model, CheckpointReplica()))


async def train(recipe: Recipe, directory: Path, sockets: str) -> str:
    """Train as ``recipe`` says, with checkpoints in ``directory``, and the trainer's socket in ``sockets``, a short
    path. Returns why the run ended."""
    settings, continuous = control_settings(recipe), recipe.rollout.max_staleness > 0
    policy: RoundPolicy = ContinuousRounds(settings) if continuous else SynchronousRounds(settings)
    control = Control(settings, policy, FixedSize(settings.group_size))
    engines = {f"engine-{index}": simulated_engine(Path(recipe.model.path)) for index in range(ENGINES)}
    pool = EnginePool(engines)
    tokenizer = SortTokenizer()
    options = trainer_options(recipe, 0, recipe.run.name, f"ipc://{sockets}/weights")
    trainer = TorchTrainer(options, start_publisher)
    scoring = RewardSettings(functions="sort", per_group=False, timeout_s=30.0, concurrency=64)
    rewards = RewardStage(scoring, [partial(reward_worker, recipe, tokenizer)])
    batches, reports = memory_stream(WINDOW), memory_stream(WINDOW)

    async def serve_rank() -> None:
        async with reports[0]:
            await run_training(trainer, batches[1], reports[0])

    async with anyio.create_task_group() as parts:
        await pool.start()
        parts.start_soon(serve_rank)
        ranks = TrainerRanks([(batches[0], reports[1])])
        await ranks.ready()
        parts.start_soon(ranks.run)
        controller = Controller(
            RunRecord(control, TrajectoryStore(), journal := Journal()),
            prompts=SortPrompts(tokenizer),
            trainer=ranks,
            sync=WeightSync(
                engines,
                ranks.publish_anchor,
                in_flight=recipe.rollout.in_flight,
                timeout_s=recipe.weights.push_timeout_s,
            ),
            evaluations=Evaluations(),
            save=CheckpointKeeper(ranks, directory, recipe.checkpoint, held_version=ranks.policy_version).save,
            observers=[StepLines(list(engines.values()))],
            waits=Waits(),
        )
        async with rewards.running():
            reason = await controller.run(
                Episodes(pool, recipe.sampling, rewards, journal, on_end=pool.forget_trajectory)
            )
        await pool.aclose()
    return reason


@asynccontextmanager
async def reward_worker(recipe: Recipe, tokenizer: SortTokenizer) -> AsyncIterator[Any]:
    """Open the streams of a reward worker in this process; user functions still run in processes of their own."""
    orders, results = memory_stream(WINDOW), memory_stream(WINDOW)

    async def serve() -> None:
        async with results[0]:
            await run_reward_worker(recipe, tokenizer, 0, orders[1], results[0], owns_process=False)

    async with anyio.create_task_group() as worker:
        worker.start_soon(serve)
        yield orders[0], results[1]
        await orders[0].aclose()


def main(rounds: str = "synchronous", directory: str = "run") -> None:
    recipe = load_recipe(
        HERE / "recipe.toml",
        [
            f"run.steps={STEPS}",
            "rollout.prompts_per_batch=4",
            "rollout.group_size=4",
            f'rollout.rounds="{rounds}"',
            f"rollout.max_staleness={1 if rounds == 'continuous' else 0}",
            'evaluation.prompts=""',
            "sampling.max_tokens=24",
        ],
    )
    recipe = replace(recipe, rewards=(*recipe.rewards, Reward(function=f"{HERE / 'one_process.py'}:digits")))
    place = Path(directory).absolute()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="srl") as sockets:
        print(anyio.run(train, recipe, place, sockets))


if __name__ == "__main__":
    main(*sys.argv[1:])
