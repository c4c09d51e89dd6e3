"""transformers' own model, one unpadded sequence at a time, and what a trainer's optimizer saw: for comparison."""

from __future__ import annotations

from typing import Any

import torch
from sample_groups import train_batch

from streamrl.base.types import TrainingGroup


def reference_model(path: str, *, rounded: bool = True) -> Any:
    """transformers' own model with the published weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return model


def reference_logprobs(model: Any, sample: Any, temperature: float = 1.0) -> Any:
    """Logprobs of the trained tokens of one sample, alone, unpadded."""
    tokens = torch.tensor(list(sample.token_ids))
    logits = model(tokens[None]).logits[0, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return logprobs[torch.tensor(list(sample.loss_mask[1:])) != 0]


def stepped_gradient(trainer: Any, groups: list[TrainingGroup]) -> dict[str, Any]:
    """Gradient that the optimizer saw, by tensor, in float64."""
    seen: dict[str, Any] = {}

    step = trainer._updates.optimizer.step

    def keep(gradient_L: Any, learning_rate: float) -> None:
        shards = trainer._updates.weights.shards
        seen.update({s.name: gradient_L[s.place].double().view(s.shape).clone() for s in shards})
        step(gradient_L, learning_rate)

    trainer._updates.optimizer.step = keep
    train_batch(trainer, groups, trainer.policy_version + 1)
    trainer._updates.optimizer.step = step
    return seen


def relative_error(got: dict[str, Any], expected: dict[str, Any]) -> float:
    difference = sum(float((got[name] - expected[name]).square().sum()) for name in expected)
    return (difference / sum(float(value.square().sum()) for value in expected.values())) ** 0.5
