"""Advantages: pure functions of rewards. ``_S``: one entry for each sample of a group."""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.config.recipe import AdvantageNormalization

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as TRL and the plain loop do."""


def group_advantages(rewards_S: Tensor, normalization: AdvantageNormalization) -> Tensor:
    """Rewards of one group minus their mean, divided by (their unbiased standard deviation + 1e-4) or not. Float32 [S].

    A group of one sample, or of equal rewards, has advantage exactly 0: rounding in the mean must not make a
    gradient out of nothing. GRPO: https://arxiv.org/abs/2402.03300 (with std); Dr. GRPO: https://arxiv.org/abs/2503.20783
    (without).
    """
    rewards_S = rewards_S.double()
    if rewards_S.numel() < 2 or bool((rewards_S == rewards_S[0]).all()):
        return torch.zeros(rewards_S.shape, dtype=torch.float32)
    centred_S = rewards_S - rewards_S.mean()
    if normalization is AdvantageNormalization.STD:
        centred_S = centred_S / (rewards_S.std() + STD_EPSILON)
    return centred_S.float()
