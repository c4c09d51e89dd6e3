"""Passes without gradient: reference logprobs, proximal logprobs and values of samples, logprobs of the canary.

``updates`` and ``trainer`` call it in each trainer rank, before a batch's first gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from streamrl.base.messages import FirstProbe
from streamrl.base.types import TrainingSample, TrajectoryId
from streamrl.learning.batches.packing import PreparedSample, packed_rows, sequences_of
from streamrl.learning.batches.preparation import SampleScores
from streamrl.learning.batches.processed_logprobs import processed_logprobs
from streamrl.learning.canary import median_difference, probe_tokens
from streamrl.learning.model.attention import PackedSequence, packed_layout
from streamrl.learning.model.critic import Critic
from streamrl.learning.model.policy import (
    MicroBatch,
    PackedPolicy,
    chunks,
    compute_context,
    computes_in_sixteen_bits,
    empty_micro_batch,
    set_sharded,
)
from streamrl.learning.objective.advantages import FloatVector
from streamrl.learning.options import TrainerOptions


@torch.no_grad()
def score_samples(
    samples: Sequence[TrainingSample],
    policy: PackedPolicy,
    options: TrainerOptions,
    device: torch.device,
    *,
    reference: PackedPolicy | None,
    critic: Critic | None,
    proximal: bool,
    together: bool,
) -> dict[TrajectoryId, SampleScores]:
    """Score the trained tokens of ``samples`` by ``reference``, by ``critic`` and, if ``proximal``, by ``policy``. The
    models do not change. Without any of the three the result is empty.

    ``together``: whether parameters are gathered by layer; then it is collective."""
    if reference is None and critic is None and not proximal:
        return {}
    prepared = [PreparedSample(sample) for sample in samples if sample.trained_tokens]
    scores: dict[str, tuple[FloatVector | None, ...]] = {}
    for row in packed_rows(prepared, options, 0, device, together=together, context=policy.context):
        logprobs = None
        values = None
        references = None
        hidden_ND = None
        with compute_context(options, device):
            if proximal or (critic is not None and critic.trunk is None):
                hidden_ND = policy(row)
                if proximal:
                    logprobs = _split(row, row_logprobs(policy, hidden_ND, row, options))
            if critic is not None:
                values = _split(row, critic(row, hidden_ND))
            if reference is not None:
                # The reference is another policy: its routers choose the experts themselves.
                unrouted_row = row._replace(routed=None)
                logprobs_N = row_logprobs(reference, reference(unrouted_row), unrouted_row, options)
                references = _split(row, logprobs_N)
        for index, name in enumerate(row.sample_ids):
            scores[name] = tuple(vectors[index] if vectors else None for vectors in (logprobs, references, values))
    if together:
        for model in (policy, reference):
            set_sharded(model, True)
    return {item.sample.id: _joined([scores[part.name] for part in sequences_of(item)]) for item in prepared}


def _joined(parts: Sequence[tuple[FloatVector | None, ...]]) -> SampleScores:
    """Join the scores of the sequences of a trajectory."""
    proximal, reference, values = (
        None if vectors[0] is None else np.concatenate([vector for vector in vectors if vector is not None])
        for vectors in zip(*parts, strict=True)
    )
    return SampleScores(proximal=proximal, reference=reference, values=values)


def row_logprobs(policy: PackedPolicy, hidden_ND: Tensor, row: MicroBatch, options: TrainerOptions) -> Tensor:
    """Logprobs of the trained tokens of a row, from the states before the head. Float32 [N]."""
    logprobs = [
        processed_logprobs(policy.head(hidden_ND[part]), row, part, options)[0]
        for part in chunks(policy, row.targets_N.numel())
    ]
    return torch.cat(logprobs)


def _split(row: MicroBatch, values_N: Tensor) -> list[FloatVector]:
    """Split the values of a row into one vector for each of its sequences. Collective where ranks share the row."""
    all_values_N = row.gather(values_N.float()).cpu().numpy()
    vectors: list[FloatVector] = np.split(all_values_N, np.cumsum(row.counts)[:-1])
    return vectors


@torch.no_grad()
def probe_logprobs(
    policy: PackedPolicy, options: TrainerOptions, context: AbstractContextManager[object] | None = None
) -> tuple[float, ...]:
    """Logprobs of the canary's tokens after the first, at temperature 1. ``context``: settings of the forward pass
    (None: those of a batch). Collective where parameters are sharded."""
    tokens = probe_tokens(policy.hugging_face.config.get_text_config().vocab_size)
    device = policy.hugging_face.device
    tokens_T = torch.tensor(tokens, dtype=torch.int64, device=device)
    row = empty_micro_batch(device)._replace(
        tokens_T=tokens_T,
        positions_T=torch.arange(len(tokens), device=device),
        layout=packed_layout([PackedSequence(0, len(tokens))], device),
        predictors_N=torch.arange(len(tokens) - 1, device=device),
    )
    with context or compute_context(options, device):
        logits_NV = policy.head(policy(row)).float()
    logprobs_N = logits_NV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
    return tuple(float(logprob) for logprob in logprobs_N.cpu())


def first_probe(policy: PackedPolicy, options: TrainerOptions) -> FirstProbe:
    """Score the canary's tokens as in a batch, and once more in the other of float32 and bfloat16. Collective where
    parameters are sharded."""
    device = policy.hugging_face.device
    narrow = computes_in_sixteen_bits(options, device)
    logprobs = probe_logprobs(policy, options)
    other = probe_logprobs(policy, options, torch.autocast(device.type, torch.bfloat16, enabled=not narrow))
    return FirstProbe(logprobs=logprobs, rounding=median_difference(logprobs, other))
