"""Comparison of a checkpoint with a run that resumes from it, by what gives tensors their meaning and is no tensor: the
settings of adapters, and the model's ``config.json``. With other ones the same tensors are another policy.

``prepare.preflight`` compares them before a run that resumes is started, ``checkpoint`` when a trainer rank loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import json

from streamrl.base.types import JsonMapping, JsonObject
from streamrl.pretrained.model_facts import read_model_config
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.sections import Lora

ADAPTER = "adapter"
ADAPTER_CONFIG = "adapter_config.json"
_KEYS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
"""Keys of ``[lora]``, with the keys of peft for them."""
_WITHOUT_MEANING = re.compile(
    r"_.*|.*dtype|.*_token_id|.*dropout|architectures|auto_map|initializer_range|id2label|label2id|output_.*|"
    r"pretraining_tp|router_aux_loss_coef|text_config|transformers_version|use_cache"
)
"""Keys of ``config.json`` that change no logit, and ``text_config``, whose keys are read as those of the model."""
_OR_ITS_WEIGHTS = (
    "or begin with its weights alone: set model.path to the checkpoint's hf directory, and leave resume_from out"
)


def other_meanings(checkpoint: Path, lora: Lora, model_path: str) -> Iterator[str]:
    """Yield what a run with ``lora`` and the model in ``model_path`` has otherwise than the run that wrote
    ``checkpoint``, each as the key, both values and the remedy. What cannot be read is left to the reader of it."""
    try:
        saved = json.decode((checkpoint / ADAPTER / ADAPTER_CONFIG).read_bytes(), type=JsonObject)
    except (OSError, msgspec.MsgspecError):
        saved = {}
    if (checkpoint / "hf").is_dir():
        yield from _other_adapters(saved, lora)
    try:
        before = read_model_config(checkpoint / "hf")
        now = read_model_config(Path(model_path))
    except ModelDirectoryError:
        return
    for key in _differences(before, now):
        yield (
            f"model.path: its config.json has {key} = {_at(now, key)}, and the checkpoint was trained with "
            f"{_at(before, key)}: take the model of that run, {_OR_ITS_WEIGHTS}"
        )


def _other_adapters(saved: JsonMapping, lora: Lora) -> Iterator[str]:
    if not saved or not lora.rank:
        if saved:
            rank = saved["r"]
            yield f"lora.rank: 0, and the checkpoint has adapters of rank {rank}: set it to {rank}, {_OR_ITS_WEIGHTS}"
        elif lora.rank:
            text = "and the checkpoint has all weights and no adapters: set it to 0"
            yield f"lora.rank: {lora.rank}, {text}, {_OR_ITS_WEIGHTS}"
        return
    for key, name in _KEYS.items():
        value = getattr(lora, key)
        before = saved.get(name, False)
        if value != before:
            yield f"lora.{key}: {_text(value)}, and the checkpoint has {_text(before)}: keep it, {_OR_ITS_WEIGHTS}"


def _differences(before: JsonMapping, now: JsonMapping, path: str = "") -> Iterator[str]:
    for key in sorted({*before, *now}):
        values = before.get(key), now.get(key)
        if _WITHOUT_MEANING.fullmatch(key) or values[0] == values[1]:
            continue
        if isinstance(values[0], dict) and isinstance(values[1], dict):
            yield from _differences(values[0], values[1], f"{path}{key}.")
        else:
            yield f"{path}{key}"


def _at(config: JsonMapping, path: str) -> str:
    value: Any = config
    for key in path.split("."):
        value = value.get(key)
    return _text(value)


def _text(value: Any) -> str:
    return json.encode(value).decode()[:80]
