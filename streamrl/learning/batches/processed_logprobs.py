"""Logprobs of the trained tokens of a row under the distribution that the engine sampled from.

``gradients`` and ``scoring`` call it in each trainer rank."""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.learning.model.policy import MicroBatch, PackedPolicy
from streamrl.learning.objective.logprobs import token_logprobs
from streamrl.learning.options import TrainerOptions


def processed_logprobs(
    policy: PackedPolicy,
    hidden_ND: Tensor,
    row: MicroBatch,
    part: slice,
    options: TrainerOptions,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of ``part`` of the trained tokens of ``row`` under ``policy``, which may be the reference.
    Both are float32 [N], with N trained tokens in the part."""
    sampling = options.sampling
    excluded = None
    if sampling.min_tokens:
        # The first tokens of each turn: every turn is a request of its own to the engine.
        excluded = row.places_N[part] < sampling.min_tokens, options.end_tokens
    temperature_N: Tensor | None = None
    if row.temperature_N is not None:
        temperature_N = row.temperature_N[part]
        temperature_N = torch.where(temperature_N.isnan(), sampling.temperature, temperature_N)
    return token_logprobs(
        policy.head(hidden_ND[part]),
        row.targets_N[part],
        sampling,
        temperature_N=temperature_N,
        excluded=excluded,
        entropy_gradient=entropy_gradient,
    )
