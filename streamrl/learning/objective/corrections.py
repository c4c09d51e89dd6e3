"""Corrections for tokens that another policy sampled: the proximal policy, weights, masks. They have no gradient.

``objectives`` calls it in each trainer rank. There are three policies: ``behavior`` sampled the token (an older
version, in an engine), ``proximal`` is the denominator of the clipped ratio, and the trainer's own policy. The
surrogate of a token is multiplied by w = pi_proximal / pi_behavior (the decoupled objective, AReaL, arXiv 2505.24298,
section 5.2). Shapes: ``N`` trained tokens, ``S`` sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.recipe.objective import Mask, OffPolicy, Proximal, RatioLevel


class Correction(NamedTuple):
    """Correction of each token. ``weight_N``: factor of its surrogate, 0 where the token is masked. ``masked_N``: bool,
    whether the token is left out."""

    weight_N: Tensor
    masked_N: Tensor


def sequence_sums(values_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Sum over each sequence, differentiable. [S]."""
    return values_N.new_zeros(sequences).index_add(0, sequence_N, values_N)


def sequence_means(values_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Mean over each sequence, differentiable; 0 for a sequence without tokens. [S]."""
    counts_S = torch.bincount(sequence_N, minlength=sequences).clamp(min=1)
    return sequence_sums(values_N, sequence_N, sequences) / counts_S


def proximal_logprobs(proximal: Proximal, trainer_N: Tensor, behavior_N: Tensor, staleness_N: Tensor) -> Tensor:
    """Logprobs of the proximal policy, the denominator of the ratio. [N], no gradient.

    Where ``staleness_N`` is 0 the result is the trainer's logprob: this version sampled the token, and the logprob of
    its engine differs by rounding only. ``interpolated``, after A-3PO (arXiv 2512.06547; AReaL's
    ``prox_logp_method="loglinear"``): log pi_proximal = log pi_behavior / d + (1 - 1 / d) log pi_trainer at staleness
    d, hence the behaviour policy at d = 1.

    ``trainer_N``: logprobs of the trainer's policy before the first update on the batch."""
    trainer_N = trainer_N.detach()
    if proximal is Proximal.DECOUPLED:
        return trainer_N
    older_N = behavior_N
    if proximal is Proximal.INTERPOLATED:
        share_N = 1 / staleness_N.clamp(min=1).to(trainer_N.dtype)
        older_N = share_N * behavior_N + (1 - share_N) * trainer_N
    return torch.where(staleness_N > 0, older_N, trainer_N)


@torch.no_grad()
def off_policy_correction(
    off_policy: OffPolicy,
    proximal_N: Tensor,
    trainer_N: Tensor,
    behavior_N: Tensor,
    staleness_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
) -> Correction:
    """Weight and mask of each token. A token that needs no correction has weight exactly 1 and is not masked.
    ``trainer_N``: logprobs of the trainer's policy before the first update on the batch.

    Weight: w truncated at ``cap`` at the level of ``truncate``, times staleness_discount ** staleness. The levels are
    ``token``: truncated importance sampling (https://fengyao.notion.site/off-policy-rl); ``sequence``: product of w
    over the sequence (unbiased, and its variance grows with length); ``geometric``: length-th root of this product.
    Mask: w at the level of ``mask`` is outside [mask_low, mask_high]. Known methods: ``icepop``, by which a token has
    weight w, or is masked where pi_trainer / pi_behavior is outside, which is w of the decoupled proximal policy
    (https://ringtech.notion.site/icepop); ``sequence`` for both, cap = mask_high and mask_low 0 is masked importance
    sampling (https://richardli.xyz/post/rl-collapse-part3, which also has the geometric mask)."""
    # The logprobs of a token of the trained version differ by engine rounding only: ``correct_mismatch`` corrects it.
    corrected_N = torch.ones_like(staleness_N, dtype=torch.bool) if off_policy.corrects_mismatch else staleness_N > 0
    difference_N = proximal_N - behavior_N
    weight_N = torch.ones_like(difference_N)
    masked_by_N = difference_N
    if off_policy.mask is Mask.ICEPOP:
        weight_N = difference_N.exp()
        masked_by_N = trainer_N - behavior_N
    elif off_policy.truncate is not RatioLevel.NONE:
        weight_N = _ratios(off_policy.truncate, difference_N, sequence_N, sequences).clamp(max=off_policy.cap)
    weight_N = weight_N * off_policy.staleness_discount ** staleness_N.to(weight_N.dtype)
    masked_N = torch.zeros_like(corrected_N)
    if off_policy.mask_level is not RatioLevel.NONE:
        low, high = off_policy.mask_bounds
        ratio_N = _ratios(off_policy.mask_level, masked_by_N, sequence_N, sequences)
        masked_N = corrected_N & ((ratio_N < low) | (ratio_N > high))
    # Selected by ``where`` and not multiplied: cap < 1 must not change a token that needs no correction.
    weight_N = torch.where(corrected_N, weight_N, 1.0)
    return Correction(weight_N.masked_fill(masked_N, 0.0), masked_N)


def _ratios(level: RatioLevel, difference_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """w of each token, or of its sequence. [N]. It may overflow to inf: callers only compare or truncate it."""
    if level is RatioLevel.TOKEN:
        return difference_N.exp()
    pooled = sequence_sums if level is RatioLevel.SEQUENCE else sequence_means
    return pooled(difference_N, sequence_N, sequences).exp()[sequence_N]
