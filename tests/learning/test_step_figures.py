"""Figures of a step: the change of the policy, by which tracked baselines forget, and the tail of the mismatch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from learning.sample_groups import make_groups, train_batch

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Baseline, TrainingGroup, float_array
from streamrl.recipe.objective import Objective, objective_settings

torch = pytest.importorskip("torch")
from streamrl.learning.batches.scoring import score_samples  # noqa: E402

pytestmark = pytest.mark.torch
SPO = objective_settings(Objective(algorithm="spo"))


def tracked(groups: list[TrainingGroup]) -> list[TrainingGroup]:
    """``groups`` with a baseline for each prompt."""
    baseline = Baseline(total=0.5, weight=2.0, deviation=1.0)
    return [msgspec.structs.replace(group, baseline=baseline) for group in groups]


def logprobs_of(trainer: Any, groups: list[TrainingGroup]) -> np.ndarray:
    """Logprobs of the trained tokens under the trainer's present weights."""
    samples = [sample for group in groups for sample in group.samples]
    scores = score_samples(
        samples, trainer._updates.policy, trainer._options, torch.device("cpu"),
        reference=None, critic=None, proximal=True, together=False,
    )  # fmt: skip
    return np.concatenate([scores[sample.id].proximal for sample in samples])


@pytest.mark.parametrize("options", [{}, {"epochs_per_batch": 2}, {"gathered": "layer"}], ids=str)
def test_it_is_the_mean_change_of_logprobs(start_trainer: Callable[..., Any], options: dict[str, Any]) -> None:
    """Groups of one, all in one row: over all steps on the batch, from before the first one."""
    groups = tracked(make_groups(0, [1, 1, 1, 1]))
    streaming = "epochs_per_batch" not in options
    trainer = start_trainer(objective=SPO, micro_batch_tokens=2048, streaming=streaming, **options)
    before = logprobs_of(trainer, groups)
    report = train_batch(trainer, groups, 1)
    expected = np.abs(logprobs_of(trainer, groups) - before).mean()
    assert expected > 1e-3
    assert report.metrics["policy/step_change"] == pytest.approx(expected, rel=1e-4)


def test_other_objectives_do_not_measure_it(start_trainer: Callable[..., Any]) -> None:
    """It costs a forward of a row; and a group without a baseline is refused."""
    trainer = start_trainer()
    assert "policy/step_change" not in train_batch(trainer, make_groups(0, [2, 2]), 1).metrics
    trainer = start_trainer(objective=SPO)
    with pytest.raises(StreamRLError, match="group 0 has no baseline of its prompt"):
        train_batch(trainer, make_groups(0, [2, 2]), 1)


def test_tokens_far_below_the_engine_are_counted(start_trainer: Callable[..., Any]) -> None:
    """Of tokens that the trained version sampled, those that the trainer finds less than 1 / e as likely, and none that
    is more likely for the trainer."""
    groups = make_groups(0, [2, 2])
    trainer = start_trainer(micro_batch_tokens=2048)
    logprobs = iter(logprobs_of(trainer, groups).tolist())
    shifts = itertools.cycle([0.0, 0.9, 1.1, -3.0])
    shifted = []
    far = 0
    tokens = 0
    for group in groups:
        samples = []
        for sample in group.samples:
            behavior = float_array([])
            for trained in sample.loss_mask:
                shift = next(shifts) if trained else 0.0
                behavior.append(next(logprobs) + shift if trained else 0.0)
                far += shift > 1
            tokens += sample.trained_tokens
            samples.append(msgspec.structs.replace(sample, behavior_logprobs=behavior))
        shifted.append(msgspec.structs.replace(group, samples=tuple(samples)))
    metrics = train_batch(trainer, shifted, 1).metrics
    assert metrics["policy/mismatch_below_ratio"] == pytest.approx(far / tokens)
