"""Options of a vLLM engine, computed from the recipe: sizes, variables, cores. No torch and no vllm here.

Engine processes and the judge's process start with them (``launch.roles``, ``rewards.served.options``). The checks
before a run (the command's process) and the controller read the sizes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from streamrl.base.errors import RecipeError
from streamrl.base.run_process import usable_cores
from streamrl.base.types import JsonObject, TextsByName
from streamrl.engines.async_llm.options import (
    CPU_BATCH_TOKENS,
    CPU_CACHE_BYTES,
    VllmOptions,
    cpu_variables,
    shared_variables,
)
from streamrl.engines.vllm.visible_gpus import engine_dtype, installed_device
from streamrl.learning.kept_sets import kept_tokens
from streamrl.learning.routing_replay import replays_routing
from streamrl.learning.threads import engine_threads
from streamrl.pretrained.composites import towers
from streamrl.pretrained.layer_kinds import attention_layers, has_gated_delta_net, recurrent_kinds, windowed_layers
from streamrl.pretrained.model_facts import facts_of, read_model_config
from streamrl.pretrained.model_folder import unsafe_content
from streamrl.pretrained.trainable_models import linear_modules
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.field_types import EngineDtype
from streamrl.recipe.sections import ADAPTER_RANKS, EngineKind, Lora, Recipe
from streamrl.recipe.topology import PreparedSet, expected_kv_tokens, prepared_sets, set_of_engine

CPU_BLOCK_TOKENS = 128
CPU_TURN_BLOCK_TOKENS = 32
"""Tokens of a KV block on a CPU in runs with an environment, vLLM's smallest. The last block of each turn is computed
again in the next turn, so small blocks save prefill."""
CUDA_BLOCK_TOKENS = 16
OWN_GPU_SHARE = 0.85
"""Share of the memory of a GPU that engines take where no other process is on it, and the recipe names none."""
LARGE_CARD_BYTES = 70 << 30
LARGE_CARD_TOKENS = 16_384
"""Tokens of one step on a GPU with ``LARGE_CARD_BYTES`` of memory or more."""
VLLM_TOKENS = 2048
"""Tokens of one step that vLLM chooses by itself."""
PACKED_LINEAR_WIDTH = 256
"""Smallest hidden size for which vLLM's packed kernels save more time than packing after each commit takes."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class EngineOptions(VllmOptions, frozen=True, kw_only=True):
    """Options of one vLLM engine of a run, or of its judge.

    ``cache_blocks``: number of KV blocks (0: vLLM decides from the free memory, on CUDA)
    ``block_tokens``: tokens of a KV block (0: vLLM's default)
    ``cache_tokens``: tokens of requests of full length in ``cache_blocks`` (0: vLLM decides)
    ``sleeps``: whether the engine must be able to sleep, for which vLLM allocates memory differently
    ``keeps_weights``: whether its weights stay on the GPU while it sleeps
    ``batch_tokens``: tokens of one step (0: see ``batched_tokens``)
    ``pushed``: whether the engine gets weights from a trainer
    ``by_priority``: whether waiting requests run in the order of ``Generate.priority``
    ``routed``: whether completions have the experts of their tokens
    ``args``: arguments of vLLM in the recipe
    ``adapter``: LoRA adapter that the engine computes beside the base model, if it ``syncs_adapter``"""

    cache_blocks: int
    block_tokens: int
    cache_tokens: int = 0
    gpu_memory_utilization: float
    sleeps: bool
    keeps_weights: bool = False
    batch_tokens: int = 0
    pushed: bool = True
    by_priority: bool = False
    routed: bool = False
    args: JsonObject = {}
    adapter: Lora = Lora()

    @property
    def adapter_rank(self) -> int:
        """The smallest rank of vLLM's that the adapter fits in."""
        return min(rank for rank in ADAPTER_RANKS if rank >= self.adapter.rank)

    @property
    def adapted_modules(self) -> list[str]:
        """Last parts of the names of modules that may have an adapter. Reads the headers of the model's files."""
        if self.adapter.named_targets and not self.adapter.pattern:
            return sorted({name.rpartition(".")[2] for name in self.adapter.named_targets})
        return sorted(linear_modules(Path(self.model_path)))


