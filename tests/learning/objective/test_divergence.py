"""The divergence of the policy from its teacher over the vocabulary."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from streamrl.learning.objective.divergence import divergence  # noqa: E402


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_value_and_gradient_are_those_of_the_definition(beta: float) -> None:
    """Both are the definition's by autograd in float64; near its limits it is the divergence divided by beta."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(7, 50, generator=generator, dtype=torch.float64)).requires_grad_()
    teacher = 3 * torch.randn(7, 50, generator=generator, dtype=torch.float64)
    policy, other = logits.log_softmax(-1), teacher.log_softmax(-1)
    mixture = (beta * other.exp() + (1 - beta) * policy.exp()).log()
    wanted = beta * (other.exp() * (other - mixture)).sum(-1) + (1 - beta) * (policy.exp() * (policy - mixture)).sum(-1)
    if beta in (0, 1):
        first, second = (policy, other) if beta else (other, policy)
        wanted = (first.exp() * (first - second)).sum(-1)
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)
    found = divergence(logits, teacher, beta)
    (gradient,) = torch.autograd.grad((weights * found).sum(), logits)
    (wanted_gradient,) = torch.autograd.grad((weights * wanted).sum(), logits)
    assert torch.allclose(found, wanted, rtol=1e-12)
    assert torch.allclose(gradient, wanted_gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equal_models_and_removed_tokens_have_no_gradient(beta: float) -> None:
    """A model is at distance 0 from itself, and a token that neither can sample counts for nothing."""
    logits = torch.tensor([[1.0, -2.0, torch.finfo(torch.float32).min], [60.0, -60.0, 0.0]], requires_grad=True)
    itself = divergence(logits, logits.detach().clone(), beta)
    assert itself.abs().max() < 1e-6
    other = torch.tensor([[0.5, 0.5, torch.finfo(torch.float32).min], [-60.0, 60.0, 0.0]])
    found = divergence(logits, other, beta)
    found.sum().backward()
    assert found.isfinite().all() and found.min() > 0
    assert logits.grad is not None and logits.grad.isfinite().all() and logits.grad[0, 2] == 0
