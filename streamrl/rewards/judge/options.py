"""Options of the engine of the run's own judge, computed from the recipe. No torch and no vllm here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from streamrl.base.errors import RecipeError
from streamrl.base.run_process import usable_cores
from streamrl.engines.plain_vllm.options import cpu_environment, shared_environment
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
    """Options of the judge's engine; vLLM's own sockets go into ``socket_directory`` (a short path).

    ``device`` empty: what the installed vLLM can run. Raises ``RecipeError`` when the model's configuration cannot be
    read or the context is longer than the model's."""
    judge = recipe.judge
    on_cpu = (device or installed_device()) == "cpu"
    config = model_config(judge.model, field="judge.model")
    positions = int(config.get("max_position_embeddings") or 0)
    if judge.max_model_len and positions and judge.max_model_len > positions:
        beyond = f"{judge.max_model_len} is more than the model's {positions} positions: lower it"
        raise RecipeError(f"judge.advanced.max_model_len: {beyond}")
    context = judge.max_model_len or min(positions or JUDGE_CONTEXT, JUDGE_CONTEXT)
    dtype = judge.dtype if judge.dtype != "auto" else ("float32" if on_cpu else "bfloat16")
    environment = shared_environment(socket_directory)
    if on_cpu:
        # vLLM's own packed weights, without the plain ones beside them: nothing is pushed to a judge.
        places = openmp_places(core_numbers(judge.cores), judge_threads(recipe.judge, usable_cores()))
        environment |= cpu_environment("stock") | places
    return EngineOptions(
        name=JUDGE,
        model_path=judge.model,
        device="cpu" if on_cpu else "cuda",
        dtype=dtype,
        max_model_len=context,
        max_num_seqs=judge.max_num_seqs,
        cache_blocks=cache_blocks(config, dtype, context, judge.max_num_seqs) if on_cpu else 0,
        block_tokens=CPU_BLOCK_TOKENS if on_cpu else 0,
        gpu_memory_utilization=judge.gpu_memory_utilization,
        workers=1,
        sleeps=not on_cpu and judge.when_idle is YieldKind.SLEEP,
        pushed=False,
        environment=environment,
    )


def judge_problems(recipe: Recipe, *, device: str = "") -> Iterator[str]:
    """Yield why the judge of ``recipe`` could not be started, or would answer nothing; each with its remedy."""
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
