"""What a Hugging Face directory says about its model, read without torch: sizes for the arithmetic before a start."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import msgspec

LARGEST_SAFETENSORS_HEADER = 100_000_000
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model. ``key_value_bytes``: KV cache of one token in float32, over all layers."""

    parameters: int
    weight_bytes: int
    hidden: int
    layers: int
    vocabulary: int
    max_position: int
    key_value_bytes: int


class ModelDirectoryError(ValueError):
    """The directory is not a model that can be read; the message says what is missing."""


def read_model_facts(directory: Path) -> ModelFacts:
    """Sizes from ``config.json`` and the headers of ``*.safetensors``. Raises ``ModelDirectoryError``."""
    config = _read_config(directory)
    parameters, weight_bytes = _count_weights(directory)
    hidden = int(config.get("hidden_size", 0))
    heads = max(1, int(config.get("num_attention_heads", 1)))
    head_size = int(config.get("head_dim") or hidden // heads)
    key_value_heads = int(config.get("num_key_value_heads") or heads)
    layers = int(config.get("num_hidden_layers", 0))
    return ModelFacts(
        parameters=parameters,
        weight_bytes=weight_bytes,
        hidden=hidden,
        layers=layers,
        vocabulary=int(config.get("vocab_size", 0)),
        max_position=int(config.get("max_position_embeddings", 0)),
        key_value_bytes=2 * layers * key_value_heads * head_size * 4,
    )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelDirectoryError("has no config.json") from None
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"has a config.json that cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelDirectoryError("has a config.json that is not a JSON object")
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def _count_weights(directory: Path) -> tuple[int, int]:
    """(parameters, bytes) of every safetensors file in ``directory``."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        if any(directory.glob("*.bin")):
            raise ModelDirectoryError("has weights only as .bin pickles: save it again with safe_serialization=True")
        raise ModelDirectoryError("has no *.safetensors weights")
    parameters = weight_bytes = 0
    for file in files:
        for entry in read_safetensors_header(file).values():
            count = math.prod(entry["shape"])
            parameters += count
            weight_bytes += count * _BYTES.get(entry["dtype"], 1)
    if parameters == 0:
        raise ModelDirectoryError("has safetensors files without a single parameter")
    return parameters, weight_bytes


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """The tensor table of one safetensors file: name to dtype, shape and offsets. The tensors are not read.

    Raises ``ModelDirectoryError``, also for a file that ends before its tensors do.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > LARGEST_SAFETENSORS_HEADER:
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(stream.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if file.stat().st_size < 8 + length + end:
            raise ValueError(f"it is cut: {file.stat().st_size} bytes of {8 + length + end}")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ModelDirectoryError(f"has a broken {file.name}: {error}") from error
    header.pop("__metadata__", None)
    return dict(header)
