"""The whole loop in one process, of streamrl's kernel alone: what a run consists of, on a page.

    python one_process.py [synchronous | continuous] [DIRECTORY] [simulated | vllm]

Two simulated engines sample random text, so only the second reward, the share of digits, tells completions apart: this
shows the parts, not learning. With `vllm`, one engine samples from the policy, for three steps. `streamrl train
recipe.toml` trains on several, each in a process of its own."""

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
import torch
from msgspec.structs import replace

from streamrl.base.types import Prompt, ScoredTrajectory, TokenArray, token_array
from streamrl.base.waits import Waits
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.memory_stream import memory_stream
from streamrl.contracts import Engine, Evaluations, Journal, Observer, PushReport, RoundPolicy
from streamrl.control.continuous import ContinuousRounds
from streamrl.control.machine import Control
from streamrl.control.round_policy import FixedSize
from streamrl.control.settings import control_settings
from streamrl.control.synchronous import SynchronousRounds
from streamrl.engines.async_llm.engine import VllmEngine
from streamrl.engines.async_llm.options import VllmOptions, environment_without_plugin
from streamrl.engines.file_weights import FileWeights
from streamrl.engines.pool import EnginePool
from streamrl.engines.simulated.engine import SimulatedEngine, SimulationOptions
from streamrl.engines.simulated.text import LengthMixture
from streamrl.learning.options import trainer_options
from streamrl.learning.state.file_publisher import FilePublisher
from streamrl.learning.trainer import TorchTrainer
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.rewards.calls.worker import run_reward_worker
from streamrl.run.checkpoints import CheckpointKeeper
from streamrl.run.controller import Controller, RunRecord
from streamrl.run.plain_push import PlainPush
from streamrl.run.trainer_ranks import TrainerRanks
from streamrl.stages.episodes import Episodes
from streamrl.stages.reward import RewardSettings, RewardStage
from streamrl.stages.training import run_training

HERE = Path(__file__).resolve().parent
STEPS, ENGINES, WINDOW = {"simulated": 30, "vllm": 3}, 2, 64


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

    async def draw(self, count: int) -> list[Prompt]:
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


def simulated_engines() -> list[Engine]:
    """Engines without a model, which hold the weights that are pushed."""
    options = SimulationOptions(vocabulary=16, lengths=LengthMixture(median=8, long_median=16))
    return [SimulatedEngine(options, weights=FileWeights()) for _ in range(ENGINES)]


def vllm_engine(recipe: Recipe, sockets: str) -> VllmEngine:
    """vLLM with the model of ``recipe``, on a GPU where there is one; ``sockets``: a directory with a short path."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return VllmEngine(
        VllmOptions(
            name="engine-0",
            model_path=recipe.model.path,
            device=device,
            dtype="float32" if device == "cpu" else "bfloat16",
            max_model_len=recipe.engines.max_model_len,
            max_num_seqs=WINDOW,
            environment=environment_without_plugin(sockets, device),
        )
    )


async def train(recipe: Recipe, directory: Path, engines: Sequence[Engine]) -> str:
    """Train as ``recipe`` says, with checkpoints and published versions in ``directory``. Returns why the run ended."""
    settings, continuous = control_settings(recipe), recipe.rollout.max_staleness > 0
    policy: RoundPolicy = ContinuousRounds(settings) if continuous else SynchronousRounds(settings)
    control = Control(settings, policy, FixedSize(settings.group_size))
    pool = EnginePool({f"engine-{index}": engine for index, engine in enumerate(engines)})
    tokenizer = SortTokenizer()
    trainer = TorchTrainer(trainer_options(recipe, 0, recipe.run.name, ""), FilePublisher.into(directory))
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
            sync=PlainPush(engines, keep=continuous),
            evaluations=Evaluations(),
            save=CheckpointKeeper(ranks, directory, recipe.checkpoint, held_version=ranks.policy_version).save,
            observers=[StepLines(engines)],
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


def main(rounds: str = "synchronous", directory: str = "run", kind: str = "simulated") -> None:
    recipe = load_recipe(
        HERE / "recipe.toml",
        [
            f"run.steps={STEPS[kind]}",
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
        engines = [vllm_engine(recipe, sockets)] if kind == "vllm" else simulated_engines()
        print(anyio.run(train, recipe, place, engines))


if __name__ == "__main__":
    main(*sys.argv[1:])
