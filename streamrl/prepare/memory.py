"""Memory of the processes of a run, predicted from the sizes of its models: ``preflight``, ``summary`` (the lines
of the dry run), ``gpu_placement`` and ``streamrl try`` call it in the process of the command.

Published bits are the bfloat16 weights that the trainer publishes. A CPU engine keeps them beside the parameters that
it computes with (the replica), the trainer to compare the next version with them (the baseline)."""

from __future__ import annotations

from contextlib import suppress

from streamrl.base.errors import RecipeError
from streamrl.learning.rank_memory import SHADOW_BYTES, Card, RankBytes, bytes_per_rank, training_sizes
from streamrl.pretrained.model_facts import ModelFacts, facts_of
from streamrl.recipe.sections import EngineKind, Gathered, Recipe
from streamrl.recipe.topology import PreparedSet, prepared_sets, served_models, served_name
from streamrl.rewards.served.options import longest_question

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
SERVED_BYTES_PER_PARAMETER = 4  # float32 on CPU, in vLLM's own packed form
LARGEST_CACHE_BYTES = GIB


def gib(size: float) -> str:
    """Bytes as ``1.52 GiB``."""
    return f"{size / GIB:.2f} GiB"


def estimate_memory(recipe: Recipe, facts: ModelFacts, context: int) -> dict[str, int]:
    """Host memory in bytes by process name, for a CPU run with ``context`` tokens a request; within about 30 % on the
    demo. A judge or teacher of the run counts where the sizes of its model can be read.

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
    for role, served_model in served_models(recipe).items():
        served_facts = facts_of(served_model.model)
        if served_facts is None:
            continue
        with suppress(RecipeError):  # a length that does not fit is a problem of its own
            tokens = served_model.max_num_seqs * longest_question(recipe, role)
            cache = min(tokens * served_facts.key_value_bytes * 9 // 8, LARGEST_CACHE_BYTES)
            weights = SERVED_BYTES_PER_PARAMETER * served_facts.parameters
            by_process[served_name(role)] = ENGINE_BASE_BYTES + weights + cache
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
    recipe: Recipe, facts: ModelFacts, context: int, gathered: Gathered, card: Card | None = None
) -> RankBytes:
    """Bytes of one trainer rank at its peak, in rows of which the longest has ``context`` tokens. ``card``: GPU of the
    rank; None: a CPU."""
    sizes = training_sizes(
        recipe.training,
        recipe.lora,
        recipe.objective_settings,
        facts,
        context=context,
        distribution=recipe.sampling,
        card=card,
    )
    return bytes_per_rank(sizes, gathered)


def device_bytes(recipe: Recipe, facts: ModelFacts, card: Card) -> RankBytes:
    """GPU memory that a trainer rank needs at least, layer by layer where ``training.advanced.gathered`` allows it."""
    gathered = Gathered.BATCH if recipe.training.gathered is Gathered.BATCH else Gathered.LAYER
    return rank_bytes(recipe, facts, recipe.context, gathered, card)
