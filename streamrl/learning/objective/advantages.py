"""Advantages: pure functions of rewards. ``_S``: one entry for each sample of a group; ``_N``: each trained token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamrl.recipe.algorithms import WITHIN_GROUPS
from streamrl.recipe.objective import AdvantageKind

FloatVector = NDArray[np.float32]
STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as TRL and the plain loop do."""
EQUAL = 1e-12
"""Rewards that differ from their mean by at most this part of the largest differ by rounding: 0.1 + 0.2 and 0.3."""


class Moments(NamedTuple):
    """Number, sum and sum of squares of float64 values: those of several ranks or batches are added field by field."""

    number: float = 0.0
    total: float = 0.0
    square: float = 0.0


def moments_of(values_N: FloatVector) -> Moments:
    """Moments of the values of all trained tokens."""
    values = values_N.astype(np.float64)
    return Moments(float(values.size), float(values.sum()), float(np.square(values).sum()))


def whiten(values_N: FloatVector, moments: Moments) -> FloatVector:
    """(values - mean) / deviation of the population, after REINFORCE++ (arXiv 2501.03262). Float32 [N].

    Zeros where there is no deviation: the mean of equal float32 values is exact in float64.
    """
    count = max(1.0, moments.number)
    mean, mean_square = moments.total / count, moments.square / count
    variance = mean_square - mean * mean
    if variance <= 0:
        return np.zeros(values_N.shape, dtype=np.float32)
    return ((values_N.astype(np.float64) - mean) / math.sqrt(variance)).astype(np.float32)


def group_advantages(rewards_S: Tensor, kind: AdvantageKind) -> Tensor:
    """Rewards of one group as far as the group alone decides them. Float32 [S].

    ``group_std``: minus their mean, divided by (their unbiased standard deviation + 1e-4), GRPO (arXiv 2402.03300).
    ``group_mean`` and ``group_then_batch``: minus their mean. ``leave_one_out``: minus the mean of the others.
    Other kinds: the rewards themselves. A group of one sample, or of equal rewards, has advantage exactly 0 where
    siblings are compared: rounding, of the mean or of a sum of parts, must not make a gradient out of nothing.
    """
    rewards_S = rewards_S.double()
    if kind not in WITHIN_GROUPS:
        return rewards_S.float()
    samples = rewards_S.numel()
    centred_S = rewards_S - rewards_S.mean()
    if samples < 2 or bool(centred_S.abs().max() <= EQUAL * rewards_S.abs().max()):
        return torch.zeros(rewards_S.shape, dtype=torch.float32)
    if kind is AdvantageKind.GROUP_STD:
        centred_S = centred_S / (rewards_S.std() + STD_EPSILON)
    elif kind is AdvantageKind.LEAVE_ONE_OUT:
        centred_S = centred_S * (samples / (samples - 1))
    return centred_S.float()


def separate_advantages(rewards_S: Sequence[Mapping[str, tuple[float, float]]], kind: AdvantageKind) -> Tensor:
    """Each reward compared with its siblings' alone, and the advantages added by weight (GDPO, arXiv 2601.05242), so
    that a reward of small deviation is not lost beside one of a large. ``rewards_S``: (weight, value) by name, of each
    sample; a sample that has no value of a name gets nothing for it. Float32 [S]."""
    advantages_S = torch.zeros(len(rewards_S), dtype=torch.float64)
    for name in sorted({name for rewards in rewards_S for name in rewards}):
        members = [index for index, rewards in enumerate(rewards_S) if name in rewards]
        weights = torch.tensor([rewards_S[index][name][0] for index in members], dtype=torch.float64)
        values = torch.tensor([rewards_S[index][name][1] for index in members], dtype=torch.float64)
        advantages_S[members] += weights * group_advantages(values, kind).double()
    return advantages_S.float()


def token_returns(reward: float, penalties_N: FloatVector) -> FloatVector:
    """Return of each token: the reward minus the penalties (KL to the reference) of it and later tokens."""
    later_N = np.cumsum(penalties_N[::-1], dtype=np.float64)[::-1]
    return (reward - later_N).astype(np.float32)


def generalized_advantages(
    rewards_N: FloatVector, values_N: FloatVector, *, discount: float, gae_lambda: float
) -> tuple[FloatVector, FloatVector]:
    """GAE (arXiv 1506.02438) over one sample that ends with its last token: advantages and returns (advantage + value).

    Float32 [N] each. The value after the last token is 0.
    """
    values = values_N.astype(np.float64)
    errors = rewards_N + discount * np.append(values[1:], 0.0)[: values.size] - values
    advantages = np.zeros_like(values)
    following = 0.0
    for position in range(values.size - 1, -1, -1):
        following = float(errors[position]) + discount * gae_lambda * following
        advantages[position] = following
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)
