"""Objectives: pure functions of logprobs, from the loss of a token to the loss of a batch.

``batches`` and ``updates`` call it in each trainer rank. Shapes: ``N`` trained tokens of whole sequences. A batch's
loss is ``sum over tokens of (token weight * token loss) / denominator``. The numerator can be accumulated while groups
arrive, and the denominator is known when the batch is closed: this makes streaming training exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamrl.learning.objective.corrections import off_policy_correction, proximal_logprobs, sequence_means
from streamrl.learning.objective.custom import surrogate_of
from streamrl.recipe.objective import KlEstimator, Mask, ObjectiveSettings, OffPolicy, RatioLevel
from streamrl.recipe.objectives.method import KlPlace, LossNormalization, SurrogateTokens

LARGEST_LOG_RATIO = 20.0
"""A ratio of two policies is truncated at exp(20): beyond it, float32 overflows to inf and inf * 0 to NaN."""
LARGEST_LOG_K3 = 10.0
"""Exponent up to which k3 = exp(log(reference / policy)) + ... is exact: beyond it, k3 continues along its tangent."""


class TokenInputs(NamedTuple):
    """Inputs of the loss for ``N`` trained tokens, known before the model runs. Float32 [N] unless noted.

    ``behavior_N``: logprobs that the engine reported.
    ``weights_N``: weight of each token in the un-normalised sum.
    ``staleness_N``: int64, versions between the one that sampled the token and the one that is differentiated.
    ``sequence_N``: int64, index of the token's trajectory, whose tokens share a ratio in some objectives.
    ``sequences``: number of trajectories of the row.
    ``proximal_N``: logprobs before the first of several updates on a batch; None: logprobs of this forward.
    ``reference_N``: logprobs of the reference model, for a KL.
    ``teacher_N``: logprobs of the teacher.
    ``old_values_N``: values of the critic before the first update.
    ``returns_N``: returns that the critic learns."""

    behavior_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    staleness_N: Tensor
    sequence_N: Tensor
    sequences: int
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None
    teacher_N: Tensor | None = None
    old_values_N: Tensor | None = None
    returns_N: Tensor | None = None

    def part(self, positions: slice | Tensor) -> TokenInputs:
        """Inputs of some of the tokens."""
        tensors: dict[str, Any] = {
            name: value[positions] for name, value in self._asdict().items() if isinstance(value, Tensor)
        }
        return self._replace(**tensors)


class TokenLoss(NamedTuple):
    """Loss of each token, and values for metrics, which have no gradient.

    ``loss_N``: loss of the token before ``weights_N``, differentiable.
    ``clipped_N``: bool, whether the clip removed the token's gradient (``token_weight``: bounded its weight).
    ``masked_N``: bool, whether the off-policy correction left the token out.
    ``correction_N``: off-policy weight, 0 where masked.
    ``reference_kl_N``: estimated KL to the reference model, 0 without one.
    ``teacher_kl_N``: estimated KL to the teacher (k1), or the exact divergence; 0 without a teacher."""

    loss_N: Tensor
    clipped_N: Tensor
    masked_N: Tensor
    correction_N: Tensor
    reference_kl_N: Tensor
    teacher_kl_N: Tensor


def token_loss(
    settings: ObjectiveSettings,
    off_policy: OffPolicy,
    logprobs_N: Tensor,
    entropy_N: Tensor,
    tokens: TokenInputs,
    divergence_N: Tensor | None = None,
) -> TokenLoss:
    """Loss of each token under ``settings``, corrected for staleness by ``off_policy``.

    correction * surrogate + kl_coefficient * KL + distillation_coefficient * ``divergence_N`` - entropy_coefficient *
    entropy, as in TRL and verl: a token that the correction leaves out still has the other terms. With several updates
    on a batch, ``tokens.proximal_N`` has the trainer's logprobs before the first of them; without it, the logprobs of
    this forward take their place."""
    trainer_N = logprobs_N.detach() if tokens.proximal_N is None else tokens.proximal_N
    proximal_N = proximal_logprobs(off_policy.proximal, trainer_N, tokens.behavior_N, tokens.staleness_N)
    correction_N, masked_N = off_policy_correction(
        off_policy, proximal_N, trainer_N, tokens.behavior_N, tokens.staleness_N, tokens.sequence_N, tokens.sequences
    )
    advantages_N = tokens.advantages_N
    teacher_kl_N = torch.zeros_like(trainer_N)
    if tokens.teacher_N is not None:
        # Minus the gradient of KL(policy, teacher) is E[(log teacher - log policy) grad log policy]: the difference is
        # the reward of its token, and of no other one (a discount of 0).
        advantages_N = advantages_N + settings.distillation_coefficient * (tokens.teacher_N - tokens.behavior_N)
        teacher_kl_N = trainer_N - tokens.teacher_N
    loss_N, clipped_N = _surrogate_loss(settings, logprobs_N, proximal_N, tokens._replace(advantages_N=advantages_N))
    loss_N = correction_N * loss_N
    kl_N = torch.zeros_like(trainer_N)
    if tokens.reference_N is not None:
        kl_N = reference_kl(logprobs_N, tokens.reference_N, settings.kl_estimator)
        if settings.kl_in is KlPlace.LOSS:
            loss_N = loss_N + settings.kl_coefficient * kl_N
    if divergence_N is not None:
        loss_N = loss_N + settings.distillation_coefficient * divergence_N
        teacher_kl_N = divergence_N.detach()
    if settings.entropy_coefficient != 0:
        loss_N = loss_N - settings.entropy_coefficient * entropy_N
    return TokenLoss(loss_N, clipped_N, masked_N, correction_N, kl_N.detach(), teacher_kl_N)


def _surrogate_loss(
    settings: ObjectiveSettings, logprobs_N: Tensor, proximal_N: Tensor, tokens: TokenInputs
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and where the clip took effect. The formulas are in ``recipe/objectives``."""
    surrogate = surrogate_of(settings)
    difference_N = logprobs_N - proximal_N
    if surrogate.whole_sequences:
        difference_N = sequence_means(difference_N, tokens.sequence_N, tokens.sequences)[tokens.sequence_N]
    return surrogate.loss(
        SurrogateTokens(
            logprobs_N,
            proximal_N,
            tokens.behavior_N,
            _ratio(difference_N),
            tokens.advantages_N,
            tokens.staleness_N,
            tokens.sequence_N,
            tokens.sequences,
            settings.clip,
        )
    )


