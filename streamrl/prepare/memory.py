"""Memory of the processes of a run, predicted from the sizes of its models. Pure: ``preflight``, ``summary`` (the lines
of the dry run), ``gpu_placement`` and ``streamrl try`` call it in the process of the command.

Published bits are the bfloat16 weights that the trainer publishes. A CPU engine keeps them beside the parameters that
it computes with (the replica), the trainer to compare the next version with them (the baseline)."""

from __future__ import annotations

from streamrl.learning.rank_memory import (
    SHADOW_BYTES,
    RankBytes,
    activation_bytes,
    bytes_per_rank,
    logits_at_once,
    training_sizes,
)
from streamrl.pretrained.model_facts import ModelFacts
from streamrl.recipe.judge import JUDGE_CONTEXT
from streamrl.recipe.sections import EngineKind, Gathered, Recipe
from streamrl.recipe.topology import JUDGE, PreparedSet, prepared_sets

MIB = 1 << 20
GIB = 1 << 30
# Proportional set size (PSS), measured on the demo: a vLLM CPU engine is three processes (streamrl's engine process
# 430, EngineCore 424, worker 500 MiB before weights and KV); torch in a trainer rank takes 450.
ENGINE_BASE_BYTES = 1350 * MIB
SIMULATED_ENGINE_BYTES = 120 * MIB  # before its parameters and its replica
SIMULATED_BYTES_PER_PARAMETER = 2 + 2
ENGINE_WORKER_BYTES = 500 * MIB  # one more worker, before its share of weights and KV
TRAINER_BASE_BYTES = 450 * MIB
CONTROLLER_BYTES = 120 * MIB
REWARD_WORKER_BYTES = 80 * MIB
ENGINE_BYTES_PER_PARAMETER = 4 + 2  # float32 on CPU, and the replica
JUDGE_BYTES_PER_PARAMETER = 4  # float32 on CPU, in vLLM's own packed form
LARGEST_CACHE_BYTES = GIB


def gib(size: float) -> str:
    """Bytes as ``1.52 GiB``."""
    return f"{size / GIB:.2f} GiB"


def estimate_memory(recipe: Recipe, facts: ModelFacts, context: int, judge: ModelFacts | None = None) -> dict[str, int]:
    """Host memory in bytes by process name, for a CPU run with ``context`` tokens a request; within about 30 % on the
    demo. ``judge``: sizes of the judge's model, where the run has a judge.

    The KV cache counts whole, because vLLM touches it whole on CPU: room for every running request, one GiB at most.
    Where several sets of engines are prepared, only one is awake, and the largest set counts."""
    # Ranks of tensor or context parallelism gather layer by layer in any case.
    by_layer = recipe.training.gathered is Gathered.LAYER or recipe.training.ranks_per_group > 1
    gathered = Gathered.LAYER if by_layer else Gathered.BATCH
    # Only the baseline: on a CPU the published bits themselves are a view of the parameters of the forward pass.
    baseline = SHADOW_BYTES * facts.parameters // (recipe.training.ranks // recipe.training.replicas)
    trainer = TRAINER_BASE_BYTES + rank_bytes(recipe, facts, context, gathered).total + baseline
    sets = [_engine_bytes(recipe, engine_set, facts, context) for engine_set in prepared_sets(recipe)]
    largest = max(sets, key=lambda of_set: sum(of_set.values()))
    by_process = {"controller": CONTROLLER_BYTES}
    by_process |= {f"reward-{i}": REWARD_WORKER_BYTES for i in range(recipe.reward_limits.workers)}
    by_process |= largest
    by_process |= {f"trainer-{i}": trainer for i in range(recipe.training.ranks)}
    if judge is not None:
        judge_context = recipe.judge.max_model_len or JUDGE_CONTEXT
        cache = min(recipe.judge.max_num_seqs * judge_context * judge.key_value_bytes * 9 // 8, LARGEST_CACHE_BYTES)
        by_process[JUDGE] = ENGINE_BASE_BYTES + JUDGE_BYTES_PER_PARAMETER * judge.parameters + cache
    return by_process


def _engine_bytes(recipe: Recipe, engine_set: PreparedSet, facts: ModelFacts, context: int) -> dict[str, int]:
    """Bytes of each engine of a set, by name. Workers of an engine share weights and cache."""
    if recipe.engines.kind is EngineKind.SIMULATED:
        simulated = SIMULATED_ENGINE_BYTES + SIMULATED_BYTES_PER_PARAMETER * facts.parameters
        return dict.fromkeys(engine_set.engines, simulated)
    workers = engine_set.workers
    # An eighth more than the running requests need, for shared prefixes: ``engines.vllm.options`` sizes the cache so.
    cache = min(engine_set.max_num_seqs * context * facts.key_value_bytes * 9 // 8, LARGEST_CACHE_BYTES * workers)
    engine = ENGINE_BASE_BYTES + ENGINE_BYTES_PER_PARAMETER * facts.parameters
    engine += max(cache, context * facts.key_value_bytes) + (workers - 1) * ENGINE_WORKER_BYTES
    return dict.fromkeys(engine_set.engines, engine)


def rank_bytes(
    recipe: Recipe, facts: ModelFacts, context: int, gathered: Gathered, *, on_device: bool = False, card_bytes: int = 0
) -> RankBytes:
    """Bytes of one trainer rank at its peak, in rows of which the longest has ``context`` tokens. ``card_bytes``:
    memory of its GPU (0: unknown, or there is none)."""
    training = recipe.training
    sizes = training_sizes(training, recipe.lora, recipe.objective_settings, facts, on_device=on_device)
    row_share = -(-context // training.context_parallel_size)
    tokens = max(training.row_tokens("cuda", facts.parameters, context), row_share)  # cuda: never shorter rows
    logits = min(tokens * facts.vocabulary, logits_at_once(card_bytes))
    activations = activation_bytes(facts, training, tokens, logits, sixteen_bit=sizes.sixteen_bit)
    return bytes_per_rank(sizes, gathered, activations)


def device_bytes(recipe: Recipe, facts: ModelFacts, context: int, card_bytes: int) -> int:
    """GPU memory that a trainer rank needs at least on a GPU with ``card_bytes``, layer by layer where
    ``training.advanced.gathered`` allows it."""
    gathered = Gathered.BATCH if recipe.training.gathered is Gathered.BATCH else Gathered.LAYER
    return rank_bytes(recipe, facts, context, gathered, on_device=True, card_bytes=card_bytes).total
