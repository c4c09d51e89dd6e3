"""Tiny random checkpoints of model families: class names, composite configurations with small towers, names and dtypes
of tensors, and tensors that no text model uses, as they are published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from streamrl.learning.families.family import Family, merged
from streamrl.learning.small_model.characters import Characters

CHARACTERS = "0123456789abcdefgh ,.:;=+->\n"
SPECIAL_TOKENS = (
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image_soft_token>", "<start_of_image>",
    "<end_of_image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>", "<image>", "<audio_soft_token>", "<start_of_audio>",
    "<end_of_audio>",
)  # fmt: skip
"""Tokens that stand for parts of images and sound, after the characters: a random policy samples them, too."""

_PARTS = ("text_config", "vision_config", "audio_config")


def write_tiny_checkpoint(family: Family, directory: Path, *, seed: int = 0) -> None:
    """Write a model of about 0.3 million parameters, with random weights, and its tokenizer of characters, to
    ``directory``, whose content is removed before. Equal seeds give equal files."""
    disable_progress_bar()
    shutil.rmtree(directory, ignore_errors=True)
    characters = Characters(CHARACTERS, 1024)
    tokenizer = characters.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    ids = tokenizer.get_vocab()
    model = _random_model(family, ids, seed)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    file = directory / "model.safetensors"
    save_file(_stored_tensors(family, load_file(file)), file, metadata={"format": "pt"})
    config_file = directory / "config.json"
    config = merged(json.loads(config_file.read_text()), family.published)
    for part in (config, *(config.get(name) for name in _PARTS)):
        if isinstance(part, dict) and "dtype" in part:
            part["dtype"] = "bfloat16"
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _random_model(family: Family, ids: Mapping[str, int], seed: int) -> PreTrainedModel:
    """Return a float32 model whose norms, biases and saved buffers have values of their own."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, family.model_class)
    model: PreTrainedModel = model_class(model_class.config_class(**_with_ids(family.config, ids))).float()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not name.endswith(("A_log", "dt_bias")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.state_dict().items():
            # The decays of lightning attention follow from its sizes: with others it would see tokens of the future.
            if name not in parameters and buffer.is_floating_point() and not name.endswith(("_decay", "_rate")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return model


def _with_ids(value: Any, ids: Mapping[str, int]) -> Any:
    """Return a configuration with the ids of special tokens in place of the tokens."""
    if isinstance(value, dict):
        return {key: _with_ids(inner, ids) for key, inner in value.items()}
    return ids.get(value, value) if isinstance(value, str) else value


def _stored_tensors(family: Family, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint in the dtypes in which they are published. ``saved``: tensors of the model,
    by their names in the checkpoint."""
    tensors = {n: t.mT if n.endswith(family.transposed) else t for n, t in saved.items()}
    for part, copy in family.copies:
        tensors |= {name.replace(part, copy): torch.randn(t.shape) for name, t in saved.items() if part in name}
    tensors |= {name: torch.randn(shape) for name, shape in family.extra.items()}
    return {
        name: tensor.to(torch.float32 if name.endswith(family.float32) else torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
    }
