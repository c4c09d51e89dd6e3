"""The value head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sample_groups import make_groups, master_values, train_batch  # noqa: E402

from streamrl.base.messages import SaveCheckpoint  # noqa: E402
from streamrl.learning.model.critic import Critic  # noqa: E402
from streamrl.learning.model.policy import empty_micro_batch  # noqa: E402
from streamrl.learning.options import TrainerOptions  # noqa: E402
from streamrl.recipe.objective import Objective, objective_settings  # noqa: E402
from streamrl.recipe.objectives.ppo import ValueModel  # noqa: E402

pytestmark = pytest.mark.torch


def test_values_are_float32_beside_bfloat16() -> None:
    """Values are float32, also where the policy computes in bfloat16."""
    head = Critic(TrainerOptions(model_path="", run_id="", weights_endpoint=""), 8, torch.device("cpu"))
    row = empty_micro_batch(torch.device("cpu"))
    with torch.no_grad():
        head.tensors()["critic.weight"].copy_(torch.linspace(0.9, 1.1, 8))
    hidden = torch.linspace(-1, 3, 24).reshape(3, 8)
    plain = head(row, hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(row, hidden)
    assert values.dtype == torch.float32
    assert values.tolist() == plain.tolist()


def test_the_head_learns_the_samples_return(start_trainer: Callable[..., Any]) -> None:
    """The value head learns the reward of every sample at the learning rate of a large policy. 20 steps at the policy's
    default rate of 1e-6. The squared error of V = 0 is 1, halved."""
    settings = objective_settings(Objective(algorithm="ppo"))
    trainer = start_trainer(objective=settings, learning_rate=1e-6, warmup_steps=100, streaming=False)
    losses = []
    for step in range(20):
        groups = make_groups(step, [3, 2], seed=step, rewards=[[1.0] * 3, [1.0] * 2])
        losses.append(train_batch(trainer, groups, step + 1).metrics["optim/value_loss"])
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] < 0.4


def test_a_separate_value_model_resumes(start_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """A separate value model is trained, and goes on from a checkpoint."""
    settings = objective_settings(Objective(algorithm="ppo", value_model=ValueModel.OWN))

    def train(trainer: Any, steps: range) -> tuple[list[float], dict[str, Any]]:
        rewards = [[0.0, 0.0], [1.0, 1.0]]
        batches = [make_groups(step, [2, 2], seed=step, rewards=rewards) for step in steps]
        reports = [train_batch(trainer, groups, step + 1) for step, groups in zip(steps, batches, strict=True)]
        trained = master_values(trainer) | {n: t.numpy() for n, t in trainer._updates.critic.tensors().items()}
        return [report.metrics["optim/value_loss"] for report in reports], {n: v.copy() for n, v in trained.items()}

    trainer = start_trainer(objective=settings, streaming=False)
    started = trainer._updates.critic.tensors()["critic.trunk.norm.weight"].numpy().copy()
    _, trained = train(trainer, range(4))
    assert (trained["critic.trunk.norm.weight"] != started).any()
    trainer.save_checkpoint(SaveCheckpoint(directory=str(tmp_path / "saved"), policy_version=4))
    losses, through = train(trainer, range(4, 6))
    resumed = start_trainer(objective=settings, streaming=False, resume_from=str(tmp_path / "saved"))
    losses_again, again = train(resumed, range(4, 6))
    assert losses_again == losses
    assert again.keys() == through.keys() and all((again[name] == value).all() for name, value in through.items())
