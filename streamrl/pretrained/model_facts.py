"""Sizes of the model in a Hugging Face folder, read without torch, for the arithmetic about memory and time: in the dry
run (``prepare``), and in engine processes and trainer ranks while they load."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from streamrl.base.types import JsonMapping, JsonObject
from streamrl.pretrained.composites import without_towers
from streamrl.pretrained.layer_kinds import attention_layers, listed_layers
from streamrl.pretrained.model_folder import read_bounded, unsafe_content
from streamrl.pretrained.weight_files import LARGEST_SIZE, ModelDirectoryError, stored_tensors

# Other names of a size by the name that most configurations use, after transformers' attribute maps and vLLM.
_OTHER_NAMES = {
    "hidden_size": "n_embd d_model",
    "num_hidden_layers": "n_layer n_layers num_layers",
    "num_attention_heads": "n_head n_heads num_heads",
    "max_position_embeddings": "n_positions n_ctx max_seq_len max_sequence_length max_seq_length seq_length",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
LAYER = re.compile(r"(.*\b(?:layers|h|blocks))\.(\d+)\.")
EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|lm_head)\.weight")
_QUERY_NORM = "q_norm.weight"
_HEAD_NORM = re.compile(r"\b(q|k|query|key)_?(layer)?norm\b")
ADAPTER_FILE = "adapter_config.json"
MERGED = "merge the adapter into its base model (peft: merge_and_unload) and save that with save_pretrained"


class ModelFacts(Struct, frozen=True, kw_only=True):
    """Sizes of a model; of one with towers for images or sound those of its language model.

    ``parameters``: number of parameters;
    ``outside``: number of parameters outside of the layers;
    ``hidden``: width of the residual stream;
    ``inner``: width of a layer's MLP, summed over the experts that a token goes through;
    ``layers``: number of layers;
    ``vocabulary``: number of tokens;
    ``key_value_bytes``: bytes of a token's KV cache in float32, over all layers;
    ``queries``: width of a layer's queries, over all heads;
    ``norms``: number of norms of the residual stream in a layer;
    ``norms_heads``: whether queries and keys are normed;
    ``positions``: longest sequence in tokens (0: unknown);
    ``is_quantised``: whether its files have quantised weights."""

    parameters: int
    outside: int
    hidden: int
    inner: int
    layers: int
    vocabulary: int
    key_value_bytes: int
    queries: int
    norms: int
    norms_heads: bool
    positions: int = 0
    is_quantised: bool = False


class Experts(NamedTuple):
    """Sizes of a mixture of experts. ``layers``: layers of the model; ``experts``: experts of a layer; ``top_k``:
    experts that a token goes through in a layer."""

    layers: int
    experts: int
    top_k: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the expert numbers of one token, over all layers."""
        return self.layers * self.top_k * (1 if self.experts <= 256 else 2)


def experts_of(config: JsonMapping) -> Experts | None:
    """Read the sizes of the experts from ``config`` (``read_model_config``); None for a model without experts."""
    experts = _first_number(config, _EXPERTS)
    top_k = _first_number(config, _TOP_K)
    if experts <= 1 or not top_k:
        return None
    return Experts(config.get("num_hidden_layers") or 0, experts, top_k)


