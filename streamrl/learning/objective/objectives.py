"""Objectives: pure functions of logprobs, from the loss of a token to that of a batch.

Shapes: ``N`` trained tokens of whole sequences. A batch's loss is
``sum over tokens of (token weight * token loss) / denominator``: the numerator can be accumulated while groups arrive,
the denominator is known when the batch is closed. That is what makes streaming training exact."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamrl.learning.objective.corrections import off_policy_correction, proximal_logprobs, sequence_means
from streamrl.recipe.objective import KlEstimator, ObjectiveSettings, OffPolicy, RatioLevel
from streamrl.recipe.objectives.method import KlPlace, LossNormalization

LARGEST_LOG_RATIO = 20.0
"""A ratio of two policies is truncated at exp(20): beyond it, float32 overflows to inf and inf * 0 to NaN."""
LARGEST_LOG_K3 = 10.0
"""k3 grows as exp(log(reference / policy)): beyond this exponent it goes on along its tangent."""


class TokenInputs(NamedTuple):
    """Inputs of the loss for ``N`` trained tokens, known before the model runs. Float32 [N] unless said.

    ``weights_N``: of each token in the un-normalised sum. ``staleness_N``: int64, versions between the one that sampled
    the token and the one that is differentiated. ``sequence_N``: int64, index of its trajectory among the ``sequences``
    of the row, whose ratios are taken together. ``proximal_N`` None: the policy that is differentiated, before this
    step. ``reference_N``: logprobs of the reference model. ``old_values_N``, ``returns_N``: of the critic."""

    behavior_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    staleness_N: Tensor
    sequence_N: Tensor
    sequences: int
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None
    old_values_N: Tensor | None = None
    returns_N: Tensor | None = None

    def part(self, positions: slice | Tensor) -> TokenInputs:
        """The same of some of the tokens."""
        cut: dict[str, Any] = {n: v[positions] for n, v in self._asdict().items() if isinstance(v, Tensor)}
        return self._replace(**cut)


class TokenLoss(NamedTuple):
    """``loss_N``: loss of each token before ``weights_N``, differentiable. The rest is for metrics, without gradient:
    ``clipped_N``: bool, the clip removed its gradient (``token_weight``: bounded its weight); ``masked_N``: bool, the
    correction left it out; ``correction_N``: its off-policy weight (0 where masked); ``reference_kl_N``: estimated KL
    to the reference (0 without)."""

    loss_N: Tensor
    clipped_N: Tensor
    masked_N: Tensor
    correction_N: Tensor
    reference_kl_N: Tensor


def token_loss(
    settings: ObjectiveSettings, off_policy: OffPolicy, logprobs_N: Tensor, entropy_N: Tensor, tokens: TokenInputs
) -> TokenLoss:
    """Loss of each token under ``settings``, corrected for staleness as ``off_policy`` says.

    correction * surrogate + kl_coefficient * KL - entropy_coefficient * entropy, as in TRL and verl: a token that the
    correction leaves out is still kept near the reference. ``tokens.proximal_N``, when several updates are made on one
    batch: the trainer's logprobs before the first of them; without it, those of this very forward."""
    own_N = logprobs_N.detach() if tokens.proximal_N is None else tokens.proximal_N
    proximal_N = proximal_logprobs(off_policy.proximal, own_N, tokens.behavior_N, tokens.staleness_N)
    correction_N, masked_N = off_policy_correction(
        off_policy, proximal_N, tokens.behavior_N, tokens.staleness_N, tokens.sequence_N, tokens.sequences
    )
    loss_N, clipped_N = _surrogate_loss(settings, logprobs_N, proximal_N, tokens)
    loss_N = correction_N * loss_N
    kl_N = torch.zeros_like(own_N)
    if tokens.reference_N is not None:
        kl_N = reference_kl(logprobs_N, tokens.reference_N, settings.kl_estimator)
        if settings.kl_in is KlPlace.LOSS:
            loss_N = loss_N + settings.kl_coefficient * kl_N
    if settings.entropy_coefficient != 0:
        loss_N = loss_N - settings.entropy_coefficient * entropy_N
    return TokenLoss(loss_N, clipped_N, masked_N, correction_N, kl_N.detach())