def engine_options(
    recipe: Recipe,
    index: int,
    socket_directory: str | Path,
    *,
    device: str = "",
    gpu_memory_utilization: float = 0.0,
    keeps_weights: bool = False,
) -> EngineOptions:
    """Return the options of engine ``index`` of ``recipe``.

    ``socket_directory``: folder of vLLM's own sockets (a short path)
    ``device``: "cpu" or "cuda" (empty: the device of the installed vLLM)
    ``gpu_memory_utilization``: share of the GPU's memory (0: the share in the recipe)
    ``keeps_weights``: whether its weights stay on the GPU while it sleeps

    Raises ``RecipeError`` when the model's configuration cannot be read, or the context is longer than the model's."""
    device = device or installed_device()
    config = model_config(recipe.model.path)
    on_cpu = device == "cpu"
    dtype = engine_dtype(recipe.engines.dtype, device, config)
    context = max_model_len(recipe, config)
    engine_set = set_of_engine(recipe, index)
    blocks = 0
    chunk = config.get("attention_chunk_size") or 0  # a block is in one chunk
    block_tokens = math.gcd(cpu_block_tokens(recipe), chunk) if on_cpu else CUDA_BLOCK_TOKENS
    one_request, _ = blocks_of_a_request(config, context, block_tokens)
    longest = -(-context // block_tokens) * block_tokens
    if engine_set.kv_tokens:
        blocks = max(-(-engine_set.kv_tokens * one_request // longest), one_request) + 1  # vLLM leaves one empty
    elif on_cpu:
        sequences = engine_set.max_num_seqs
        if recipe.environment.configured:
            sequences *= 2  # the same number of trajectories again are between two turns
        workers = engine_set.tensor_parallel_size
        blocks = cache_blocks(config, dtype, context, sequences, workers, block_tokens=block_tokens)
    return EngineOptions(
        name=f"engine-{index}",
        model_path=recipe.model.path,
        device=device,
        dtype=dtype,
        max_model_len=context,
        max_num_seqs=engine_set.max_num_seqs,
        cache_blocks=blocks,
        block_tokens=block_tokens if blocks else 0,
        cache_tokens=max(blocks - 1, 0) * longest // one_request,
        gpu_memory_utilization=gpu_memory_utilization or recipe.engines.gpu_memory_utilization or OWN_GPU_SHARE,
        workers=engine_set.workers,
        keeps_weights=keeps_weights,
        sleeps=not on_cpu and (recipe.in_turns or bool(recipe.engines.sets and recipe.engines.sleep_level)),
        variables=_variables(recipe, index, engine_set, socket_directory, config, on_cpu),
        batch_tokens=recipe.engines.max_num_batched_tokens,
        args=engine_set.args,
        adapter=recipe.lora if recipe.lora.syncs_adapter else Lora(),
        by_priority=recipe.environment.configured and not recipe.run.deterministic,
        routed=replays_routing(recipe),
        prefix_caching=caches_prefixes(recipe, config, on_cpu),
        kept_tokens=kept_tokens(recipe),
        text_only=bool(towers(config)),
    )


def dtype_of_engines(recipe: Recipe, device: str) -> EngineDtype:
    """Return the dtype of the engines of ``recipe`` on ``device`` (``cpu`` or ``cuda``). Raises ``RecipeError`` when
    the model's configuration, which simulated engines do not need, cannot be read."""
    config: JsonObject = {}
    if recipe.engines.kind is EngineKind.VLLM:
        config = model_config(recipe.model.path)
    return engine_dtype(recipe.engines.dtype, device, config)


def caches_prefixes(recipe: Recipe, config: JsonObject, on_cpu: bool) -> bool:
    """Return whether the engines of ``recipe`` keep the KV blocks of prompts for later requests. ``config``: the
    model's configuration."""
    # The KV of a prefill and of single steps differ in their last bits, and after a restart no block is cached.
    if recipe.run.deterministic:
        return False
    # vLLM caches the state of a layer at the end of a chunk of a prefill, and on a CPU prefills have no chunks.
    return not (on_cpu and recurrent_kinds(config))


def cpu_block_tokens(recipe: Recipe) -> int:
    """Return the number of tokens of a KV block of an engine of ``recipe`` on a CPU."""
    return CPU_TURN_BLOCK_TOKENS if recipe.environment.configured else CPU_BLOCK_TOKENS


def batched_tokens(options: EngineOptions, gpu_memory: int) -> int:
    """Return the largest number of tokens of one step of an engine; 0 for vLLM's own default (2,048). ``gpu_memory``:
    bytes of memory of the GPU (0: unknown)."""
    if options.on_cpu:
        return max(options.batch_tokens or CPU_BATCH_TOKENS, options.max_model_len)
    if not options.batch_tokens and gpu_memory >= LARGE_CARD_BYTES:
        return LARGE_CARD_TOKENS
    return options.batch_tokens


def step_tokens(gpu_memory: int) -> int:
    """Return the largest number of tokens of one step where the recipe names none. ``gpu_memory``: bytes of memory of
    the GPU (0: unknown)."""
    return LARGE_CARD_TOKENS if gpu_memory >= LARGE_CARD_BYTES else VLLM_TOKENS


def expected_room(recipe: Recipe, first_kv_tokens: int, *, device: str = "") -> dict[str, int]:
    """Return the expected capacity of the KV cache of one engine in tokens, by set of ``recipe``; 0: unknown.

    ``first_kv_tokens``: capacity of an engine of the first set, which its engines have reported. On a CPU the options
    determine the capacity of the other sets; on CUDA it is the memory that the weights leave, estimated until an engine
    of the set has started and reported it."""
    sets = prepared_sets(recipe)
    first = sets[0]
    capacities = {first.name: first_kv_tokens}
    if len(sets) == 1:
        return capacities
    device = device or installed_device()
    weight_tokens = _weight_tokens(recipe)
    for engine_set in sets[1:]:
        options = engine_options(recipe, engine_set.first, "", device=device)
        capacity = options.cache_tokens
        if not capacity:
            capacity = expected_kv_tokens(
                first_kv_tokens, engine_set.workers, of=first.workers, weight_tokens=weight_tokens
            )
        capacities[engine_set.name] = capacity
    return capacities


def _weight_tokens(recipe: Recipe) -> float:
    """Return the number of tokens whose KV takes the memory of the weights, at two bytes a parameter."""
    facts = facts_of(recipe.model.path)
    if facts is None:
        return 0.0
    return 2 * facts.parameters / max(facts.key_value_bytes / 2, 1)  # ``key_value_bytes`` is for float32


def model_config(model_path: str, *, field: str = "model.path") -> JsonObject:
    """Return the model's configuration (``read_model_config``). Raises ``RecipeError`` about ``field`` when it is
    missing or not a JSON object, or when the directory holds code or pickles."""
    directory = Path(model_path)
    try:
        unsafe = unsafe_content(directory)
        if unsafe:
            raise ModelDirectoryError(unsafe)
        return read_model_config(directory)
    except ModelDirectoryError as error:
        raise RecipeError(f"{field}: {directory} {error}; give a Hugging Face model directory") from error


def max_model_len(recipe: Recipe, config: JsonObject) -> int:
    """Return the longest context (prompt and completion) in tokens, at most the positions that the model has."""
    positions = int(config.get("max_position_embeddings") or 0)
    context = recipe.context
    is_too_long = 0 < positions < context
    if recipe.engines.max_model_len and is_too_long:
        raise RecipeError(
            f"engines.max_model_len: {context} is more than the model's {positions} positions; lower it or set 0"
        )
    if recipe.environment.configured and is_too_long:
        raise RecipeError(f"environment.max_tokens: {context} is more than the model's {positions} positions; lower it")
    if positions:
        context = min(context, positions)
    if context <= recipe.sampling.max_tokens:
        raise RecipeError(
            f"sampling.max_tokens: {recipe.sampling.max_tokens} leaves no room for a prompt in {context}; lower it"
        )
    return context


def cache_blocks(
    config: JsonObject,
    dtype: str,
    context: int,
    max_num_seqs: int,
    workers: int = 1,
    block_tokens: int = CPU_BLOCK_TOKENS,
) -> int:
    """Return the number of KV blocks of a CPU engine: every running request at full length, and an eighth more for
    shared prefixes.

    At most ``CPU_CACHE_BYTES`` in each of its ``workers``, which share the heads, but always enough for one request of
    full length. Beyond this number vLLM preempts requests."""
    one_request, layers_of_a_block = blocks_of_a_request(config, context, block_tokens)
    enough = max_num_seqs * one_request * 9 // 8 + 1
    heads = int(config.get("num_attention_heads") or 1)
    head_size = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
    key_value_heads = max(int(config.get("num_key_value_heads") or heads) // workers, 1)
    block_bytes = 2 * layers_of_a_block * key_value_heads * head_size * _DTYPE_BYTES.get(dtype, 4) * block_tokens
    affordable = CPU_CACHE_BYTES // block_bytes if block_bytes else enough
    return max(min(enough, affordable), one_request + 1)


def blocks_of_a_request(config: JsonObject, context: int, block_tokens: int) -> tuple[int, int]:
    """Return the number of KV blocks of a request of full length, and the number of layers of a block.

    vLLM makes groups of equally many layers of one kind, and a block has tokens of one group. Windows are filled whole
    by a prompt, and take a block more; the state of recurrent layers takes one."""
    layers = int(config.get("num_hidden_layers") or 1)
    attention = attention_layers(config, layers) or layers
    windowed = windowed_layers(config, layers)
    kinds = attention - windowed, windowed, layers - attention
    group = min(filter(None, kinds))
    full_groups, windowed_groups, state_groups = (-(-kind // group) for kind in kinds)
    blocks = -(-context // block_tokens)
    return full_groups * blocks + windowed_groups * (blocks + 1) + state_groups, group


def _variables(
    recipe: Recipe, index: int, engine_set: PreparedSet, socket_directory: str | Path, config: JsonObject, on_cpu: bool
) -> TextsByName:
    variables = shared_variables(socket_directory)
    if on_cpu:
        wide = int(config.get("hidden_size") or 0) >= PACKED_LINEAR_WIDTH
        variables |= cpu_variables("packed" if wide else "plain")
        place = index - engine_set.first
        cores: list[int] = []
        if place < len(engine_set.cores):
            cores = core_numbers(engine_set.cores[place])
        if engine_set.workers > 1:
            variables |= workers_on_cores(cores or sorted(os.sched_getaffinity(0)), place, engine_set)
        else:
            variables |= openmp_places(cores, engine_threads(recipe.engines, recipe.run, usable_cores()))
    return variables


def openmp_places(cores: list[int], threads: int) -> TextsByName:
    """Return OpenMP's own variables for an engine with one worker, which computes in its EngineCore process, where
    vLLM's binding has no effect. ``threads``: number of threads when ``cores`` is empty."""
    if not cores:
        return {"OMP_NUM_THREADS": str(threads)}
    places = ",".join(f"{{{core}}}" for core in cores)
    return {"OMP_NUM_THREADS": str(len(cores)), "OMP_PLACES": places, "OMP_PROC_BIND": "true"}


def workers_on_cores(cores: list[int], place: int, engine_set: PreparedSet) -> TextsByName:
    """Return vLLM's binding of the workers of an engine: separate cores for each worker, if there are enough.

    ``cores``: cores that the engine may use. If the recipe names none, these are all cores of the host; the engines of
    the set share half of them, at least one core for each worker
    ``place``: number of the engine in its set"""
    workers = engine_set.count * engine_set.workers
    if not engine_set.cores and len(cores) >= workers:
        cores = cores[: max(len(cores) // 2, workers)]
        cores_per_engine = len(cores) // engine_set.count
        cores = cores[place * cores_per_engine : (place + 1) * cores_per_engine]
    cores_per_worker = max(len(cores) // engine_set.workers, 1)
    bindings = []
    for worker in range(engine_set.workers):
        worker_cores = cores[worker * cores_per_worker : (worker + 1) * cores_per_worker]
        if not worker_cores:  # fewer cores than workers: they share
            worker_cores = [cores[worker % len(cores)]]
        bindings.append(",".join(map(str, worker_cores)))
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(bindings)}


def core_numbers(cores: str) -> list[int]:
    """Return the numbers of a list of cores such as ``0-3,6``."""
    numbers: list[int] = []
    for part in filter(None, cores.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def device_problems(recipe: Recipe, config: JsonObject, *, device: str) -> Iterator[str]:
    """Yield reasons why a set of engines of ``recipe`` cannot run on this machine. ``config``: the model's
    configuration."""
    if not recipe.on_one_host:
        return
    if device == "cpu" and has_gated_delta_net(config) and recipe.engines.dtype not in ("auto", "bfloat16"):
        yield (
            f'engines.dtype: on a CPU vLLM computes Gated DeltaNet in bfloat16 alone, not in "{recipe.engines.dtype}": '
            'write "auto" or "bfloat16"'
        )
    cores = usable_cores()
    heads = int(config.get("num_attention_heads") or 1)
    for index, engine_set in enumerate(prepared_sets(recipe)):
        path = "engines" if index == 0 else f"engines.advanced.sets.{index - 1}"
        if engine_set.workers == 1:
            continue  # engines with one worker may share a device
        if heads % engine_set.tensor_parallel_size:
            sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            yield (
                f"{path}.tensor_parallel_size: the model has {heads} attention heads, which "
                f"{engine_set.tensor_parallel_size} workers cannot share: set one of {sizes}"
            )
        if device == "cpu" and engine_set.count * engine_set.workers > cores:
            yield (
                f"{path}: {engine_set.count} engines of {engine_set.workers} workers need "
                f"{engine_set.count * engine_set.workers} cores, and this machine has {cores}: lower count or "
                "tensor_parallel_size"
            )