def _ratio(difference_N: Tensor) -> Tensor:
    """exp(difference), truncated at exp(20). The gradient of a truncated ratio is the one of exp(20) * difference."""
    constant_N = difference_N.detach()
    return constant_N.clamp(max=LARGEST_LOG_RATIO).exp() * (difference_N - constant_N).exp()


def reference_kl(logprobs_N: Tensor, reference_N: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy, reference) estimated from tokens of the policy (http://joschu.net/blog/kl-approx.html). [N].

    With d = log policy - log reference: k1 = d (unbiased), k2 = d^2 / 2 (biased, never negative), k3 = exp(-d) - 1 + d
    (unbiased, never negative). A good estimate of the value need not have a good gradient. Differentiated as a loss, k2
    has the gradient of this KL: E[d grad log policy]. k1 has no gradient: E[grad log policy] = 0, only noise. k3, which
    GRPO uses, has the gradient of the other direction, KL(reference, policy), equal to first order where the two are
    close; multiplied by the differentiable ratio (DeepSeek-V3.2, arXiv 2512.02556; TRL's default), it has the gradient
    of k2 at a ratio of 1. In a reward, which is not differentiated, k1 is exact and k2 and k3 are not
    (https://xihuai18.github.io/reinforcement-learning/2025/12/01/kl-estimators-en.html)."""
    difference_N = logprobs_N - reference_N
    if estimator is KlEstimator.K1:
        return difference_N
    if estimator is KlEstimator.K2:
        return difference_N.square() / 2
    exponent_N = (-difference_N).clamp(max=LARGEST_LOG_K3)
    beyond_N = -difference_N - exponent_N
    return exponent_N.exp() - 1 - exponent_N + exponent_N.detach().expm1() * beyond_N


def value_loss(settings: ObjectiveSettings, values_N: Tensor, tokens: TokenInputs) -> Tensor:
    """Squared error of the critic, halved, before ``weights_N`` and ``value_coefficient``. Float32 [N].

    max((V - R)^2, (V clipped to old V +- value_clip - R)^2) / 2: the error is PPO's (arXiv 1707.06347, equation 9), the
    clip is from OpenAI's baselines. Without old values (first update on a batch) or with ``value_clip`` 0 the error is
    not clipped. Raises ``ValueError`` without returns."""
    if tokens.returns_N is None:
        raise ValueError("the value loss needs the returns of each token: TokenInputs.returns_N is None")
    error_N = (values_N - tokens.returns_N).square()
    if tokens.old_values_N is not None and settings.value_clip > 0:
        clip = settings.value_clip
        old_N = tokens.old_values_N
        clipped_N = old_N + (values_N - old_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (clipped_N - tokens.returns_N).square())
    return error_N / 2


def needs_whole_sequences(settings: ObjectiveSettings, off_policy: OffPolicy) -> bool:
    """Return whether a token's loss depends on other tokens of its trajectory, which chunks may not split then."""
    pooled = {RatioLevel.SEQUENCE, RatioLevel.GEOMETRIC}
    surrogate = surrogate_of(settings)
    levels = {off_policy.mask_level}
    if off_policy.mask is not Mask.ICEPOP:  # its weights are of tokens, whatever truncate says
        levels.add(off_policy.truncate)
    return surrogate.whole_sequences or surrogate.reads_trajectory or not levels.isdisjoint(pooled)


def token_weight(normalization: LossNormalization, trained_tokens: int) -> float:
    """Weight of each trained token of a sample with ``trained_tokens`` of them, in the un-normalised sum."""
    if normalization is LossNormalization.SEQUENCE_MEAN:
        return 1.0 / max(1, trained_tokens)
    return 1.0


def loss_denominator(
    normalization: LossNormalization, *, samples: float, trained_tokens: float, max_tokens: int
) -> float:
    """Divisor of the un-normalised sum of a whole batch (all ranks, groups without signal included). Each of several
    updates on a batch has its share of the counts, which may be a fraction."""
    if normalization is LossNormalization.TOKEN_MEAN:
        return trained_tokens or 1.0
    if normalization in {LossNormalization.SEQUENCE_MEAN, LossNormalization.SEQUENCE_SUM}:
        return samples or 1.0
    return samples * max_tokens or 1.0
