"""Advantages: pure functions of rewards, which ``batches.preparation`` and ``updates`` call in each trainer rank.

Names end in ``_S`` for one entry a sample of a group, and in ``_N`` for one entry a trained token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from streamrl.base.types import Baseline
from streamrl.recipe.environment import Credit
from streamrl.recipe.objectives.method import Advantages

FloatVector = NDArray[np.float32]
EQUAL = 1e-12
"""Largest difference from the mean, relative to the largest reward, that counts as rounding: 0.1 + 0.2 equals 0.3."""


class Moments(NamedTuple):
    """Number, sum and sum of squares of float64 values. Moments of several ranks or batches add up field by field."""

    number: float = 0.0
    total: float = 0.0
    square: float = 0.0


def moments_of(values_N: FloatVector) -> Moments:
    """Moments of the values of all trained tokens."""
    values = values_N.astype(np.float64)
    return Moments(float(values.size), float(values.sum()), float(np.square(values).sum()))


def whiten(values_N: FloatVector, moments: Moments) -> FloatVector:
    """(values - mean) / deviation of the population, after REINFORCE++ (arXiv 2501.03262). Float32 [N]. Zeros where the
    deviation is 0: the mean of equal float32 values is exact in float64."""
    count = max(1.0, moments.number)
    mean = moments.total / count
    mean_square = moments.square / count
    variance = mean_square - mean * mean
    if variance <= 0:
        return np.zeros(values_N.shape, dtype=np.float32)
    return ((values_N.astype(np.float64) - mean) / sqrt(variance)).astype(np.float32)


def group_advantages(rewards_S: Tensor, estimator: Advantages) -> Tensor:
    """Advantages of the samples of one group by their rewards; the rewards themselves where the estimator does not
    compare siblings. Float32 [S].

    A group of one sample, or of equal rewards, has advantage exactly 0 where siblings are compared: rounding of the
    mean, or of a sum of parts, must not produce a gradient."""
    rewards_S = rewards_S.double()
    if not estimator.compares_siblings:
        return rewards_S.float()
    centred_S = rewards_S - rewards_S.mean()
    if rewards_S.numel() < 2 or bool(centred_S.abs().max() <= EQUAL * rewards_S.abs().max()):
        return torch.zeros(rewards_S.shape, dtype=torch.float32)
    return estimator.of_group(rewards_S, centred_S).float()


def tracked_advantages(rewards_S: Tensor, baseline: Baseline) -> Tensor:
    """Advantages of the samples of one group over the mean of the prompt's earlier rewards and of the siblings',
    divided by the standard deviation of rewards from their baselines (SPO, arXiv 2509.13232). Float32 [S].

    A sample without siblings of a prompt of which nothing is known has advantage 0, and so have differences that are
    only rounding errors."""
    rewards_S = rewards_S.double()
    weight = baseline.weight + rewards_S.numel() - 1
    if weight <= 0:
        return torch.zeros(rewards_S.shape, dtype=torch.float32)
    means_S = (baseline.total + rewards_S.sum() - rewards_S) / weight
    errors_S = rewards_S - means_S
    rounding = EQUAL * max(float(rewards_S.abs().max()), abs(baseline.total) / max(baseline.weight, 1.0))
    errors_S = errors_S.where(errors_S.abs() > rounding, 0.0)
    return (errors_S / baseline.deviation).float()


def separate_advantages(rewards_S: Sequence[Mapping[str, tuple[float, float]]], estimator: Advantages) -> Tensor:
    """Compare each reward separately with the same reward of the siblings, and add the advantages by weight (GDPO,
    arXiv 2601.05242). So a reward of small deviation still counts besides a reward of large deviation. Float32 [S].

    ``rewards_S``: (weight, value) of each reward of a sample, by name; a reward that a sample lacks adds nothing."""
    advantages_S = torch.zeros(len(rewards_S), dtype=torch.float64)
    for name in sorted({name for rewards in rewards_S for name in rewards}):
        members = [index for index, rewards in enumerate(rewards_S) if name in rewards]
        weights = torch.tensor([rewards_S[index][name][0] for index in members], dtype=torch.float64)
        values = torch.tensor([rewards_S[index][name][1] for index in members], dtype=torch.float64)
        advantages_S[members] += weights * group_advantages(values, estimator).double()
    return advantages_S.float()


def step_advantages(numbers_S: Sequence[FloatVector], estimator: Advantages) -> list[FloatVector]:
    """Advantages of the tokens of siblings by numbers of their steps: DeepSeekMath's process supervision (arXiv
    2402.03300, section 4.1.3). The numbers of all steps of the group are compared as the rewards of siblings are, and a
    token has the sum of the compared numbers of its step and of those behind it. Float32 [N] each.

    ``numbers_S``: numbers of each sample, at the last token of each step; NaN for other tokens."""
    has_number_S = [~np.isnan(numbers_N) for numbers_N in numbers_S]
    pooled = np.concatenate([numbers_N[has] for numbers_N, has in zip(numbers_S, has_number_S, strict=True)])
    compared = group_advantages(torch.from_numpy(pooled), estimator).double().numpy()
    advantages = []
    first = 0
    for numbers_N, has in zip(numbers_S, has_number_S, strict=True):
        steps_N = np.zeros(numbers_N.shape)
        stop = first + int(has.sum())
        steps_N[has] = compared[first:stop]
        first = stop
        advantages.append(steps_N[::-1].cumsum()[::-1].astype(np.float32))
    return advantages


def turn_advantages(
    totals_S: Sequence[float], turns_S: Sequence[Sequence[float]], credit: Credit, estimator: Advantages
) -> Tensor:
    """Advantage of each turn of siblings, by ``credit``. Entries past the last turn of a sibling are undefined. Float32
    [S, largest number of turns].

    A sibling that ended before a turn still takes part in the comparison of this turn, so that every turn has the
    baseline of the full group. It takes part with the return of its last turn, which is its total where only last turns
    earn.

    ``totals_S``: total reward of each sample.
    ``turns_S``: part of the total that each turn earned; one turn at least."""
    rewards_ST = pad_sequence([torch.tensor(rewards, dtype=torch.float64) for rewards in turns_S], batch_first=True)
    totals_S1 = torch.tensor(totals_S, dtype=torch.float64)[:, None]
    # Return from each turn on, and behind the last turn: total minus the rewards of the turns before. A return that is
    # only a rounding error is 0.
    returns_ST1 = totals_S1 - pad(rewards_ST.cumsum(1), (1, 0))
    rounding_S1 = EQUAL * (totals_S1.abs() + rewards_ST.abs().sum(1, keepdim=True))
    returns_ST1 = returns_ST1.where(returns_ST1.abs() > rounding_S1, 0.0)
    if credit is Credit.TURN:
        compared_ST = rewards_ST
        outcomes_S = group_advantages(returns_ST1[:, -1], estimator)
    else:
        last_turns_S1 = torch.tensor([[len(turns) - 1] for turns in turns_S])
        places_ST = torch.arange(rewards_ST.shape[1]).minimum(last_turns_S1)
        compared_ST = returns_ST1.gather(1, places_ST)
        outcomes_S = torch.zeros(len(turns_S))
    return torch.stack([outcomes_S + group_advantages(turn_S, estimator) for turn_S in compared_ST.T], 1)
