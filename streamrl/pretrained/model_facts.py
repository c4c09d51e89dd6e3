"""Facts about the model in a Hugging Face directory, read without torch: sizes for the arithmetic before a start."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamrl.pretrained.model_folder import read_bounded, unsafe_content
from streamrl.pretrained.weight_files import LARGEST_SIZE, ModelDirectoryError, stored_tensors

# By the name that most configurations use: other names of the same size, by transformers' attribute maps and vLLM.
_OTHER_NAMES = {
    "hidden_size": "n_embd d_model",
    "num_hidden_layers": "n_layer n_layers num_layers",
    "num_attention_heads": "n_head n_heads num_heads",
    "max_position_embeddings": "n_positions n_ctx max_seq_len max_sequence_length max_seq_length seq_length",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
LAYER = re.compile(r"(.*\b(?:layers|h|blocks))\.(\d+)\.")
ADAPTER_FILE = "adapter_config.json"
MERGED = "merge the adapter into its base model (peft: merge_and_unload) and save that with save_pretrained"


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model. ``outside``: parameters outside of its layers. ``inner``: width of a layer's network,
    of all experts that a token goes through. ``key_value_bytes``: KV cache of a token in float32, over all layers."""

    parameters: int
    outside: int
    hidden: int
    inner: int
    layers: int
    vocabulary: int
    key_value_bytes: int


class Experts(NamedTuple):
    """Sizes of a mixture of experts: layers of the model, experts of one, and those that a token goes through."""

    layers: int
    experts: int
    top_k: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the experts of one token."""
        return self.layers * self.top_k * (1 if self.experts <= 256 else 2)


def experts_of(config: Mapping[str, Any]) -> Experts | None:
    """Sizes that a model's ``config.json`` names (``read_model_config``); None for a model without experts."""
    experts, top_k = (
        next((value for name in names if isinstance(value := config.get(name), int)), 0) for names in (_EXPERTS, _TOP_K)
    )
    return Experts(config.get("num_hidden_layers") or 0, experts, top_k) if experts > 1 and top_k else None


def read_model_facts(directory: Path) -> ModelFacts:
    """Sizes from ``config.json`` and the headers of ``*.safetensors``. Raises ``ModelDirectoryError``."""
    if not directory.is_dir():
        raise ModelDirectoryError(
            "is not a directory: give a Hugging Face model directory, or a model of the Hub by its name (owner/name)"
        )
    if unsafe := unsafe_content(directory):
        raise ModelDirectoryError(unsafe)
    config = read_model_config(directory)
    sizes = {name: math.prod(tensor.shape) for name, tensor in stored_tensors(directory).items()}
    if not (parameters := sum(sizes.values())):
        raise ModelDirectoryError("has safetensors files without a single parameter")
    hidden = _size(config, "hidden_size")
    heads = max(1, _size(config, "num_attention_heads"))
    head_size = _size(config, "head_dim") or hidden // heads
    key_value_heads = _size(config, "num_key_value_heads") or heads
    layers = _size(config, "num_hidden_layers")
    experts = experts_of(config)
    inner = (_size(config, "moe_intermediate_size") if experts else 0) or _size(config, "intermediate_size")
    return ModelFacts(
        parameters=parameters,
        outside=sum(size for name, size in sizes.items() if not LAYER.match(name)),
        hidden=hidden,
        inner=(inner or 4 * hidden) * (experts.top_k if experts else 1),
        layers=layers,
        vocabulary=_size(config, "vocab_size"),
        key_value_bytes=2 * layers * key_value_heads * head_size * 4,
    )


def _size(config: dict[str, Any], key: str) -> int:
    """A size that the configuration names, the largest where it names one for each layer; 0 where it does not."""
    value = config.get(key) or 0
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and 0 <= one <= LARGEST_SIZE for one in values):
        raise ModelDirectoryError(f"has a config.json with {key} = {value!r:.40}: it must be an integer")
    return int(max(values))


def read_model_config(directory: Path) -> dict[str, Any]:
    """``config.json``, with the fields of its text model on top, and every size under the name that most models give
    it. Raises ``ModelDirectoryError`` where the file is missing or no JSON object."""
    path = directory / "config.json"
    try:
        config = json.loads(read_bounded(path).decode())
    except FileNotFoundError:
        adapter = (directory / ADAPTER_FILE).exists()
        raise ModelDirectoryError(
            f"is an adapter and no model: {MERGED}" if adapter else "has no config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"has a config.json that cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelDirectoryError("has a config.json that is not a JSON object")
    text = config.get("text_config")
    config |= text if isinstance(text, dict) else {}
    for name, others in _OTHER_NAMES.items():
        known = [config[key] for key in (name, *others.split()) if config.get(key) is not None]
        config[name] = next(iter(known), None)
    return config
