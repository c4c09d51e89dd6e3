"""Decide whether the trainer's routers take the experts that the engines chose (``training.advanced.routing_replay``).

The options of engines and of trainer ranks are made with it; ``prepare.preflight`` refuses a recipe that demands a
replay that is not possible."""

from __future__ import annotations

from math import ceil
from pathlib import Path

from streamrl.base.types import JsonMapping
from streamrl.pretrained.model_facts import experts_of, read_model_config
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.sections import PIPELINE_PARALLEL, EngineKind, Recipe

MOST_BYTES = 192 << 20
"""Largest size of the experts of a group, which goes to the trainer in one message of at most 256 MiB."""

_PARALLEL = ("decode_context_parallel_size", PIPELINE_PARALLEL)


def replays_routing(recipe: Recipe) -> bool:
    """Return whether engines return the experts of each token, and the trainer takes them. False where the model's
    configuration cannot be read: loading the model reports this problem."""
    if recipe.training.routing_replay is False:
        return False
    try:
        return not why_not_replayed(recipe, read_model_config(Path(recipe.model.path)))
    except ModelDirectoryError:
        return False


def why_not_replayed(recipe: Recipe, config: JsonMapping) -> str:
    """Return why a run of ``recipe`` cannot replay the routing of its engines, with the remedy; empty where it can."""
    sizes = experts_of(config)
    remedy = 'set routing_replay = "auto" or false'
    engine_arguments = [recipe.engines.args, *(engine_set.args for engine_set in recipe.engines.sets)]
    if recipe.engines.kind is EngineKind.SIMULATED:
        return f'engines.kind = "simulated" has no model that chooses experts: {remedy}'
    if sizes is None:
        return f"the model has no experts to choose from: {remedy}"
    if recipe.run.deterministic:
        return f"vLLM keeps experts with its prefix cache, which run.deterministic = true turns off: {remedy}"
    if recipe.training.compile:
        return f"training.compile = true compiles the choice of the trainer's own routers: set it to false, or {remedy}"
    if recipe.training.context_parallel_size > 1:
        return f"training.advanced.context_parallel_size splits rows, but not the experts of their tokens: {remedy}"
    for name in _PARALLEL:
        if any(arguments.get(name, 1) != 1 for arguments in engine_arguments):
            return f"engines.args.{name}: vLLM returns no experts then: remove it, or {remedy}"
    group = recipe.largest_group
    needed = group * recipe.max_tokens * sizes.bytes_per_token
    if needed > MOST_BYTES:
        return (
            f"the experts of {group} completions of {recipe.max_tokens} tokens take {ceil(needed / (1 << 20))} "
            f"MiB ({sizes.bytes_per_token} bytes a token), and a group may have {MOST_BYTES >> 20}: lower "
            f"sampling.max_tokens or rollout.group_size, or {remedy}"
        )
    return ""
