"""Composite models: a language model beside towers, which turn images or sound into its inputs. Its text part is
trained, and its towers are left as they are. Told from ``config.json`` and names of tensors, without torch.

``trainable_models`` and ``model_facts`` use it in the dry run, in engine processes and in trainer ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from streamrl.base.types import JsonMapping

COMPOSITE_CLASS = "ForConditionalGeneration"
"""End of the names of classes of such models. Encoder-decoders have it, too."""
_TOWERS = ("vision_config", "audio_config", "speech_config", "image_config", "video_config")
_OF_A_TOWER = re.compile(
    r"(model\.)?(visual|(vision|image|video|audio|speech)_\w+|embed_(vision|image|video|audio)|multi_modal_\w+|mm_\w+)\."
)

T = TypeVar("T")


def towers(config: JsonMapping) -> list[str]:
    """Return the keys of ``config.json`` that describe a tower; empty: the model takes text alone."""
    return [key for key in _TOWERS if isinstance(config.get(key), dict)]


def has_language_model(config: JsonMapping) -> bool:
    """Return whether a composite model has a language model: in ``text_config``, or among its own keys, as older
    configurations have it."""
    return isinstance(config.get("text_config"), dict) or bool(config.get("vocab_size") and config.get("hidden_size"))


def without_towers(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors, by name, that are no part of a tower or of a projection from one."""
    return {name: tensor for name, tensor in tensors.items() if not _OF_A_TOWER.match(name)}
