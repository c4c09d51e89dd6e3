"""Rules of ``engines.args``, of speculative decoding and of ``[sampling]``. Names and types of vLLM's arguments are
checked by the dry run and by every engine process with the installed vLLM (``engines/vllm/arguments.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from streamrl.base.types import JsonMapping, SamplingSettings
from streamrl.recipe.dialects.foreign_keys import owned_arguments
from streamrl.recipe.field_types import keys_of
from streamrl.recipe.problems import short_toml
from streamrl.recipe.rules.rule import Broken, Problem, rule
from streamrl.recipe.sections import PIPELINE_PARALLEL, ROUNDING, Recipe

SPECULATION = "speculative_config"

LOSSLESS = ("ngram", "ngram_gpu", "suffix", "draft_model")
"""Methods of speculation that do not read the policy's hidden states. A draft head with old weights would read them."""

KEPT_BY_SPECULATION = {"temperature", "top_p", "top_k", "max_tokens", "stop"}
"""Sampling settings that vLLM applies to drafted tokens, too."""


def _arguments(recipe: Recipe) -> Iterator[tuple[str, JsonMapping]]:
    """Yield (path, arguments) of ``engines.args``, and of each set."""
    yield "engines.args", recipe.engines.args
    for index, shape in enumerate(recipe.engines.sets):
        yield f"engines.sets.{index}.args", shape.args


@rule("engines")
def refused_arguments(recipe: Recipe) -> Broken:
    """Arguments that another key sets, or that no run can have, are refused."""
    for path, arguments in _arguments(recipe):
        for name in arguments:
            key = owned_arguments().get(name.replace("-", "_"), "")
            if key.startswith("-"):
                yield Problem(f"{path}.{name}", f"cannot be set, because {key[1:]}: remove it")
            elif key:
                yield Problem(f"{path}.{name}", f"is set by {key}: write it there")
        pipeline_size = arguments.get(PIPELINE_PARALLEL, 1)
        if not isinstance(pipeline_size, int):  # vLLM takes "2" and 2.0
            text = f"{short_toml(pipeline_size)} is no whole number, by which workers are counted: set 2"
            yield Problem(f"{path}.{PIPELINE_PARALLEL}", text)


@rule("engines", "off_policy")
def rounded_engines(recipe: Recipe) -> Broken:
    """Engines that round differently from the trainer need the correction of the mismatch."""
    if recipe.off_policy.corrects_mismatch:
        return
    for path, arguments in _arguments(recipe):
        for name in ROUNDING:
            if arguments.get(name) not in (None, "auto"):
                yield Problem(
                    f"{path}.{name}",
                    f"{short_toml(arguments[name])} samples from a policy that is rounded otherwise than the "
                    "trainer's: set "
                    "off_policy.correct_mismatch = true, which weighs each token by their ratio, or remove it",
                )


@rule("engines", "lora")
def arguments_beside_adapters(recipe: Recipe) -> Broken:
    """Engines that serve an adapter keep the base as in the model's files, and only base and adapter sample."""
    if not recipe.lora.syncs_adapter:
        return
    for path, arguments in _arguments(recipe):
        for name in ("quantization", SPECULATION, PIPELINE_PARALLEL):
            if arguments.get(name) not in (None, 1):
                text = 'is not possible beside an adapter: remove it, or set lora.sync = "merged"'
                yield Problem(f"{path}.{name}", f"{short_toml(arguments[name])} {text}")


@rule("engines", "run.deterministic", "tail_batching", "sampling")
def speculation(recipe: Recipe) -> Broken:
    """Speculative decoding must sample from the policy's distribution. It uses random numbers in another order."""
    sampling = recipe.sampling
    for path, arguments in _arguments(recipe):
        drafts = arguments.get(SPECULATION)
        if drafts is None:
            continue
        where = f"{path}.{SPECULATION}"
        if not isinstance(drafts, Mapping):
            yield Problem(
                where, f"{short_toml(drafts)} is no table: write [{where}] with method and num_speculative_tokens"
            )
            continue
        method = drafts.get("method")
        if method not in LOSSLESS:
            methods = ", ".join(f'"{name}"' for name in LOSSLESS)
            yield Problem(f"{where}.method", f"{short_toml(method or '')} is not allowed: must be one of {methods}")
        if drafts.get("rejection_sample_method", "standard") != "standard":
            yield Problem(
                f"{where}.rejection_sample_method",
                f"{short_toml(drafts['rejection_sample_method'])} is not known to keep the policy's distribution: "
                "remove it",
            )
        if recipe.run.deterministic:
            yield Problem(where, "makes completions depend on what runs beside them: set run.deterministic = false")
        if recipe.tail_batching.verifies(deterministic=recipe.run.deterministic):
            yield Problem(
                where,
                "draws other random numbers than those that kept tokens are verified with: set "
                'tail_batching.deferred_prompts = "replay"',
            )
        for name, key in keys_of(SamplingSettings).items():
            value = getattr(sampling, name)
            if name not in KEPT_BY_SPECULATION and value != key.default:
                yield Problem(
                    f"sampling.{name}",
                    f"{short_toml(value)} is not kept by vLLM's speculative decoding: set {name} = {key.default:g}, or "
                    f"remove {where}",
                )


@rule("sampling", "prompts.train")
def sampled_tokens(recipe: Recipe) -> Broken:
    """Stop strings must have characters; the least length must not exceed the limit."""
    sampling = recipe.sampling
    if "" in sampling.stop:
        yield Problem("sampling.stop", "has an empty text, at which every completion would end: remove it")
    limits = [("", sampling.max_tokens)]
    limits += [(f"prompts.train.{name}.", settings.max_tokens) for name, settings in recipe.prompts.sets.items()]
    limit, place = min((limit, place) for place, limit in limits if limit)
    if sampling.min_tokens > limit:
        text = f"{sampling.min_tokens} is more than {place}max_tokens = {limit}: lower it"
        yield Problem("sampling.min_tokens", text)
