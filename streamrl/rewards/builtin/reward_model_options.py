"""Options of the reward ``reward_model``: ``reward_model`` checks them, ``classifier_scores`` runs the model."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from streamrl.recipe.field_types import Natural, Positive
from streamrl.recipe.sections import ComputeDtype
from streamrl.rewards.declared import Options


class RewardModelOptions(Options, frozen=True):
    """The score of prompt and completion by a sequence classifier.

    ``path``: a directory with ``config.json``, ``*.safetensors`` and a tokenizer; nothing of it is executed or
    downloaded. ``chat``: prompt and completion go through the tokenizer's chat template as user and assistant (the
    column ``messages``, where the prompt has it); false: the texts of both, joined. ``label``: index of the logit that
    counts, for a model with several (-1: the model has one); ``sigmoid``: sigmoid of the logit, 0 to 1.
    ``max_tokens``: longest text; a longer one is a failure and is not shortened. ``batch``: completions scored at once,
    at most; ``threads``: threads of torch on a CPU (0: torch's choice). ``device``: auto, cpu or cuda; ``dtype``: auto
    (bfloat16 on GPUs of compute capability 8.0 or more), float32 or bfloat16."""

    path: str
    chat: bool = True
    label: Annotated[int, Meta(ge=-1)] = -1
    sigmoid: bool = False
    max_tokens: Positive = 8192
    batch: Positive = 16
    threads: Natural = 1
    device: str = "auto"
    dtype: ComputeDtype = ComputeDtype.AUTO
