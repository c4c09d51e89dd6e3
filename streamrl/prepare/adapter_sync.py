"""The choice of what engines get of an adapter, where the recipe leaves it open (``lora.sync = "auto"``).

``Pipeline`` calls it in the process of a run that begins, and the dry run in its own. A change of merged weights below
a rounding step of bfloat16 reaches no engine; an adapter that is served beside its base arrives whole. So adapters are
served where vLLM can, which a throw-away process finds out, and merged elsewhere."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.engines.vllm.options import engine_options
from streamrl.prepare.machine_check import CPU_PACKAGE, engine_package
from streamrl.prepare.preflight import check_model
from streamrl.prepare.recipe_probe import PROBE_TIMEOUT_S, problem_of_model
from streamrl.pretrained.model_facts import experts_of, read_model_config
from streamrl.recipe.rules.rules import broken_rules
from streamrl.recipe.sections import EngineKind, LoraSync, Recipe

_MERGED_CHANGE_SHARES = {1e-6: 0.05, 1e-5: 0.44, 5e-5: 0.97}
"""Share of the change of logprobs that engines have after 30 steps, by learning rate: merged adapters of rank 16 on the
demo's model (benchmarks/adapter_updates.py)."""


def with_adapter_sync(recipe: Recipe) -> tuple[Recipe, str]:
    """``recipe`` with "adapter" or "merged" in place of "auto", and why adapters are merged; empty: they are not, or
    the recipe says so. Takes about ten seconds, for an import of vLLM; blocking. Raises ``RecipeError`` where the
    recipe demands adapters that vLLM cannot serve."""
    lora = recipe.lora
    if not lora.rank or lora.sync is LoraSync.MERGED:
        return recipe, ""
    candidate = replace(recipe, lora=replace(lora, sync=LoraSync.ADAPTER))
    problem = next(_obstacles(recipe, candidate), "")
    if lora.sync is LoraSync.ADAPTER:
        if problem and recipe.engines.kind is EngineKind.VLLM:
            raise RecipeError(problem)
        return recipe, ""
    if not problem:
        return candidate, ""
    rate = recipe.training.learning_rate
    text = (
        f'lora.sync = "auto" merges the adapters, since {problem}. Merged weights are rounded: at '
        f"training.learning_rate = {rate:g} engines have about {arrived_share(rate):.0%} of a change after 30 steps"
    )
    return replace(recipe, lora=replace(lora, sync=LoraSync.MERGED)), text


def arrived_share(rate: float) -> float:
    """Share of a change that merged weights have after 30 steps at ``rate``, from what was measured."""
    shares = sorted(_MERGED_CHANGE_SHARES.items())
    for (low, share), (high, next_share) in pairwise(shares):
        if rate <= high:
            place = max(0.0, math.log(rate / low) / math.log(high / low)) if rate > 0 else 0.0
            return share + place * (next_share - share)
    return shares[-1][1]


def _obstacles(recipe: Recipe, candidate: Recipe) -> Iterator[str]:
    """Reasons for which engines of this run serve no adapter, the cheapest to find first."""
    if recipe.engines.kind is EngineKind.SIMULATED:
        yield "simulated engines have no model"
        return
    without = replace(recipe, lora=replace(recipe.lora, sync=LoraSync.MERGED))
    rules = set(broken_rules(without))
    yield from (f"{path}: {text}" for path, text in broken_rules(candidate) if (path, text) not in rules)
    try:
        check_model(candidate)
        name, _ = engine_package() or ("", "")
        if name == CPU_PACKAGE and experts_of(read_model_config(Path(recipe.model.path))):
            yield 'vLLM on a CPU serves no adapters of a model with experts (lora.sync = "merged" needs none)'
    except RecipeError as error:
        yield from (problem for problem in error.problems if problem.startswith("lora.sync"))
    if not recipe.on_one_host or engine_package() is None:
        if recipe.lora.sync is LoraSync.AUTO:
            yield "this host has no vLLM that could say whether it serves them"
        return
    split = recipe.training.tensor_parallel_size, recipe.training.expert_parallel_size
    options = engine_options(candidate, 0, tempfile.gettempdir())
    trial = problem_of_model(options, PROBE_TIMEOUT_S, recipe.lora.named_targets, split=split)
    if trial.problem:
        yield trial.problem
    elif trial.failure and recipe.lora.sync is LoraSync.AUTO:
        yield f"vLLM gave no answer whether it serves them ({trial.failure})"
