"""Losses of one's own, in one file: two papers that the catalog does not have.

In a recipe:

    [objective]
    function = "examples/custom_loss.py:gmpo"
    loss_normalization = "sequence_mean"

Try one first: streamrl objective test examples/custom_loss.py:gmpo

A loss gets what its parameters name, tensors with one entry for each sampled token, and returns the loss of each token.
Its other parameters are options: objective.advanced.options."""

from collections.abc import Callable

import torch
from torch import Tensor


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_mean: Callable[[Tensor], Tensor],
    clip: float = 0.4,
) -> tuple[Tensor, Tensor]:
    """GMPO (arXiv 2507.20673): the geometric mean of the ratios of a trajectory, each bounded by exp(clip) on the side
    to which its advantage pushes."""
    log_ratio = logprobs - old_logprobs
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=clip), log_ratio.clamp(min=-clip))
    return -sequence_mean(bounded).exp() * advantages, bounded != log_ratio


def binary_kl(
    logprobs: Tensor, old_logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float = 0.05, high: float = 0.05
) -> tuple[Tensor, Tensor]:
    """DPPO with a binary KL (arXiv 2602.04879): a token is left out where KL(old, new) of the choice between this token
    and all others is above a bound, and its advantage pushes on. The bounds differ by side."""
    new = logprobs.detach().exp()
    old = old_logprobs.exp()
    others = ((1 - old + 1e-8) / (1 - new + 1e-8)).log()
    divergence = old * (old_logprobs - logprobs.detach()) + (1 - old) * others
    too_high = (advantages > 0) & (new > old) & (divergence > high)
    too_low = (advantages < 0) & (new < old) & (divergence > low)
    out = too_high | too_low
    return torch.where(out, 0.0, -ratio * advantages), out


def largest_distance(rewards: Tensor) -> Tensor:
    """Advantages: how far each sibling is from the mean, in units of the largest distance. A recipe takes them by
    objective.advantages = "custom"."""
    apart = rewards - rewards.mean()
    return apart / apart.abs().max().clamp(min=1e-6)
