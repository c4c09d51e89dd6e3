"""Options of the engine of a judge or teacher that the run serves, computed from the recipe.

``launch.roles`` computes them in the process of the model, ``prepare.preflight`` in that of the command, as a check.
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
    max_model_len,
    model_config,
    openmp_places,
)
from streamrl.engines.vllm.visible_gpus import engine_dtype, installed_device
from streamrl.learning.threads import served_threads
from streamrl.pretrained.composites import towers
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.pretrained.tokenizer import chat_format
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.sections import Recipe
from streamrl.recipe.served_models import JUDGE_CONTEXT, YieldKind, asks_own_judge
from streamrl.recipe.topology import Role, served_models, served_name


def served_options(recipe: Recipe, role: Role, socket_directory: str | Path, *, device: str = "") -> EngineOptions:
    """Options of the engine of the judge or teacher of ``recipe``.

    ``socket_directory``: directory of vLLM's own sockets (a short path)
    ``device``: ``cpu`` or ``cuda`` (empty: the device of the installed vLLM)

    Raises ``RecipeError`` when the model's configuration cannot be read, or the model has too few positions."""
    settings = served_models(recipe)[role]
    device = device or installed_device()
    on_cpu = device == "cpu"
    config = model_config(settings.model, field=f"{role}.model")
    dtype = engine_dtype(settings.dtype, device, config)
    length = longest_question(recipe, role)
    variables = shared_variables(socket_directory)
    if role is Role.TEACHER:
        # The token that an answer has beyond the scored sequence is never computed with, so it needs no position.
        variables |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    if on_cpu:
        # "stock": vLLM packs the weights and keeps no plain copy, since nothing is pushed to the model.
        places = openmp_places(core_numbers(settings.cores), served_threads(settings, usable_cores()))
        variables |= cpu_variables("stock") | places
    return EngineOptions(
        name=served_name(role),
        model_path=settings.model,
        device=device,
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=settings.max_num_seqs,
        cache_blocks=cache_blocks(config, dtype, length, settings.max_num_seqs) if on_cpu else 0,
        block_tokens=CPU_BLOCK_TOKENS if on_cpu else 0,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        workers=1,
        sleeps=not on_cpu and settings.when_idle is YieldKind.SLEEP,
        pushed=False,
        text_only=bool(towers(config)),
        variables=variables,
    )


def longest_question(recipe: Recipe, role: Role) -> int:
    """Return the tokens of the longest question to the judge or teacher, with its answer. Raises as
    ``served_options``."""
    length = served_models(recipe)[role].max_model_len
    config = model_config(served_models(recipe)[role].model, field=f"{role}.model")
    positions = int(config.get("max_position_embeddings") or 0)
    if length and 0 < positions < length:
        raise RecipeError(
            f"{role}.advanced.max_model_len: {length} is more than the model's {positions} positions: lower it"
        )
    if role is Role.JUDGE:
        return length or min(positions or JUDGE_CONTEXT, JUDGE_CONTEXT)
    longest = max_model_len(recipe, model_config(recipe.model.path))
    if length and length <= longest:
        raise RecipeError(
            f"teacher.advanced.max_model_len: {length} has no room for sequences of {longest} tokens and one more: "
            f"raise it to {longest + 1}, set it to 0, or lower engines.max_model_len"
        )
    if 0 < positions < longest:
        raise RecipeError(
            f"teacher.model: it has {positions} positions, and the policy samples sequences of {longest} tokens: lower "
            "engines.max_model_len, or name another model"
        )
    return length or longest + 1


def served_model_problems(recipe: Recipe, *, device: str = "") -> Iterator[str]:
    """Yield the problems for which the judge or teacher of ``recipe`` could not start, or not answer, each with its
    remedy."""
    for role, settings in served_models(recipe).items():
        directory = Path(settings.model)
        try:
            read_model_facts(directory)
            served_options(recipe, role, "", device=device)
            if role is Role.JUDGE:
                yield from _chat_problems(recipe, directory)
        except ModelDirectoryError as error:
            yield f"{role}.model: {directory} {error}"
        except RecipeError as error:
            yield from error.problems


def _chat_problems(recipe: Recipe, directory: Path) -> Iterator[str]:
    """Problems of judge rewards that send chats to a model without a chat template. Raises ``ModelDirectoryError``."""
    if "default" in chat_format(directory).templates:
        return
    for index, reward in enumerate(recipe.rewards):
        if asks_own_judge(reward) and reward.options.get("chat", True):
            yield (
                f"rewards.{index}.options: {directory} has no chat template, so it takes no chats: set chat = "
                "false in [rewards.options], or name a model that was tuned for chats in [judge]"
            )
