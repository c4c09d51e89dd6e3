"""Logprobs of the trained tokens of a row under the distribution that the engine sampled from, and the distance of this
distribution from the teacher's.

``gradients`` and ``scoring`` call it in each trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.learning.model.policy import MicroBatch
from streamrl.learning.objective.divergence import divergence
from streamrl.learning.objective.logprobs import processed_logits, token_logprobs
from streamrl.learning.options import TrainerOptions


class _Processing(NamedTuple):
    """Arguments of ``processed_logits`` for a part of a row."""

    temperature_N: Tensor | None
    excluded: tuple[Tensor, Sequence[int]] | None


def _processing(row: MicroBatch, part: slice, options: TrainerOptions) -> _Processing:
    sampling = options.sampling
    excluded = None
    if sampling.min_tokens:
        # The first tokens of each turn: every turn is a request of its own to the engine.
        excluded = row.places_N[part] < sampling.min_tokens, options.end_tokens
    temperature_N: Tensor | None = None
    if row.temperature_N is not None:
        temperature_N = row.temperature_N[part]
        temperature_N = torch.where(temperature_N.isnan(), sampling.temperature, temperature_N)
    return _Processing(temperature_N, excluded)


def processed_logprobs(
    logits_NV: Tensor, row: MicroBatch, part: slice, options: TrainerOptions, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of ``part`` of the trained tokens of ``row`` by ``logits_NV``, of the policy or of the
    reference. Both are float32 [N], with N trained tokens in the part."""
    processing = _processing(row, part, options)
    return token_logprobs(
        logits_NV,
        row.targets_N[part],
        options.sampling,
        temperature_N=processing.temperature_N,
        excluded=processing.excluded,
        kept_NK=None if row.kept_NK is None else row.kept_NK[part],
        entropy_gradient=entropy_gradient,
    )


def teacher_divergence(
    logits_NV: Tensor, teacher_NV: Tensor, row: MicroBatch, part: slice, options: TrainerOptions
) -> Tensor:
    """Divergence of the policy from the teacher at ``part`` of the trained tokens of ``row``, float32 [N]. Logits of
    both are processed alike."""
    processing = _processing(row, part, options)._asdict()
    policy_NV = processed_logits(logits_NV, options.sampling, **processing)
    processed_teacher_NV = processed_logits(teacher_NV, options.sampling, **processing)
    return divergence(policy_NV, processed_teacher_NV, options.objective.divergence_beta)
