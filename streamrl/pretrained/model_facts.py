"""Facts about the model in a Hugging Face directory, read without torch: sizes for the arithmetic before a start."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Annotated, Any

import msgspec

from streamrl.base.errors import UNDECODABLE
from streamrl.pretrained.model_folder import unsafe_content

LARGEST_SAFETENSORS_HEADER = 100_000_000
MOST_TENSORS = 100_000
_LARGEST_SIZE = 1 << 40


# By the name that most configurations use: other names of the same size, by transformers' attribute maps and vLLM.
_OTHER_NAMES = {
    "hidden_size": "n_embd d_model",
    "num_hidden_layers": "n_layer n_layers num_layers",
    "num_attention_heads": "n_head n_heads num_heads",
    "max_position_embeddings": "n_positions n_ctx max_seq_len max_sequence_length max_seq_length seq_length",
}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model. ``key_value_bytes``: KV cache of one token in float32, over all layers."""

    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    max_position: int
    key_value_bytes: int


Side = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST_SIZE)]


class _TensorEntry(msgspec.Struct, frozen=True):
    """A safetensors header's entry for one tensor."""

    dtype: str
    shape: Annotated[tuple[Side, ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[Side, Side]

    @property
    def end(self) -> int:
        """Raises ``ValueError`` where it lies before the beginning."""
        start, end = self.data_offsets
        if end < start:
            raise ValueError(f"a tensor from byte {start} to {end}")
        return end


class ModelDirectoryError(ValueError):
    """The directory is not a model that can be read; the message says what is missing."""


def read_model_facts(directory: Path) -> ModelFacts:
    """Sizes from ``config.json`` and the headers of ``*.safetensors``. Raises ``ModelDirectoryError``."""
    if not directory.is_dir():
        raise ModelDirectoryError(
            "is not a directory: give a Hugging Face model directory (streamrl downloads nothing; `hf download NAME "
            "--local-dir DIR` makes one)"
        )
    if unsafe := unsafe_content(directory):
        raise ModelDirectoryError(unsafe)
    config = read_model_config(directory)
    parameters = _count_parameters(directory)
    hidden = _size(config, "hidden_size")
    heads = max(1, _size(config, "num_attention_heads"))
    head_size = _size(config, "head_dim") or hidden // heads
    key_value_heads = _size(config, "num_key_value_heads") or heads
    layers = _size(config, "num_hidden_layers")
    return ModelFacts(
        parameters=parameters,
        hidden=hidden,
        layers=layers,
        vocabulary=_size(config, "vocab_size"),
        max_position=_size(config, "max_position_embeddings"),
        key_value_bytes=2 * layers * key_value_heads * head_size * 4,
    )


def _size(config: dict[str, Any], key: str) -> int:
    """A size that the configuration names; 0 where it does not."""
    value = config.get(key) or 0
    if not isinstance(value, int) or not 0 <= value <= _LARGEST_SIZE:
        raise ModelDirectoryError(f"has a config.json with {key} = {value!r:.40}: it must be an integer")
    return int(value)


def read_model_config(directory: Path) -> dict[str, Any]:
    """``config.json``, with the fields of its text model on top, and every size under the name that most models give
    it. Raises ``ModelDirectoryError`` where the file is missing or no JSON object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelDirectoryError("has no config.json") from None
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


def _count_parameters(directory: Path) -> int:
    """Count the parameters in all safetensors files of ``directory``."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelDirectoryError("has no *.safetensors weights")
    parameters: int = sum(math.prod(one["shape"]) for file in files for one in read_safetensors_header(file).values())
    if parameters == 0:
        raise ModelDirectoryError("has safetensors files without a single parameter")
    return parameters


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """The tensor table of one safetensors file: name to dtype, shape and offsets. The tensors are not read.

    Raises ``ModelDirectoryError``, also for a file that ends before its tensors do.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(LARGEST_SAFETENSORS_HEADER, size - 8):
                raise ValueError(f"its header claims {length} bytes of {size}")
            header = msgspec.json.decode(stream.read(length), type=dict[str, Any])
        header.pop("__metadata__", None)
        if len(header) > MOST_TENSORS:
            raise ValueError(f"{len(header)} tensors, at most {MOST_TENSORS}")
        end = max((msgspec.convert(entry, _TensorEntry).end for entry in header.values()), default=0)
        if size < 8 + length + end:
            raise ValueError(f"it is cut: {size} bytes of {8 + length + end}")
    except (OSError, struct.error, *UNDECODABLE) as error:
        raise ModelDirectoryError(f"has a broken {file.name}: {error}") from error
    return header
