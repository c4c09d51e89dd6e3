"""Options of the engine of the run's own judge, computed from the recipe.

``launch.roles`` computes them in the judge's process, ``prepare.preflight`` in the process of the command, as a check.
This file imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from streamrl.base.errors import RecipeError
from streamrl.base.run_process import usable_cores
from streamrl.engines.async_llm.options import cpu_variables, shared_variables
from streamrl.engines.vllm.options import (
    CPU_BLOCK_TOKENS,
    EngineOptions,
    cache_blocks,
    core_numbers,
    installed_device,
    model_config,
    openmp_places,
)
from streamrl.learning.threads import judge_threads
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.pretrained.tokenizer import chat_format
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.judge import JUDGE_CONTEXT, YieldKind, asks_own_judge
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import JUDGE


def judge_options(recipe: Recipe, socket_directory: str | Path, *, device: str = "") -> EngineOptions:
    """Options of the judge's engine. ``socket_directory``: directory of vLLM's own sockets (a short path); ``device``:
    ``cpu`` or ``cuda``; empty: the device of the installed vLLM. Raises ``RecipeError`` when the model's configuration
    cannot be read or ``max_model_len`` is more than the model's positions."""
    judge = recipe.judge
    on_cpu = (device or installed_device()) == "cpu"
    config = model_config(judge.model, field="judge.model")
    positions = int(config.get("max_position_embeddings") or 0)
    if judge.max_model_len and positions and judge.max_model_len > positions:
        problem = f"{judge.max_model_len} is more than the model's {positions} positions: lower it"
        raise RecipeError(f"judge.advanced.max_model_len: {problem}")
    max_model_len = judge.max_model_len or min(positions or JUDGE_CONTEXT, JUDGE_CONTEXT)
    dtype = judge.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    variables = shared_variables(socket_directory)
    if on_cpu:
        # "stock": vLLM packs the weights and keeps no plain copy, since nothing is pushed to a judge.
        places = openmp_places(core_numbers(judge.cores), judge_threads(recipe.judge, usable_cores()))
        variables |= cpu_variables("stock") | places
    return EngineOptions(
        name=JUDGE,
        model_path=judge.model,
        device="cpu" if on_cpu else "cuda",
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=judge.max_num_seqs,
        cache_blocks=cache_blocks(config, dtype, max_model_len, judge.max_num_seqs) if on_cpu else 0,
        block_tokens=CPU_BLOCK_TOKENS if on_cpu else 0,
        gpu_memory_utilization=judge.gpu_memory_utilization,
        workers=1,
        sleeps=not on_cpu and judge.when_idle is YieldKind.SLEEP,
        pushed=False,
        variables=variables,
    )


def judge_problems(recipe: Recipe, *, device: str = "") -> Iterator[str]:
    """Yield the problems for which the judge of ``recipe`` could not start, or not answer, each with its remedy."""
    directory = Path(recipe.judge.model)
    if not recipe.judge.model:
        return
    try:
        read_model_facts(directory)
        judge_options(recipe, "", device=device)
        templates = chat_format(directory).templates
    except ModelDirectoryError as error:
        yield f"judge.model: {directory} {error}"
        return
    except RecipeError as error:
        yield from error.problems
        return
    if "default" not in templates:
        for index, reward in enumerate(recipe.rewards):
            if asks_own_judge(reward) and reward.options.get("chat", True):
                yield (
                    f"rewards.{index}.options: {directory} has no chat template, so it takes no chats: set chat = "
                    "false in [rewards.options], or name a model that was tuned for chats in [judge]"
                )
