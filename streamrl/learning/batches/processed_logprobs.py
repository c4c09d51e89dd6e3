"""Logprobs of the trained tokens of a row under the distribution that the engine sampled from."""

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
    """Logprobs and entropies of ``part`` of the trained tokens of ``row``, by ``policy`` (or its reference). Float32
    [N] and [N], N the tokens of the part."""
    excluded = None
    if options.min_tokens:
        # Of each turn: the engine is asked for one at a time.
        excluded = row.places_N[part] < options.min_tokens, options.end_tokens
    temperature: float | Tensor = options.temperature
    if row.temperature_N is not None:
        own_N = row.temperature_N[part]
        temperature = torch.where(own_N > 0, own_N, options.temperature)
    return token_logprobs(
        policy.head(hidden_ND[part]),
        row.targets_N[part],
        temperature=temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        excluded=excluded,
        entropy_gradient=entropy_gradient,
    )
