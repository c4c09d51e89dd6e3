"""Kinds of a model's layers by its ``config.json``, without torch: how many layers there are, and which of them carry a
state from token to token instead of keys and values.

The dry run, engine processes and trainer ranks use it."""

from __future__ import annotations

from streamrl.base.types import JsonMapping

_LISTS = ("layer_types", "layers_block_type", "block_types", "block_configs", "hybrid_override_pattern")
"""Keys whose value has an entry for each layer."""
_HYBRID = (
    "full_attn_idxs", "attn_layer_indices", "attn_layer_period", "full_attention_interval", "hybrid_override_pattern",
    "attn_type_list", "linear_attn_config",
)  # fmt: skip
"""Keys that say which layers are attention, of models whose other layers carry a state."""


def listed_layers(config: JsonMapping) -> int | None:
    """Return the number of layers of a configuration that lists them; None: it does not."""
    lists = [config.get(name) for name in _LISTS]
    return next((len(layers) for layers in lists if isinstance(layers, list | str) and layers), None)


def recurrent_kinds(config: JsonMapping) -> list[str]:
    """Return the kinds of layers of a model (``read_model_config``) that carry a state from token to token, as the
    configuration names them; of one that has no names, the type of the model. Empty: all layers are attention."""
    kinds = {str(kind) for name in _LISTS[:3] if isinstance(config.get(name), list) for kind in config[name]}
    recurrent = sorted(kind for kind in kinds if is_recurrent(kind))
    has_heads = config.get("num_attention_heads") or config.get("n_head")
    if not kinds and (not has_heads or any(config.get(name) for name in _HYBRID)):
        return [str(config.get("model_type"))]
    return recurrent


def has_gated_delta_net(config: JsonMapping) -> bool:
    """Return whether a model (``read_model_config``) has layers of Gated DeltaNet, as Qwen3.5 and Qwen3-Next have."""
    return bool(config.get("linear_num_value_heads"))


def attention_layers(config: JsonMapping, layers: int) -> int:
    """Return how many of ``layers`` layers keep keys and values; all where the configuration does not list kinds."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        return layers
    return sum(not is_recurrent(str(kind)) for kind in kinds)


def windowed_layers(config: JsonMapping, layers: int) -> int:
    """Return how many of ``layers`` layers attend to a window or a chunk of tokens beside others that attend to all;
    0 where all layers are of one kind."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or "full_attention" not in kinds:
        return 0
    return sum(str(kind).startswith(("sliding", "chunked")) for kind in kinds)


def is_recurrent(kind: str) -> bool:
    """Return whether layers of a kind carry a state: all but those whose attention has keys of every token."""
    return "attention" not in kind or "linear" in kind
