"""Demand of a run on the GPUs of this host: the memory that its processes need, and their placement. Called in the
process of the command: by the checks before a run, by the start of the run, and by the dry run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from streamrl.base.errors import RecipeError
from streamrl.engines.vllm.options import max_model_len, model_config
from streamrl.engines.vllm.visible_gpus import visible_gpus
from streamrl.prepare.memory import device_bytes
from streamrl.prepare.placement import Demand, Placement, place
from streamrl.pretrained.model_facts import ModelFacts, read_model_facts
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.sections import Recipe

CONTEXT_BYTES = 1 << 30
"""Memory of a process that is no engine, beside its tensors: CUDA's context, kernels, NCCL's buffers, fragmentation."""


def gpu_placement(recipe: Recipe) -> Placement:
    """GPUs of this host for the processes of ``recipe`` (see ``place``)."""
    gpus = visible_gpus()
    return place(recipe, gpus, _demand(recipe) if gpus else Demand())


def _demand(recipe: Recipe) -> Demand:
    """Memory that the models need; 0 for a model that cannot be read, which ``preflight`` reports."""
    model = facts_of(recipe.model.path)
    context = recipe.engines.max_model_len
    with contextlib.suppress(RecipeError):
        context = max_model_len(recipe, model_config(recipe.model.path))
    scorers = [
        _bytes(facts, str(reward.options.get("dtype")))
        for reward in recipe.rewards
        if reward.function == "reward_model" and reward.options.get("device") != "cpu"
        if (facts := facts_of(str(reward.options.get("path", ""))))
    ]
    return Demand(
        engine=_bytes(model, recipe.engines.dtype, context) if model else 0,
        rank=device_bytes(recipe, model, context) + CONTEXT_BYTES if model else 0,
        rewards=sum(scorers) + CONTEXT_BYTES if scorers else None,
    )


def _bytes(facts: ModelFacts, dtype: str, context: int = 0) -> int:
    """Bytes of the weights and of the cache of one request."""
    return (facts.parameters + context * facts.key_value_bytes // 4) * (4 if dtype == "float32" else 2)


def facts_of(path: str) -> ModelFacts | None:
    """The model in a directory; None where there is none that can be read."""
    try:
        return read_model_facts(Path(path)) if path else None
    except ModelDirectoryError:
        return None
