"""Advantages and losses against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from streamrl.config.recipe import AdvantageNormalization, LossNormalization  # noqa: E402
from streamrl.learning.advantages import group_advantages  # noqa: E402
from streamrl.learning.losses import (  # noqa: E402
    grpo_loss,
    loss_denominator,
    nucleus_mask,
    token_logprobs,
    token_weight,
)

pytestmark = pytest.mark.torch


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    # mean 0.25, unbiased variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25, standard deviation 0.5
    expected = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    assert group_advantages(rewards, AdvantageNormalization.STD).tolist() == pytest.approx(expected, rel=1e-6)
    assert group_advantages(rewards, AdvantageNormalization.NONE).tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("normalization", list(AdvantageNormalization))
@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [1 / 3] * 7])
def test_no_signal_is_exactly_zero(rewards: list[float], normalization: AdvantageNormalization) -> None:
    assert group_advantages(torch.tensor(rewards, dtype=torch.float64), normalization).tolist() == [0.0] * len(rewards)


def _loss(
    logprob: float, behavior: float, advantage: float, *, on_policy: bool = False, cap: float = 2.0
) -> tuple[float, float, bool]:
    """Loss, gradient with respect to the logprob, clipped; for one token."""
    logprobs = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    result = grpo_loss(
        logprobs,
        torch.tensor([behavior], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([on_policy]),
        clip_low=0.2,
        clip_high=0.28,
        importance_cap=cap,
    )
    result.loss_N.sum().backward()
    assert logprobs.grad is not None
    return float(result.loss_N.detach()), float(logprobs.grad), bool(result.clipped_N)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, False),  # inside the clip: -r A, gradient -r A
        (1.5, 2.0, -2.56, 0.0, True),  # above 1 + 0.28 with A > 0: -(1.28) A, no gradient
        (0.5, 2.0, -1.0, -1.0, False),  # below, A > 0: the minimum is the plain term
        (0.5, -2.0, 1.6, 0.0, True),  # below 1 - 0.2 with A < 0: clipped
        (1.5, -2.0, 3.0, 3.0, False),  # above, A < 0: the plain term
        (5.0, -2.0, 4.0, 4.0, False),  # the same beyond the cap of 2: the weight is 2
        (math.exp(200), -2.0, 4.0, 4.0, False),  # no overflow
    ],
)
def test_grpo_loss_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    got = _loss(-1.0, -1.0 - math.log(ratio), advantage)
    assert got[:2] == pytest.approx((loss, gradient), rel=1e-9)
    assert got[2] is clipped


def test_on_policy_token_is_never_clipped() -> None:
    loss, gradient, clipped = _loss(-1.0, -9.0, 2.0, on_policy=True)
    assert (loss, gradient, clipped) == (-2.0, -2.0, False)


def test_normalisations_by_hand() -> None:
    # two samples of 1 and 3 trained tokens, every token loss 1, max_tokens 10
    for normalization, expected in [
        (LossNormalization.TOKEN_MEAN, 4 / 4),
        (LossNormalization.SEQUENCE_MEAN, (1 / 1 + 3 / 3) / 2),
        (LossNormalization.CONSTANT, 4 / 20),
    ]:
        total = token_weight(normalization, 1) * 1 + token_weight(normalization, 3) * 3
        assert total / loss_denominator(normalization, samples=2, trained_tokens=4, max_tokens=10) == expected


def test_token_logprobs_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    assert float(logprobs) == pytest.approx(math.log(0.3), rel=1e-5)
    assert float(entropy) == pytest.approx(-sum(p * math.log(p) for p in (0.5, 0.3, 0.15, 0.05)), rel=1e-5)
    # temperature 0.5 squares the probabilities
    logprobs, _ = token_logprobs(logits, torch.tensor([1]), temperature=0.5)
    assert float(logprobs) == pytest.approx(math.log(0.09 / (0.25 + 0.09 + 0.0225 + 0.0025)), rel=1e-5)
    # top-p 0.7: ascending sums 0.05, 0.2 are <= 0.3 and go; 0.5 stays
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), top_p=0.7)
    assert float(logprobs) == pytest.approx(math.log(0.3 / 0.8), rel=1e-5)
    assert math.isfinite(float(entropy))


def test_sampled_token_stays_in_the_nucleus() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert nucleus_mask(logits, 0.7, torch.tensor([0])).tolist() == [[False, False, True, True]]
    assert nucleus_mask(logits, 0.7, torch.tensor([3])).tolist() == [[False, False, True, False]]


@pytest.mark.vllm
def test_nucleus_is_that_of_vllm() -> None:
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    torch.manual_seed(0)
    logits = (torch.randn(500, 32) * 2).round(decimals=1)  # rounded: ties
    theirs = sampler.apply_top_k_top_p_pytorch(logits.clone(), None, torch.full((500,), 0.9)).log_softmax(-1)
    targets = theirs.exp().multinomial(1)[:, 0]
    ours, _ = token_logprobs(logits, targets, top_p=0.9)
    assert torch.equal(ours, theirs.gather(1, targets[:, None])[:, 0])


def test_gradient_through_the_nucleus_is_finite() -> None:
    logits = torch.randn(20, 32, requires_grad=True)
    logprobs, _ = token_logprobs(logits, logits.argmax(-1), temperature=0.7, top_p=0.5)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())
