"""The objective: pure functions of tensors.

Shapes: ``N`` trained tokens, ``D`` hidden width, ``V`` vocabulary. A batch's loss is
``sum over tokens of (token weight * token loss) / denominator``: the numerator can be accumulated while groups arrive,
the denominator is known when the batch is closed. That is what makes streaming training exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.config.recipe import LossNormalization


def nucleus_mask(logits_NV: Tensor, top_p: float, targets_N: Tensor) -> Tensor:
    """True where vLLM's top-p sampler removes a token. Bool [N, V].

    Repeats ``apply_top_k_top_p_pytorch`` of vLLM 0.32 operation for operation in float32 (ascending sort, softmax,
    cumulative sum, ``<= 1 - p``, the last one always kept), so that equal logits give an equal nucleus. Of tied tokens
    at the edge either may be cut; both weigh the same, so the renormalised rest does not depend on which. Logits that
    differ in the last bits can move a token at the very edge. The sampled token was inside by construction, so it is
    kept in any case: its logprob stays finite.
    """
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=False)
    cumulative_NV = torch.cumsum(sorted_NV.softmax(dim=-1), dim=-1)
    threshold = 1 - torch.tensor(top_p, dtype=torch.float32, device=logits_NV.device)
    removed_NV = cumulative_NV <= threshold
    removed_NV[:, -1] = False
    mask_NV = torch.zeros_like(removed_NV).scatter_(-1, order_NV, removed_NV)
    return mask_NV.scatter_(-1, targets_N[:, None], False)


def token_logprobs(
    logits_NV: Tensor, targets_N: Tensor, *, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprobs of the targets under the processed distribution, and its entropy. Float32 [N] and [N] (no gradient).

    Processed as the engine does it: divide by the temperature, cut the nucleus, renormalise.
    """
    scaled_NV = logits_NV.float()
    if temperature != 1.0:
        scaled_NV = scaled_NV / temperature
    if top_p < 1.0:
        scaled_NV = scaled_NV.masked_fill(nucleus_mask(scaled_NV.detach(), top_p, targets_N), -torch.inf)
    logprobs_NV = scaled_NV.log_softmax(dim=-1)
    with torch.no_grad():
        entropy_N = torch.special.entr(logprobs_NV.exp()).sum(-1)
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0], entropy_N


class PolicyLoss(NamedTuple):
    """``loss_N``: un-weighted loss of each token. ``clipped_N``: True where the clip removed its gradient."""

    loss_N: Tensor
    clipped_N: Tensor


def grpo_loss(
    logprobs_N: Tensor,
    behavior_N: Tensor,
    advantages_N: Tensor,
    on_policy_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> PolicyLoss:
    """GRPO's clipped surrogate for each token.

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprob - behavior)``, after PPO
    (https://arxiv.org/abs/1707.06347), GRPO (https://arxiv.org/abs/2402.03300) and, for unequal clips, DAPO
    (https://arxiv.org/abs/2503.14476). A token sampled by the very policy that is differentiated (``on_policy_N``) has
    r = 1 by construction, so that rounding between engine and trainer clips nothing. The weight r is truncated at
    ``importance_cap`` (truncated importance sampling, https://fengyao.notion.site/off-policy-rl): its gradient is
    ``min(r, cap) A grad logprob``. Without it a token with a negative advantage has no bound.
    """
    proximal_N = torch.where(on_policy_N, logprobs_N.detach(), behavior_N)
    # Capped in log space: exp of a large difference would be inf, and inf * 0 a NaN gradient.
    weight_N = (logprobs_N.detach() - proximal_N).clamp(max=math.log(importance_cap)).exp()
    ratio_N = weight_N * (logprobs_N - logprobs_N.detach()).exp()
    plain_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return PolicyLoss(-torch.minimum(plain_N, bounded_N), (bounded_N < plain_N).detach())


def token_weight(normalization: LossNormalization, trained_tokens: int) -> float:
    """Weight of each trained token of a sample with ``trained_tokens`` of them, in the un-normalised sum."""
    return 1.0 / max(1, trained_tokens) if normalization is LossNormalization.SEQUENCE_MEAN else 1.0


def loss_denominator(normalization: LossNormalization, *, samples: int, trained_tokens: int, max_tokens: int) -> float:
    """What the un-normalised sum of a whole batch (all ranks, groups without signal included) is divided by."""
    if normalization is LossNormalization.TOKEN_MEAN:
        return float(max(1, trained_tokens))
    if normalization is LossNormalization.SEQUENCE_MEAN:
        return float(max(1, samples))
    return float(max(1, samples * max_tokens))
