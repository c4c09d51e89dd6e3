"""From scored groups to samples with advantages: what siblings, the batch, the reference and the critic say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from streamrl.config.algorithms import WHOLE_BATCH
from streamrl.config.objective import AdvantageKind, KlPlace
from streamrl.learning.advantages import (
    FloatVector,
    Moments,
    generalized_advantages,
    group_advantages,
    moments_of,
    separate_advantages,
    soft_overlong_penalty,
    token_returns,
    whiten,
)
from streamrl.learning.objectives import reference_kl, token_weight
from streamrl.learning.options import TrainerOptions
from streamrl.learning.packing import PreparedSample
from streamrl.types import TrainingGroup, TrainingSample, TrajectoryId


class SampleScores(msgspec.Struct, frozen=True, kw_only=True):
    """What models say about the trained tokens of a sample before it is trained. Float32, one entry each."""

    proximal: FloatVector | None = None
    reference: FloatVector | None = None
    values: FloatVector | None = None


UNSCORED = SampleScores()


def shaped_reward(sample: TrainingSample, options: TrainerOptions) -> float:
    """The reward that the objective sees: with DAPO's soft overlong punishment, where it is asked for."""
    settings = options.objective
    if not settings.overlong_buffer:
        return sample.reward
    return sample.reward + soft_overlong_penalty(
        sample.trained_tokens,
        max_tokens=options.max_tokens,
        buffer=settings.overlong_buffer,
        penalty=settings.overlong_penalty,
    )


def has_signal(group: TrainingGroup, options: TrainerOptions) -> bool:
    """Whether a group can have a gradient at all."""
    rewards = [shaped_reward(sample, options) for sample in group.samples]
    return options.objective.trains_without_signal or any(reward != rewards[0] for reward in rewards)


def counts_in_loss(sample: TrainingSample, options: TrainerOptions) -> bool:
    """Whether the loss and its denominator see a sample: truncated ones may be left out (DAPO's overlong filtering)."""
    return options.objective.train_truncated or not sample.truncated


def behavior_of_trained(sample: TrainingSample) -> FloatVector:
    """Behaviour logprobs of the trained tokens."""
    mask = np.frombuffer(sample.loss_mask, dtype=np.uint8) != 0
    trained: FloatVector = np.frombuffer(sample.behavior_logprobs, dtype=np.float32)[mask]
    return trained


def prepare_group(
    group: TrainingGroup, scores: Mapping[TrajectoryId, SampleScores], options: TrainerOptions
) -> list[PreparedSample]:
    """Samples of one group with their advantages; those of ``WHOLE_BATCH`` kinds are not final yet."""
    kind = options.objective.advantages
    penalties = [_penalties(sample, scores.get(sample.id, UNSCORED), options) for sample in group.samples]
    rewards = [shaped_reward(sample, options) for sample in group.samples]
    if kind in (AdvantageKind.BATCH, AdvantageKind.COHORT, AdvantageKind.GAE):
        compared = rewards
    else:
        # Siblings are compared by what the whole sample earned, so its penalties are one number.
        totals = [reward - float(p.sum()) for reward, p in zip(rewards, penalties, strict=True)]
        compared = _compared(group, totals, kind)
    members = zip(group.samples, compared, penalties, strict=True)
    prepared = [_prepare(sample, value, p, scores.get(sample.id, UNSCORED), options) for sample, value, p in members]
    return [item for item in prepared if item.sample.trained_tokens and counts_in_loss(item.sample, options)]


def _compared(group: TrainingGroup, totals: Sequence[float], kind: AdvantageKind) -> list[float]:
    """Advantages of the siblings by their totals; or by each reward alone, where what shapes them is one more."""
    if not any(sample.separate_rewards for sample in group.samples):
        return list(group_advantages(torch.tensor(totals, dtype=torch.float64), kind).tolist())
    shaping = [total - sample.reward for total, sample in zip(totals, group.samples, strict=True)]
    rewards = [
        sample.separate_rewards | ({"": (1.0, shaped)} if any(shaping) else {})
        for sample, shaped in zip(group.samples, shaping, strict=True)
    ]
    return list(separate_advantages(rewards, kind).tolist())


def _penalties(sample: TrainingSample, scores: SampleScores, options: TrainerOptions) -> FloatVector:
    settings = options.objective
    behavior = behavior_of_trained(sample)
    if scores.reference is None or settings.kl_in is not KlPlace.REWARD:
        return np.zeros_like(behavior)
    kl = reference_kl(torch.from_numpy(behavior.copy()), torch.from_numpy(scores.reference), settings.kl_estimator)
    return (settings.kl_coefficient * kl).numpy()


def _prepare(
    sample: TrainingSample, value: float, penalties: FloatVector, scores: SampleScores, options: TrainerOptions
) -> PreparedSample:
    settings = options.objective
    advantages = returns = None
    if settings.advantages is AdvantageKind.GAE:
        assert scores.values is not None
        rewards = -penalties
        rewards[-1:] += np.float32(value)
        advantages, returns = generalized_advantages(
            rewards, scores.values, discount=settings.discount, gae_lambda=settings.gae_lambda
        )
    elif settings.advantages in WHOLE_BATCH:
        # Siblings were compared by what the whole sample earned: the penalties are in ``value`` then.
        in_value = settings.advantages is AdvantageKind.GROUP_THEN_BATCH
        advantages = token_returns(value, np.zeros_like(penalties) if in_value else penalties)
    return PreparedSample(
        sample,
        advantage=value,
        weight=token_weight(settings.loss_normalization, sample.trained_tokens),
        token_advantages=advantages,
        proximal=scores.proximal,
        reference=scores.reference,
        old_values=scores.values,
        returns=returns,
    )


def token_moments(samples: Sequence[PreparedSample]) -> Moments:
    """Moments of the token advantages of one rank's samples."""
    vectors = [item.token_advantages for item in samples if item.token_advantages is not None]
    return moments_of(np.concatenate(vectors)) if vectors else Moments()


def whitened(samples: Sequence[PreparedSample], moments: Moments) -> list[PreparedSample]:
    """The same samples with advantages relative to the whole batch (or cohort)."""
    return [
        msgspec.structs.replace(item, token_advantages=whiten(item.token_advantages, moments))
        for item in samples
        if item.token_advantages is not None
    ]


def worth_training(item: PreparedSample, options: TrainerOptions) -> bool:
    """Whether a sample can have a gradient: without KL, entropy or critic an advantage of 0 has none."""
    settings = options.objective
    if settings.has_critic or settings.has_reference or settings.entropy_coefficient:
        return True
    return bool(item.advantage if item.token_advantages is None else item.token_advantages.any())
