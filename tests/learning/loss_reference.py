"""The objectives once more: float64, one token after the other, gradients written out."""

from __future__ import annotations

import math
from typing import NamedTuple

from streamrl.config.algorithms import ObjectiveSettings
from streamrl.config.objective import KlEstimator, KlPlace, OffPolicy, Proximal, RatioLevel, Surrogate


class Token(NamedTuple):
    """One trained token. ``own``: the trainer's logprob before the first update on the batch; None: ``logprob``."""

    logprob: float
    behavior: float
    advantage: float
    staleness: int
    sequence: int
    entropy: float = 0.0
    own: float | None = None
    reference: float | None = None


class Expected(NamedTuple):
    """Of each token: its loss, d (weighted sum of losses) / d logprob, the correction, and the flags."""

    losses: list[float]
    gradients: list[float]
    corrections: list[float]
    clipped: list[bool]
    masked: list[bool]


def expected_losses(
    settings: ObjectiveSettings, off_policy: OffPolicy, tokens: list[Token], weights: list[float]
) -> Expected:
    """What ``token_loss`` must find, and the gradient of the sum of weight * loss."""
    proximal = [_proximal(off_policy, token) for token in tokens]
    members = [[i for i, t in enumerate(tokens) if t.sequence == token.sequence] for token in tokens]
    found = Expected([], [0.0] * len(tokens), [], [], [])
    for i, token in enumerate(tokens):
        correction = _correction(off_policy, tokens, proximal, i, members[i])
        pooled = members[i] if settings.surrogate is Surrogate.SEQUENCE_CLIP else [i]
        log_ratio = sum(tokens[j].logprob - proximal[j] for j in pooled) / len(pooled)
        loss, slope, clipped = _surrogate(settings, math.exp(log_ratio), token)
        kl, kl_slope = _kl(settings, token)
        found.losses.append((correction or 0.0) * (loss + kl - settings.entropy_coefficient * token.entropy))
        found.corrections.append(correction or 0.0)
        found.clipped.append(clipped)
        found.masked.append(correction is None)
        for j in pooled:  # d log_ratio / d logprob_j is one share each
            found.gradients[j] += weights[i] * (correction or 0.0) * slope / len(pooled)
        found.gradients[i] += weights[i] * (correction or 0.0) * kl_slope
    return found


def _proximal(off_policy: OffPolicy, token: Token) -> float:
    own = token.logprob if token.own is None else token.own
    if token.staleness == 0 or off_policy.proximal is Proximal.DECOUPLED:
        return own
    if off_policy.proximal is Proximal.BEHAVIOR:
        return token.behavior
    alpha = (token.staleness - 1) / token.staleness  # AReaL: (v_proximal - v_behavior) / (v_own - v_behavior)
    return token.behavior + alpha * (own - token.behavior)


def _correction(
    off_policy: OffPolicy, tokens: list[Token], proximal: list[float], i: int, members: list[int]
) -> float | None:
    """The factor of a token's loss; None: masked."""

    def ratio(j: int) -> float:
        return math.exp(proximal[j]) / math.exp(tokens[j].behavior)

    def at(level: RatioLevel) -> float:
        if level is RatioLevel.TOKEN:
            return ratio(i)
        product = math.prod(ratio(j) for j in members)
        return product if level is RatioLevel.SEQUENCE else product ** (1 / len(members))

    if tokens[i].staleness == 0 and not off_policy.correct_mismatch:
        return 1.0
    if (
        off_policy.mask is not RatioLevel.NONE
        and not off_policy.mask_low <= at(off_policy.mask) <= off_policy.mask_high
    ):
        return None
    weight = 1.0 if off_policy.truncate is RatioLevel.NONE else min(at(off_policy.truncate), off_policy.cap)
    return weight * math.pow(off_policy.staleness_discount, tokens[i].staleness)


def _surrogate(settings: ObjectiveSettings, ratio: float, token: Token) -> tuple[float, float, bool]:
    """Loss, its derivative with respect to the logarithm of the ratio, clipped."""
    low, high, advantage = 1 - settings.clip_low, 1 + settings.clip_high, token.advantage
    if settings.surrogate is Surrogate.POLICY_GRADIENT:
        return -ratio * advantage, -ratio * advantage, False
    if settings.surrogate is Surrogate.TOKEN_WEIGHT:
        weight = min(max(ratio, low), high)
        return -weight * advantage * token.logprob, -weight * advantage, weight != ratio
    plain, clipped = ratio * advantage, min(max(ratio, low), high) * advantage
    objective = min(plain, clipped)
    if settings.dual_clip and advantage < 0 and settings.dual_clip * advantage > objective:
        return -settings.dual_clip * advantage, 0.0, True
    return -objective, -plain if plain <= clipped else 0.0, plain > clipped


def _kl(settings: ObjectiveSettings, token: Token) -> tuple[float, float]:
    """Weighted KL term and its derivative."""
    if token.reference is None or settings.kl_in is not KlPlace.LOSS:
        return 0.0, 0.0
    ratio = math.exp(token.reference) / math.exp(token.logprob)
    value, slope = {
        KlEstimator.K1: (-math.log(ratio), 1.0),
        KlEstimator.K2: (0.5 * math.log(ratio) ** 2, -math.log(ratio)),
        KlEstimator.K3: (ratio - 1 - math.log(ratio), 1 - ratio),
    }[settings.kl_estimator]
    return settings.kl_coefficient * value, settings.kl_coefficient * slope
