"""One row of packed tokens, as the policy and the critic take it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.learning.model.attention import PackedLayout, PackedSequence, packed_layout
from streamrl.learning.objective.objectives import TokenInputs


class MicroBatch(NamedTuple):
    """One row of ``T`` tokens with ``N`` trained ones among them.

    ``tokens_T``, ``positions_T``: int64. ``predictors_N``: index in the row of the token whose output predicts
    the target ``targets_N`` (the one before it; siblings that share a prompt share it). ``sample_ids``: of the row's
    sequences, in the order of ``inputs.sequence_N``.
    """

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    predictors_N: Tensor
    targets_N: Tensor
    inputs: TokenInputs
    sample_ids: tuple[str, ...]


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """Two tokens, none trained: keeps a rank in step with collectives when it has nothing to train."""
    nothing = torch.zeros(0, device=device)
    index = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens_T=torch.zeros(2, dtype=torch.int64, device=device),
        positions_T=torch.arange(2, device=device),
        layout=packed_layout([PackedSequence(0, 2)], device),
        predictors_N=index,
        targets_N=index,
        inputs=TokenInputs(nothing, nothing, nothing, index, index, 0),
        sample_ids=(),
    )
