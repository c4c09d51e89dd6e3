"""Corrections for tokens that another policy sampled: the proximal policy, weights, masks. Nothing here has a gradient.

Three policies: ``behavior`` sampled the token (an older version, in another engine), ``proximal`` is what the clipped
ratio is taken against, and the trainer's own. The surrogate of a token is multiplied by w = pi_proximal / pi_behavior
(the decoupled objective, AReaL, arXiv 2505.24298, section 5.2). Shapes: ``N`` trained tokens, ``S`` sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.recipe.objective import OffPolicy, Proximal, RatioLevel


class Correction(NamedTuple):
    """``weight_N``: factor of each token's surrogate, 0 where ``masked_N`` (bool) leaves the token out."""

    weight_N: Tensor
    masked_N: Tensor


def sequence_sums(values_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Sum over each sequence, differentiable. [S]."""
    return values_N.new_zeros(sequences).index_add(0, sequence_N, values_N)


def sequence_means(values_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Mean over each sequence, differentiable; 0 for a sequence without tokens. [S]."""
    counts_S = torch.bincount(sequence_N, minlength=sequences).clamp(min=1)
    return sequence_sums(values_N, sequence_N, sequences) / counts_S


def proximal_logprobs(proximal: Proximal, own_N: Tensor, behavior_N: Tensor, staleness_N: Tensor) -> Tensor:
    """Logprobs of the policy that the ratio is taken against. [N], no gradient.

    ``own_N``: the trainer's, before the first update on the batch. It is the answer wherever ``staleness_N`` is 0: that
    version sampled the token, and what its engine reported differs by rounding only. ``interpolated``, after A-3PO
    (arXiv 2512.06547; AReaL's ``prox_logp_method="loglinear"``): log pi_proximal = log pi_behavior / d +
    (1 - 1 / d) log pi_own at staleness d, hence the behaviour policy at d = 1."""
    own_N = own_N.detach()
    if proximal is Proximal.DECOUPLED:
        return own_N
    older_N = behavior_N
    if proximal is Proximal.INTERPOLATED:
        share_N = 1 / staleness_N.clamp(min=1).to(own_N.dtype)
        older_N = share_N * behavior_N + (1 - share_N) * own_N
    return torch.where(staleness_N > 0, older_N, own_N)


@torch.no_grad()
def off_policy_correction(
    off_policy: OffPolicy,
    proximal_N: Tensor,
    behavior_N: Tensor,
    staleness_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
) -> Correction:
    """Weight and mask of each token. Weight exactly 1, not masked, where the token needs none.

    Weight: w truncated at ``cap`` at the level of ``truncate``, times staleness_discount ** staleness. ``token``:
    truncated importance sampling (https://fengyao.notion.site/off-policy-rl); ``sequence``: the product over it
    (unbiased, and its variance grows with length); ``geometric``: its length-th root. Mask: w at the level of ``mask``
    outside [mask_low, mask_high]. Known methods: ``token`` for both and cap >= mask_high is IcePop
    (https://ringtech.notion.site/icepop); ``sequence`` for both, cap = mask_high and mask_low 0 is masked importance
    sampling (https://richardli.xyz/post/rl-collapse-part3, which also has the geometric mask)."""
    # A token of the trained version differs by engine rounding alone: corrected only when asked for.
    corrected_N = torch.ones_like(staleness_N, dtype=torch.bool) if off_policy.correct_mismatch else staleness_N > 0
    difference_N = proximal_N - behavior_N
    weight_N = torch.ones_like(difference_N)
    if off_policy.truncate is not RatioLevel.NONE:
        weight_N = _ratios(off_policy.truncate, difference_N, sequence_N, sequences).clamp(max=off_policy.cap)
    weight_N = weight_N * off_policy.staleness_discount ** staleness_N.to(weight_N.dtype)
    masked_N = torch.zeros_like(corrected_N)
    if off_policy.mask is not RatioLevel.NONE:
        ratio_N = _ratios(off_policy.mask, difference_N, sequence_N, sequences)
        masked_N = corrected_N & ((ratio_N < off_policy.mask_low) | (ratio_N > off_policy.mask_high))
    # Chosen, not multiplied: cap < 1 must not touch a token that needs no correction.
    weight_N = torch.where(corrected_N, weight_N, 1.0)
    return Correction(weight_N.masked_fill(masked_N, 0.0), masked_N)


def _ratios(level: RatioLevel, difference_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """w of each token: its own, or that of its sequence. [N], inf where it overflows: only compared or truncated."""
    if level is RatioLevel.TOKEN:
        return difference_N.exp()
    pooled = sequence_sums if level is RatioLevel.SEQUENCE else sequence_means
    return pooled(difference_N, sequence_N, sequences).exp()[sequence_N]
