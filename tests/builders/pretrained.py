"""Folders of models and tokenizers that are small and can be read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def tokenizer_json(special: Sequence[str], characters: Iterable[str], *, bos: int | None = None) -> dict[str, Any]:
    """A token for each character, special ones first; text begins with the token ``bos`` where there is one."""
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    processor = None
    if bos is not None:
        start = {"SpecialToken": {"id": special[bos], "type_id": 0}}
        processor = {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {special[bos]: {"id": special[bos], "ids": [bos], "tokens": [special[bos]]}},
        }
    vocabulary = {content: index for index, content in enumerate((*special, *characters))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": content, **flags} for index, content in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        "post_processor": processor,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }


def write_tokenizer(directory: Path, tokenizer: dict[str, Any], eos: int = 1) -> Path:
    """A model directory of a tokenizer and the token that ends a completion."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    return directory


def folder_of_shapes(directory: Path, config: dict[str, Any]) -> Path:
    """A model directory of ``config`` with the headers of its real shapes in bfloat16, and a file of holes."""
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    header, place = {}, 0
    for name, parameter in model.named_parameters():  # a tied head is there once
        end = place + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [place, end]}
        place = end
    written = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + place)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


MODEL_CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 12,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


def write_model(directory: Path) -> None:
    """A model directory that can be read, with one tensor of 12 x 8 in bfloat16 and a tokenizer of ten digits."""
    import tokenizers

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL_CONFIG))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [12, 8], "data_offsets": [0, 192]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(192))
    words = tokenizers.models.WordLevel({str(digit): digit for digit in range(10)}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