def _first_number(config: JsonMapping, names: Sequence[str]) -> int:
    """The first integer among the values of ``names``; 0: there is none."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)


def read_model_facts(directory: Path) -> ModelFacts:
    """Read the sizes from ``config.json`` and the headers of ``*.safetensors``. Raises ``ModelDirectoryError``."""
    if not directory.is_dir():
        raise ModelDirectoryError(
            "is not a directory: give a Hugging Face model directory, or a model of the Hub by its name (owner/name)"
        )
    config = read_model_config(directory)
    if unsafe := unsafe_content(directory):
        raise ModelDirectoryError(unsafe)
    tensors = without_towers(stored_tensors(directory))
    sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    parameters = sum(sizes.values())
    if not parameters:
        raise ModelDirectoryError("has safetensors files without a single parameter")
    hidden = _size(config, "hidden_size")
    heads = max(1, _size(config, "num_attention_heads"))
    head_size = _size(config, "head_dim") or hidden // heads
    key_value_heads = _size(config, "num_key_value_heads") or heads
    layers = _size(config, "num_hidden_layers") or stacked_layers(tensors)
    experts = experts_of(config)
    expert_inner = _size(config, "moe_intermediate_size") if experts else 0
    inner = expert_inner or _size(config, "intermediate_size")
    norms_heads = any(_HEAD_NORM.search(name) for name in tensors)
    of_first_layer = {
        name: tensor for name, tensor in tensors.items() if (layer := LAYER.match(name)) and layer[2] == "0"
    }
    norms = [
        name
        for name, tensor in of_first_layer.items()
        if tensor.shape == (hidden,) and name.endswith(".weight") and not _HEAD_NORM.search(name)
    ]
    return ModelFacts(
        parameters=parameters,
        outside=sum(size for name, size in sizes.items() if not LAYER.match(name)),
        hidden=hidden,
        inner=(inner or 4 * hidden) * (experts.top_k if experts else 1),
        layers=layers,
        vocabulary=_size(config, "vocab_size"),
        key_value_bytes=2 * attention_layers(config, layers) * key_value_heads * head_size * 4,
        queries=heads * head_size,
        norms=len(norms),
        norms_heads=norms_heads,
        positions=_size(config, "max_position_embeddings"),
        is_quantised="quantization_config" in config,
    )


def facts_of(path: str) -> ModelFacts | None:
    """Return the sizes of the model in a directory; None where there is none that can be read."""
    try:
        return read_model_facts(Path(path)) if path else None
    except ModelDirectoryError:
        return None


def stacked_layers(names: Iterable[str]) -> int:
    """Return the number of layers in the longest stack among the names of tensors."""
    stacks: dict[str, set[str]] = {}
    for layer in filter(None, map(LAYER.match, names)):
        stacks.setdefault(layer[1], set()).add(layer[2])
    return max(map(len, stacks.values()), default=0)


def _size(config: JsonObject, key: str) -> int:
    """A size of the configuration, the largest of a list with a size for each layer; 0: it is not set. Raises
    ``ModelDirectoryError``."""
    value = config.get(key) or 0
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(size, int) and 0 <= size <= LARGEST_SIZE for size in values):
        raise ModelDirectoryError(f"has a config.json with {key} = {value!r:.40}: it must be an integer")
    return int(max(values))


def read_model_config(directory: Path) -> JsonObject:
    """Read ``config.json``. The fields of its ``text_config``, but not the classes, replace those of the same name, and
    every size gets the name that most models use. A size that ``text_config`` leaves out, as the default of its class,
    is read from the weights. Raises ``ModelDirectoryError`` where the file is missing or no JSON object."""
    path = directory / "config.json"
    try:
        config = json.loads(read_bounded(path).decode())
    except FileNotFoundError:
        reason = "has no config.json: give the whole folder of a model"
        if any(directory.glob("*.gguf")):
            reason = "holds a GGUF file, which is not trained: give the model that it was made of"
        if (directory / ADAPTER_FILE).exists():
            reason = f"is an adapter and no model: {MERGED}"
        raise ModelDirectoryError(reason) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"has a config.json that cannot be read ({error}): copy it again") from error
    if not isinstance(config, dict) or not config:
        raise ModelDirectoryError("has a config.json that is not a JSON object, or empty: copy it again")
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = {**config, **text_config, "architectures": config.get("architectures")}
        if not config.get("vocab_size") and any(directory.glob("*.safetensors")):
            sizes = _sizes_in_weights(directory)
            config |= {name: size for name, size in sizes.items() if config.get(name) is None}
    for name, other_names in _OTHER_NAMES.items():
        values = [config[key] for key in (name, *other_names.split()) if config.get(key) is not None]
        config[name] = next(iter(values), None)
    config["num_hidden_layers"] = config["num_hidden_layers"] or listed_layers(config)
    return config


def _sizes_in_weights(directory: Path) -> dict[str, int]:
    """Return the sizes that shapes of tensors tell: those of the embeddings, and of heads whose queries are normed.
    Raises ``ModelDirectoryError``."""
    tensors = without_towers(stored_tensors(directory))
    sizes = {}
    for name, tensor in tensors.items():
        if EMBEDDING.fullmatch(name) and len(tensor.shape) == 2:
            sizes["vocab_size"], sizes["hidden_size"] = tensor.shape
        if "head_dim" in sizes or not name.endswith(_QUERY_NORM):
            continue
        sizes["head_dim"] = tensor.shape[0]
        attention = name.removesuffix(_QUERY_NORM)
        for size, projection in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
            matrix = tensors.get(f"{attention}{projection}.weight")
            if matrix is not None:
                sizes[size] = matrix.shape[0] // tensor.shape[0]
    return sizes
