"""Check whether a run can train a model, and which of its modules may have adapters, by ``config.json`` and the headers
of the weights, without torch. Called by the dry run (``prepare``), by engine processes and by trainer ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamrl.base.types import JsonMapping, TextsByName
from streamrl.pretrained.composites import COMPOSITE_CLASS, has_language_model, towers, without_towers
from streamrl.pretrained.layer_kinds import recurrent_kinds
from streamrl.pretrained.model_facts import ADAPTER_FILE, EMBEDDING, MERGED, read_model_config, stacked_layers
from streamrl.pretrained.model_folder import unsafe_content
from streamrl.pretrained.weight_files import ModelDirectoryError, StoredTensor, stored_tensors

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MAKES_PLAIN = {"mxfp4": "Mxfp4Config(dequantize=True)", "fp8": "FineGrainedFP8Config(dequantize=True)"}
"""What makes plain weights of models that are published quantised, in transformers."""
_NO_LINEAR = re.compile(r"embed(?!_out)|wte|wpe|norm")


def refuse_untrainable(directory: Path) -> None:
    """Raises ``ModelDirectoryError`` for a folder with code or pickles, a model without a causal language model,
    quantised weights, and weights that do not fit the configuration."""
    if problem := unsafe_content(directory):
        raise ModelDirectoryError(problem)
    config = read_model_config(directory)
    if problem := _other_kind(directory, config) or _misfit(config, stored_tensors(directory)):
        raise ModelDirectoryError(problem)


def split_problems(directory: Path, tensor: int, expert: int) -> list[str]:
    """Return which sizes of the model ``tensor`` ranks cannot divide, with the arithmetic and the remedy. ``expert``:
    ``training.expert_parallel_size``; 1: each expert is split, like a layer. Raises ``ModelDirectoryError``."""
    config = read_model_config(directory)
    if tensor == 1:
        return []
    names = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    if not config.get("tie_word_embeddings"):
        names.append("vocab_size")
    if expert > 1:
        names += ["num_experts", "num_local_experts", "n_routed_experts"]
    else:
        names.append("moe_intermediate_size")
    sizes = {name: config[name] for name in names if isinstance(config.get(name), int)}
    problems = []
    for name, size in sizes.items():
        if size % tensor:
            fits = max(count for count in range(1, tensor) if not any(other % count for other in sizes.values()))
            key = "training.advanced." + ("expert_parallel_size" if "experts" in name else "tensor_parallel_size")
            problems.append(
                f"{key}: {name} = {size} of the model does not divide into {tensor} equal parts "
                f"({size} = {size // tensor} x {tensor} + {size % tensor}): set it to {fits}"
            )
    return problems


def row_split_problems(directory: Path, context: int) -> list[str]:
    """Return why ``context`` ranks cannot share the rows of the model (context parallelism): it has recurrent layers,
    which carry a state from token to token. Raises ``ModelDirectoryError``."""
    recurrent = recurrent_kinds(read_model_config(directory))
    if context == 1 or not recurrent:
        return []
    text = f"the model has layers of type {', '.join(recurrent)}, which carry a state over the splits of a row"
    return [f"training.advanced.context_parallel_size: {text}: set it to 1, or give a model of attention layers alone"]


def _other_kind(directory: Path, config: JsonMapping) -> str:
    """Return why the model has no causal language model with plain weights, and the remedy; empty: it may have one."""
    if (directory / ADAPTER_FILE).exists():
        return (
            f"has {ADAPTER_FILE} beside config.json: transformers loads the base model that it names, vLLM the weights "
            f"of this folder: remove it if they are the whole model, or {MERGED}"
        )
    architectures = config.get("architectures")
    classes = []
    if isinstance(architectures, list):
        classes = [str(architecture) for architecture in architectures]
    named = ", ".join(classes) or f"of the type {config.get('model_type')}"
    remedy = "only language models that continue a text can be trained"
    inputs = towers(config)
    if inputs and not has_language_model(config):
        return (
            f"is a {named}, which has towers ({', '.join(inputs)} in config.json) and no language model (text_config): "
            f"{remedy}; give the model that the towers belong to, with its own config.json"
        )
    ends = (*_CAUSAL, COMPOSITE_CLASS) if inputs else _CAUSAL
    if config.get("is_encoder_decoder") or (classes and not any(name.endswith(ends) for name in classes)):
        return f"is a {named}: {remedy} (...{', ...'.join(ends)}); give such a model"
    if method := config.get("quantization_config"):
        kind = method.get("quant_method", "unknown method") if isinstance(method, dict) else method
        original = "give the original model"
        if kind in _MAKES_PLAIN:
            original = f"give a copy in bfloat16 (transformers makes one with {_MAKES_PLAIN[kind]})"
        return f"is quantised ({kind}): training needs plain weights; {original}"
    return ""


def _misfit(config: JsonMapping, tensors: Mapping[str, StoredTensor]) -> str:
    """Return why the weights do not fit the configuration, or the configuration contradicts itself; empty: no such
    problem is visible."""
    vocabulary, padding, count = (config.get(key) for key in ("vocab_size", "pad_token_id", "num_hidden_layers"))
    remedy = "copy config.json and the weights of one save"
    tensors = without_towers(tensors)
    for name, tensor in tensors.items():
        if EMBEDDING.fullmatch(name) and vocabulary and len(tensor.shape) == 2 and tensor.shape[0] != vocabulary:
            return f"has {tensor.shape[0]} rows of {name}, and vocab_size = {vocabulary} in config.json: {remedy}"
    if isinstance(padding, int) and isinstance(vocabulary, int) and not -vocabulary <= padding < vocabulary:
        return (
            f"has pad_token_id = {padding} in config.json and {vocabulary} embeddings (0 to {vocabulary - 1}): resize "
            "the embeddings (resize_token_embeddings), or name another token"
        )
    layers = stacked_layers(tensors)
    extra = config.get("num_nextn_predict_layers") or 0
    if layers and isinstance(count, int) and layers not in (count, count + extra):
        return f"has {layers} layers in its weights, and num_hidden_layers = {count} in config.json: {remedy}"
    return ""


def is_target(module: str, target: str) -> bool:
    """Return whether peft's target ``target`` means the module of this full name: it is the name, the end of the name,
    or a regular expression that matches the name."""
    return module == target or module.endswith(f".{target}") or re.fullmatch(target, module) is not None


def linear_modules(directory: Path) -> set[str]:
    """Return the last parts of the names of the model's linear modules, by its weight files, without a tied output
    head. Raises ``ModelDirectoryError``."""
    matrices = (
        name.split(".") for name, tensor in without_towers(stored_tensors(directory)).items() if len(tensor.shape) == 2
    )
    linear = {path[-2] for path in matrices if path[1:] and path[-1] == "weight" and not _NO_LINEAR.search(path[-2])}
    if "embed_out" in linear:
        linear.add("lm_head")  # the name that transformers gives the head of GPT-NeoX
    if read_model_config(directory).get("tie_word_embeddings"):
        linear.discard("lm_head")
    return linear


def unknown_modules(directory: Path, names: Sequence[str]) -> TextsByName:
    """Return those of ``names`` that are no linear module of the model by its weight files, with the reason and the
    remedy. The files do not tell which modules share a weight by the default of the model's class: the trainer refuses
    these."""
    linear = linear_modules(directory)
    remedy = f'name modules among {", ".join(sorted(linear))}, or ["all-linear"]'
    paths = [name.removesuffix(".weight") for name in stored_tensors(directory)]
    matching = {name for name in names if any(re.fullmatch(name, path) for path in paths)}
    unknown = [name for name in names if name.rpartition(".")[2] not in linear and name not in matching]
    problems = dict.fromkeys(unknown, f"is no linear module of this model: {remedy}")
    if "lm_head" in problems:
        tied = "shares its weight with the embedding, so it cannot have an adapter of its own"
        problems["lm_head"] = f"{tied}: {remedy}"
    return problems
