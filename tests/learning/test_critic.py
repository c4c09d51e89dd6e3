"""The value head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sample_groups import make_groups, train_batch  # noqa: E402

from streamrl.learning.objective.critic import ValueHead  # noqa: E402
from streamrl.learning.options import TrainerOptions  # noqa: E402
from streamrl.recipe.algorithms import objective_settings  # noqa: E402
from streamrl.recipe.objective import Algorithm, Objective  # noqa: E402

pytestmark = pytest.mark.torch


def test_values_are_float32_also_where_the_policy_computes_in_bfloat16() -> None:
    head = ValueHead(TrainerOptions(model_path="", run_id="", weights_endpoint=""), 8, torch.device("cpu"))
    with torch.no_grad():
        head.tensors()["critic.weight"].copy_(torch.linspace(0.9, 1.1, 8))
    hidden = torch.linspace(-1, 3, 24).reshape(3, 8)
    plain = head(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(hidden)
    assert values.dtype == torch.float32
    assert values.tolist() == plain.tolist()


def test_the_head_learns_what_every_sample_earns_at_the_rate_of_a_large_policy(
    start_trainer: Callable[..., Any],
) -> None:
    """20 steps at the policy's default rate of 1e-6. The squared error of V = 0 is 1, halved."""
    settings = objective_settings(Objective(algorithm=Algorithm.PPO))
    trainer = start_trainer(objective=settings, learning_rate=1e-6, warmup_steps=100, streaming=False)
    losses = []
    for step in range(20):
        groups = make_groups(step, [3, 2], seed=step, rewards=[[1.0] * 3, [1.0] * 2])
        losses.append(train_batch(trainer, groups, step + 1).metrics["optim/value_loss"])
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] < 0.4
