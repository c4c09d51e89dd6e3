"""Logprobs and entropy of the processed distribution, and their gradients."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from streamrl.base.types import TokenDistribution as Settings  # noqa: E402
from streamrl.learning.objective.logprobs import removed_tokens, token_logprobs  # noqa: E402

pytestmark = pytest.mark.torch


def test_token_logprobs_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    assert float(logprobs) == pytest.approx(math.log(0.3), rel=1e-5)
    assert float(entropy) == pytest.approx(-sum(p * math.log(p) for p in (0.5, 0.3, 0.15, 0.05)), rel=1e-5)
    # temperature 0.5 squares the probabilities
    logprobs, _ = token_logprobs(logits, torch.tensor([1]), Settings(temperature=0.5))
    assert float(logprobs) == pytest.approx(math.log(0.09 / (0.25 + 0.09 + 0.0225 + 0.0025)), rel=1e-5)
    # top-p 0.7: ascending sums 0.05, 0.2 are <= 0.3 and go; 0.5 and 0.3 stay
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), Settings(top_p=0.7))
    assert float(logprobs) == pytest.approx(math.log(0.3 / 0.8), rel=1e-5)
    assert float(entropy) == pytest.approx(-sum(p * math.log(p) for p in (0.5 / 0.8, 0.3 / 0.8)), rel=1e-5)


def test_min_p_top_k_and_excluded_tokens_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    for cut in ({"top_k": 2}, {"min_p": 0.59}, {"min_p": 0.29, "top_k": 2}):
        logprobs, entropy = token_logprobs(logits, torch.tensor([1]), Settings(**cut))
        assert float(logprobs) == pytest.approx(math.log(0.3 / 0.8), rel=1e-5)
        assert float(entropy) == pytest.approx(-sum(p * math.log(p) for p in (0.5 / 0.8, 0.3 / 0.8)), rel=1e-5)
    early = torch.tensor([True, False])
    logprobs, _ = token_logprobs(logits.repeat(2, 1), torch.tensor([1, 1]), excluded=(early, [0, 3]))
    assert logprobs.tolist() == pytest.approx([math.log(0.3 / 0.45), math.log(0.3)], rel=1e-5)


def test_sampled_token_stays_in_the_nucleus() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert removed_tokens(logits, Settings(top_p=0.7)).tolist() == [[False, False, True, True]]
    logprobs, _ = token_logprobs(logits, torch.tensor([3]), Settings(top_p=0.7))
    assert float(logprobs) == pytest.approx(math.log(0.05 / 0.85), rel=1e-5)
    # 1 - p rounds to 1: the most likely token stays all the same
    assert removed_tokens(logits, Settings(top_p=1e-9)).tolist() == [[False, True, True, True]]


@pytest.mark.vllm
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (7, 0.9), (7, 1.0), (40, 0.9)])
def test_nucleus_is_that_of_vllm(top_k: int, top_p: float) -> None:
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    torch.manual_seed(0)
    logits = (torch.randn(500, 32) * 2).round(decimals=1)  # rounded: ties
    k = torch.full((500,), min(top_k, 32)) if top_k else None
    theirs = sampler.apply_top_k_top_p_pytorch(logits.clone(), k, torch.full((500,), top_p)).log_softmax(-1)
    targets = theirs.exp().multinomial(1)[:, 0]
    ours, _ = token_logprobs(logits, targets, Settings(top_p=top_p, top_k=top_k))
    # one token more or less in the nucleus would move a logprob by 1e-3 at least
    torch.testing.assert_close(ours, theirs.gather(1, targets[:, None])[:, 0], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.6)])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_gradient_equals_that_of_log_softmax(temperature: float, top_p: float, entropy_gradient: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 17, dtype=torch.float64) * 3
    targets = torch.randint(17, (40,))
    weights = torch.randn(2, 40, dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()

    settings = Settings(temperature=temperature, top_p=top_p)
    logprobs, entropy = token_logprobs(ours, targets, settings, entropy_gradient=entropy_gradient)
    assert entropy.requires_grad is entropy_gradient
    loss = (weights[0] * logprobs).sum()
    if entropy_gradient:
        loss = loss + (weights[1] * entropy).sum()
    loss.backward()

    keep = torch.ones_like(logits, dtype=torch.bool)
    if top_p < 1:
        keep = ~removed_tokens(logits / temperature, settings).scatter(-1, targets[:, None], False)
    expected = logits.new_zeros(())
    for row, target in enumerate(targets.tolist()):
        kept = (theirs[row] / temperature)[keep[row]].log_softmax(-1)
        row_entropy = -(kept.exp() * kept).sum()
        torch.testing.assert_close(entropy[row].detach(), row_entropy.detach())
        logprob = kept[int(keep[row, :target].sum())]
        torch.testing.assert_close(logprobs[row].detach(), logprob.detach())
        expected = expected + weights[0, row] * logprob + entropy_gradient * weights[1, row] * row_entropy
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_large_logits_and_no_rows_are_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e30, -1e30, 0.0]]).requires_grad_()
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 0, 0]), entropy_gradient=True)
    assert logprobs.tolist() == pytest.approx([-2e4, -math.log(3), 0.0])
    assert entropy.tolist() == pytest.approx([0.0, math.log(3), 0.0], abs=1e-3)
    (logprobs.sum() + entropy.sum()).backward()
    assert bool(torch.isfinite(logits.grad).all())
    nothing, _ = token_logprobs(
        torch.zeros(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.int64), Settings(top_p=0.5)
    )
    nothing.sum().backward()


def test_autocast_leaves_the_entropy_in_float32() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(20, 64), torch.arange(20)
    _, expected = token_logprobs(logits, targets)
    with torch.autocast("cpu", torch.bfloat16):
        _, found = token_logprobs(logits, targets)
    assert torch.equal(found, expected)
