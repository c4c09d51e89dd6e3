"""Off-policy weights and masks against numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from streamrl.learning.objective.corrections import (  # noqa: E402
    Correction,
    off_policy_correction,
    proximal_logprobs,
    sequence_means,
    sequence_sums,
)
from streamrl.recipe.objective import Mask, OffPolicy, Proximal, RatioLevel  # noqa: E402

pytestmark = pytest.mark.torch

RATIOS = [0.5, 3.0, 4.0, 0.1, 0.9]
"""pi_proximal / pi_behavior: a sequence of two tokens (product 1.5), one of three (product 0.36)."""
SEQUENCES = [0, 0, 1, 1, 1]


def correct(staleness: list[int] | None = None, **options: Any) -> Correction:
    ratios = torch.tensor(RATIOS, dtype=torch.float64)
    behavior = torch.full_like(ratios, -1.0)
    return off_policy_correction(
        OffPolicy(**options),
        behavior + ratios.log(),
        behavior + ratios.log(),
        behavior,
        torch.tensor(staleness or [1] * 5),
        torch.tensor(SEQUENCES),
        2,
    )


@pytest.mark.parametrize(
    ("truncate", "cap", "weights"),
    [
        (RatioLevel.NONE, 0.1, [1, 1, 1, 1, 1]),
        (RatioLevel.TOKEN, 2.0, [0.5, 2, 2, 0.1, 0.9]),
        (RatioLevel.SEQUENCE, 2.0, [1.5, 1.5, 0.36, 0.36, 0.36]),
        (RatioLevel.SEQUENCE, 1.2, [1.2, 1.2, 0.36, 0.36, 0.36]),
        (RatioLevel.GEOMETRIC, 2.0, [1.5 ** (1 / 2)] * 2 + [0.36 ** (1 / 3)] * 3),
    ],
)
def test_weights_by_hand(truncate: RatioLevel, cap: float, weights: list[float]) -> None:
    found = correct(truncate=truncate, cap=cap)
    assert found.weight_N.tolist() == pytest.approx(weights, rel=1e-12)
    assert not found.masked_N.any()


@pytest.mark.parametrize(
    ("mask", "low", "high", "masked"),
    [
        (RatioLevel.TOKEN, 0.5, 3.5, [False, False, True, True, False]),
        (RatioLevel.TOKEN, 0.0, 3.5, [False, False, True, False, False]),
        (RatioLevel.SEQUENCE, 0.4, 2.0, [False, False, True, True, True]),
        (RatioLevel.SEQUENCE, 0.0, 1.4, [True, True, False, False, False]),
        (RatioLevel.GEOMETRIC, 0.4, 1.2, [True, True, False, False, False]),  # roots 1.22 and 0.71
    ],
)
def test_masks_by_hand(mask: RatioLevel, low: float, high: float, masked: list[bool]) -> None:
    # a hair outside the token at 0.5: log and exp round
    found = correct(truncate=RatioLevel.NONE, mask=mask, mask_low=low * (1 - 1e-12), mask_high=high)
    assert found.masked_N.tolist() == masked
    assert found.weight_N.tolist() == [0.0 if out else 1.0 for out in masked]


def test_published_methods() -> None:
    icepop = correct(truncate=RatioLevel.TOKEN, mask=RatioLevel.TOKEN, cap=3.5, mask_low=0.3, mask_high=3.5)
    assert icepop.weight_N.tolist() == pytest.approx([0.5, 3, 0, 0, 0.9])
    masked = correct(truncate=RatioLevel.SEQUENCE, mask=RatioLevel.SEQUENCE, cap=1.4, mask_low=0, mask_high=1.4)
    assert masked.weight_N.tolist() == pytest.approx([0, 0, 0.36, 0.36, 0.36])


@pytest.mark.parametrize("proximal", Proximal)
def test_icepop_masks_by_trainer_and_engine(proximal: Proximal) -> None:
    """Also at a staleness of 1, where the interpolated policy is the one that sampled; w weighs those within."""
    trainer = torch.tensor(RATIOS, dtype=torch.float64).log() - 1
    behavior, staleness = torch.full_like(trainer, -1.0), torch.tensor([0, 0, 1, 1, 2])
    shared = behavior, staleness
    own = proximal_logprobs(proximal, trainer, *shared)
    found = off_policy_correction(
        OffPolicy(mask=Mask.ICEPOP, mask_low=0.4), own, trainer, *shared, torch.tensor(SEQUENCES), 2
    )
    assert found.masked_N.tolist() == [False, False, False, True, False]
    weights = {
        Proximal.DECOUPLED: [0.5, 3, 4, 0, 0.9],
        Proximal.BEHAVIOR: [0.5, 3, 1, 0, 1],
        Proximal.INTERPOLATED: [0.5, 3, 1, 0, 0.9**0.5],
    }
    assert found.weight_N.tolist() == pytest.approx(weights[proximal])


def test_staleness_discount() -> None:
    found = correct([0, 1, 2, 3, 4], truncate=RatioLevel.NONE, staleness_discount=0.5)
    assert found.weight_N.tolist() == [1, 0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("level", [RatioLevel.TOKEN, RatioLevel.SEQUENCE, RatioLevel.GEOMETRIC])
def test_current_tokens_are_corrected_only_on_demand(level: RatioLevel) -> None:
    """Tokens of the trained version are corrected only where the recipe asks for it."""
    options = {"truncate": level, "cap": 0.5, "mask": level, "mask_low": 2.0, "mask_high": 3.0}
    fresh = correct([0] * 5, **options)
    assert fresh.weight_N.tolist() == [1.0] * 5
    assert not fresh.masked_N.any()
    assert correct([0] * 5, **options, correct_mismatch=True).masked_N.any()
    # the fresh sequence is left alone, the stale one is not
    mixed = correct([0, 0, 1, 1, 1], truncate=level, cap=2.0)
    stale = correct([1] * 5, truncate=level, cap=2.0)
    assert mixed.weight_N.tolist() == [1.0, 1.0, *stale.weight_N.tolist()[2:]]


def test_proximal_policies_by_hand() -> None:
    own, behavior = torch.tensor([-1.0] * 4, requires_grad=True), torch.tensor([-3.0] * 4)
    staleness = torch.tensor([0, 1, 2, 4])
    expected = {
        Proximal.DECOUPLED: [-1, -1, -1, -1],
        Proximal.BEHAVIOR: [-1, -3, -3, -3],
        # behaviour's share is 1, 1/2, 1/4 of the log
        Proximal.INTERPOLATED: [-1, -3, -2, -1.5],
    }
    for proximal, values in expected.items():
        found = proximal_logprobs(proximal, own, behavior, staleness)
        assert found.tolist() == values
        assert not found.requires_grad


def test_huge_differences_are_finite() -> None:
    for level in RatioLevel:
        for difference in (-1000.0, 1000.0):
            found = off_policy_correction(
                OffPolicy(truncate=level, cap=2.0, staleness_discount=0.9),
                torch.full((3,), difference),
                torch.full((3,), difference),
                torch.zeros(3),
                torch.ones(3, dtype=torch.int64),
                torch.tensor([0, 0, 1]),
                2,
            )
            limit = 1.0 if level is RatioLevel.NONE else (0.0 if difference < 0 else 2.0)
            assert found.weight_N.tolist() == pytest.approx([limit * 0.9] * 3)


def test_sums_of_sequences() -> None:
    values, index = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2])
    assert sequence_sums(values, index, 4).tolist() == [3, 0, 4, 0]
    assert sequence_means(values, index, 4).tolist() == [1.5, 0, 4, 0]
    nothing = torch.zeros(0, dtype=torch.int64)
    assert sequence_means(torch.zeros(0), nothing, 0).tolist() == []
    assert math.isfinite(sequence_means(torch.zeros(0), nothing, 1).item())
