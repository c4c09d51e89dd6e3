"""Models that a run can train, recognised by ``config.json`` and the headers of the weights, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.pretrained.model_facts import ADAPTER_FILE, MERGED, read_model_config
from streamrl.pretrained.weight_files import ModelDirectoryError, StoredTensor, stored_tensors

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_OTHER_INPUTS = ("vision_config", "audio_config", "speech_config", "image_config", "video_config")
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|lm_head)\.weight")
_LAYER = re.compile(r"(.*\b(?:layers|h|blocks))\.(\d+)\.")
_NO_LINEAR = re.compile(r"embed|wte|wpe|norm")


def refuse_untrainable(directory: Path) -> None:
    """Raises ``ModelDirectoryError`` for a model of another kind than a causal language model of text, for quantised
    weights, and for weights and a configuration that are not of one model."""
    config = read_model_config(directory)
    if (directory / ADAPTER_FILE).exists():
        raise ModelDirectoryError(
            f"has {ADAPTER_FILE} beside config.json: transformers loads the base model that it names, vLLM the weights "
            f"of this folder: remove it if they are the whole model, or {MERGED}"
        )
    problem = other_kind(config) or quantised(config) or _misfit(config, stored_tensors(directory))
    if problem:
        raise ModelDirectoryError(problem)


def other_kind(config: Mapping[str, Any]) -> str:
    """Return why the model of ``config`` is no causal language model of text, and the remedy; empty: it may be one."""
    listed = config.get("architectures")
    classes = [str(one) for one in listed] if isinstance(listed, list) else []
    named = ", ".join(classes) or f"of the type {config.get('model_type')}"
    remedy = "only causal language models of text can be trained (...ForCausalLM)"
    if inputs := [key for key in _OTHER_INPUTS if isinstance(config.get(key), dict)]:
        return (
            f"is a {named}, which takes more than text ({', '.join(inputs)} in config.json): {remedy}; give a text "
            "model of this family, or save the language model of this one alone with its own config.json"
        )
    if config.get("is_encoder_decoder") or (classes and not any(name.endswith(_CAUSAL) for name in classes)):
        return f"is a {named}: {remedy}; give such a model"
    return ""


def quantised(config: Mapping[str, Any]) -> str:
    """Return why the weights of ``config`` are no plain ones; empty: they are."""
    method = config.get("quantization_config")
    if not method:
        return ""
    kind = method.get("quant_method", "unknown method") if isinstance(method, dict) else method
    return f"is quantised ({kind}): training needs plain weights; give the original model"


def _misfit(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    """Return why weights and configuration are not of one model, or the configuration not of any; empty: neither is
    seen."""
    vocabulary, padding, count = (config.get(key) for key in ("vocab_size", "pad_token_id", "num_hidden_layers"))
    remedy = "copy config.json and the weights of one save"
    for name, tensor in tensors.items():
        if _EMBEDDING.fullmatch(name) and vocabulary and len(tensor.shape) == 2 and tensor.shape[0] != vocabulary:
            return f"has {tensor.shape[0]} rows of {name}, and vocab_size = {vocabulary} in config.json: {remedy}"
    if isinstance(padding, int) and isinstance(vocabulary, int) and not -vocabulary <= padding < vocabulary:
        return (
            f"has pad_token_id = {padding} in config.json and {vocabulary} embeddings (0 to {vocabulary - 1}): resize "
            "the embeddings (resize_token_embeddings), or name another token"
        )
    layers: dict[str, set[int]] = {}
    for found in map(_LAYER.match, tensors):
        if found:
            layers.setdefault(found[1], set()).add(int(found[2]))
    most = max(layers.values(), key=len, default=set())
    extra = config.get("num_nextn_predict_layers") or 0
    if most and isinstance(count, int) and len(most) not in (count, count + extra):
        return f"has {len(most)} layers in its weights, and num_hidden_layers = {count} in config.json: {remedy}"
    return ""


def unknown_modules(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """List those of ``names`` that are no linear module of the model by its weight files, with the reason and the
    remedy. What the files cannot say (which modules share a weight by the class's own default) is left to the
    trainer."""
    config, tensors = read_model_config(directory), stored_tensors(directory)
    two = (
        name.removesuffix(".weight")
        for name, one in tensors.items()
        if name.endswith(".weight") and len(one.shape) == 2
    )
    linear = {name.rpartition(".")[2] for name in two} - {"lm_head" if config.get("tie_word_embeddings") else ""}
    linear |= {"lm_head"} if "embed_out" in linear else set()  # the name that transformers gives the head of GPT-NeoX
    linear = {name for name in linear if not _NO_LINEAR.search(name)}
    among = f'name modules among {", ".join(sorted(linear))}, or ["all-linear"]'
    tied = "shares its weight with the embedding, so it cannot have an adapter of its own"
    return {
        name: f"{tied if name == 'lm_head' else 'is no linear module of this model'}: {among}"
        for name in names
        if name.rpartition(".")[2] not in linear
    }
