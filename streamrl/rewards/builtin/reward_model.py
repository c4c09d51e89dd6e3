"""The reward ``reward_model``: the score of a Hugging Face sequence classifier. Listed in ``catalog``.

Making the function checks the options and the model's directory; torch is imported with the model
(``classifier_scores``) when the first completion is scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamrl.pretrained.model_folder import read_bounded, unsafe_content
from streamrl.pretrained.weight_files import ModelDirectoryError, weight_files
from streamrl.rewards.builtin.reward_model_options import RewardModelOptions
from streamrl.rewards.declared import BadOption, BuiltinReward, RewardCallable, declare


def _reward_model(options: RewardModelOptions) -> RewardCallable:
    labels = _labels(Path(options.path))
    if options.label >= labels:
        raise BadOption(f'"label" = {options.label}: the model has {labels}, counted from 0')
    if options.label < 0 and labels > 1:
        raise BadOption(f'"label" is not set, and the model has {labels}: choose one, counted from 0')
    scorer = None

    async def reward_model(_completion: str, *, prompt: str, messages: Any = None) -> float:
        nonlocal scorer
        if scorer is None:
            from streamrl.rewards.builtin.classifier_scores import BatchedClassifier

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
    """Number of logits of the classifier in ``directory``. Raises ``BadOption`` where it has no loadable classifier."""
    place = f'"path" = "{directory}"'
    if unsafe := unsafe_content(directory):
        raise BadOption(f"{place} {unsafe}")
    try:
        config = json.loads(read_bounded(directory / "config.json").decode())
        architectures = list(config.get("architectures") or [])
        names = config.get("id2label")
        labels = len(names) if names else int(config.get("num_labels", 2))  # 2: default of transformers
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadOption(f"{place} is no Hugging Face directory ({error}): correct it") from error
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        names_in_config = ", ".join(architectures) or "none"
        raise BadOption(
            f"{place} has the architecture {names_in_config}: a reward model is a ...ForSequenceClassification"
        )
    try:
        weight_files(directory)
    except ModelDirectoryError as error:
        raise BadOption(f"{place} {error}") from error
    return labels


REWARD_MODEL = BuiltinReward(
    "reward_model", RewardModelOptions, _reward_model, needs={"torch": "torch", "transformers": "torch"}
)
