"""Options of the reward ``reward_model``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from streamrl.recipe.fields import Natural, Positive
from streamrl.recipe.sections import ComputeDtype
from streamrl.rewards.declared import Options


class RewardModelOptions(Options, frozen=True):
    """The score that a sequence classifier gives prompt and completion.

    ``path``: a directory with ``config.json``, ``*.safetensors`` and a tokenizer; nothing of it is executed or
    downloaded. ``chat``: prompt and completion go through the tokenizer's chat template as user and assistant (the
    column ``messages``, where the prompt has it); false: their texts, joined. ``label``: which logit counts, from 0,
    for a model with several (-1: it has one); ``sigmoid``: squeeze it into 0..1. ``max_tokens``: a longer text is a
    failure, not cut. ``batch``: completions scored at once, at most; ``threads``: of torch on a CPU (0: its own
    choice).
    ``device``: auto, cpu or cuda; ``dtype``: auto (bfloat16 on CUDA), float32 or bfloat16."""

    path: str
    chat: bool = True
    label: Annotated[int, Meta(ge=-1)] = -1
    sigmoid: bool = False
    max_tokens: Positive = 8192
    batch: Positive = 16
    threads: Natural = 1
    device: str = "auto"
    dtype: ComputeDtype = ComputeDtype.AUTO