def _surrogate_loss(
    settings: ObjectiveSettings, logprobs_N: Tensor, proximal_N: Tensor, tokens: TokenInputs
) -> tuple[Tensor, Tensor]:
    """Loss of each token, and where the clip took effect. The formulas are in ``recipe/objectives``."""
    surrogate = settings.token_surrogate
    difference_N = logprobs_N - proximal_N
    if surrogate.whole_sequences:
        difference_N = sequence_means(difference_N, tokens.sequence_N, tokens.sequences)[tokens.sequence_N]
    return surrogate.loss(_ratio(difference_N), tokens.advantages_N, logprobs_N, settings.clip)


def _ratio(difference_N: Tensor) -> Tensor:
    """exp(difference), truncated at exp(20); the gradient of a truncated one is that of exp(20) * difference."""
    constant_N = difference_N.detach()
    return constant_N.clamp(max=LARGEST_LOG_RATIO).exp() * (difference_N - constant_N).exp()


def reference_kl(logprobs_N: Tensor, reference_N: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy, reference) estimated from tokens of the policy (http://joschu.net/blog/kl-approx.html). [N].

    With d = log policy - log reference: k1 = d (unbiased), k2 = d^2 / 2 (biased, never negative), k3 = exp(-d) - 1 + d
    (unbiased, never negative). A good estimate of the value is not one of the gradient. Differentiated as a loss, k2
    has the gradient of this KL: E[d grad log policy]. k1 has none: E[grad log policy] = 0, noise alone. k3, GRPO's, has
    that of the other direction, KL(reference, policy), equal to first order where the two are close; multiplied by the
    differentiable ratio (DeepSeek-V3.2, arXiv 2512.02556; TRL's default), it has k2's at a ratio of 1. In a reward,
    which is not differentiated, k1 is exact and k2 and k3 are not
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
    clip is of OpenAI's baselines. Without old values (first update on a batch) or with ``value_clip`` 0: not clipped.
    Raises ``ValueError`` without returns."""
    if tokens.returns_N is None:
        raise ValueError("the value loss needs the returns of each token: TokenInputs.returns_N is None")
    error_N = (values_N - tokens.returns_N).square()
    if tokens.old_values_N is not None and settings.value_clip > 0:
        clip = settings.value_clip
        old_N = tokens.old_values_N
        near_N = old_N + (values_N - old_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - tokens.returns_N).square())
    return error_N / 2


def needs_whole_sequences(settings: ObjectiveSettings, off_policy: OffPolicy) -> bool:
    """Return whether a token's loss depends on others of its trajectory, which may not be cut into chunks then."""
    pooled = {RatioLevel.SEQUENCE, RatioLevel.GEOMETRIC}
    return settings.token_surrogate.whole_sequences or off_policy.truncate in pooled or off_policy.mask in pooled


def token_weight(normalization: LossNormalization, trained_tokens: int) -> float:
    """Weight of each trained token of a sample with ``trained_tokens`` of them, in the un-normalised sum."""
    return 1.0 / max(1, trained_tokens) if normalization is LossNormalization.SEQUENCE_MEAN else 1.0


def loss_denominator(
    normalization: LossNormalization, *, samples: float, trained_tokens: float, max_tokens: int
) -> float:
    """Divisor of the un-normalised sum of a whole batch (all ranks, groups without signal included). For one of several
    updates on a batch: its share of the counts, which need not be whole."""
    if normalization is LossNormalization.TOKEN_MEAN:
        return trained_tokens or 1.0
    if normalization in {LossNormalization.SEQUENCE_MEAN, LossNormalization.SEQUENCE_SUM}:
        return samples or 1.0
    return samples * max_tokens or 1.0
