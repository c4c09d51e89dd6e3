"""``reward_model``: options of a reward from a Hugging Face sequence classifier. torch is imported with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from streamrl.base.model_folder import unsafe_content
from streamrl.recipe.fields import Natural, Positive
from streamrl.recipe.sections import ComputeDtype
from streamrl.rewards.builtin.declared import BadOption, BuiltinReward, Options, RewardCallable, declare


class RewardModelOptions(Options, frozen=True):
    """The score that a sequence classifier gives prompt and completion.

    ``path``: a directory with ``config.json``, ``*.safetensors`` and a tokenizer; nothing of it is executed or
    downloaded. ``chat``: prompt and completion go through the tokenizer's chat template as user and assistant (the
    column ``messages``, where the prompt has it); false: their texts, joined. ``label``: which logit counts, from 0,
    for a model with several (-1: it has one); ``sigmoid``: squeeze it into 0..1. ``max_tokens``: a longer text is a
    failure, not cut. ``batch``: completions scored at once, at most; ``threads``: of torch on a CPU (0: its own
    choice).
    ``device``: auto, cpu or cuda; ``dtype``: auto (bfloat16 on CUDA), float32 or bfloat16.
    """

    path: str
    chat: bool = True
    label: Annotated[int, Meta(ge=-1)] = -1
    sigmoid: bool = False
    max_tokens: Positive = 8192
    batch: Positive = 16
    threads: Natural = 1
    device: str = "auto"
    dtype: ComputeDtype = ComputeDtype.AUTO


def _reward_model(options: RewardModelOptions) -> RewardCallable:
    labels = _labels(Path(options.path))
    if options.label >= labels:
        raise BadOption(f'"label" = {options.label}: the model has {labels}, counted from 0')
    if options.label < 0 and labels > 1:
        raise BadOption(f'"label" is not set, and the model has {labels}: choose one, counted from 0')
    scorer: Any = None

    async def reward_model(_completion: str, *, prompt: str, messages: Any = None) -> float:
        nonlocal scorer
        if scorer is None:
            from streamrl.rewards.builtin.reward_model import BatchedClassifier

            scorer = BatchedClassifier(options)
        return float(await scorer.score(prompt, messages, _completion))

    async def aclose() -> None:
        nonlocal scorer
        if scorer is not None:
            scorer.close()
        scorer = None

    reward_model.aclose = aclose  # type: ignore[attr-defined]
    return declare(reward_model, optional=["messages"], provided=["prompt"])


def _labels(directory: Path) -> int:
    """Logits of the classifier in ``directory``. Raises ``BadOption`` when it holds none that can be loaded."""
    place = f'"path" = "{directory}"'
    if unsafe := unsafe_content(directory):
        raise BadOption(f"{place} {unsafe}")
    try:
        config = json.loads((directory / "config.json").read_text())
        architectures = list(config.get("architectures") or [])
        names = config.get("id2label")
        labels = len(names) if names else int(config.get("num_labels", 2))  # 2: what transformers takes
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadOption(f"{place} is no Hugging Face directory ({error}): correct it") from error
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        found = ", ".join(architectures) or "none"
        raise BadOption(f"{place} has the architecture {found}: a reward model is a ...ForSequenceClassification")
    if not any(directory.glob("*.safetensors")):
        raise BadOption(f"{place} has no .safetensors file: save the model again with save_pretrained()")
    return labels


REWARD_MODEL = BuiltinReward(
    "reward_model", RewardModelOptions, _reward_model, needs={"torch": "torch", "transformers": "torch"}
)
