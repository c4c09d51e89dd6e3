"""Prompts that siblings share, computed once: which tokens of a row are laid down, and what each continues.

Only what a trained token is predicted from is laid down: tokens from the last trained one on are left out. Siblings
that follow each other in a row share their longest common beginning without trained tokens: it becomes a sequence of
its own (the prefix), whose last token predicts the first token of each sibling. Exact: every token sees the same tokens
at the same positions as in a sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamrl.base.errors import StreamRLError
from streamrl.base.types import TrainingSample
from streamrl.learning.model.attention import PackedSequence

Tokens = NDArray[np.int64]


class LaidRow(NamedTuple):
    """A row of ``T`` tokens; ``predictors_N``: where its ``N`` trained ones are predicted, sample after sample."""

    tokens_T: Tokens
    positions_T: Tokens
    sequences: list[PackedSequence]
    predictors_N: Tokens


def trained_indices(sample: TrainingSample) -> Tokens:
    """Where the loss mask is set. Raises ``StreamRLError`` where nothing is, or where the first token is."""
    indices = np.flatnonzero(np.frombuffer(sample.loss_mask, dtype=np.uint8))
    lengths = len(sample.token_ids), len(sample.loss_mask), len(sample.behavior_logprobs)
    if len(set(lengths)) > 1 or not len(indices) or indices[0] == 0:
        raise StreamRLError(
            f"sample {sample.id} cannot be trained: it has {lengths[0]} token ids, a loss mask of {lengths[1]} and "
            f"{lengths[2]} logprobs; at least one token must be trained, and not the first (trained: {indices[:3]})"
        )
    return indices


def needed_tokens(sample: TrainingSample) -> int:
    """Tokens that a trained one is predicted from: all before the last trained one."""
    return max(0, sample.loss_mask.rfind(b"\1"))


def shared_prefix(siblings: Sequence[TrainingSample]) -> int:
    """Length of the longest beginning without trained tokens that these samples share; 0 for one sample alone."""
    if len(siblings) < 2:
        return 0
    length = min(sample.loss_mask.find(b"\1") for sample in siblings)
    first = np.asarray(siblings[0].token_ids[:length])
    for sample in siblings[1:]:
        differ = np.flatnonzero(np.asarray(sample.token_ids[:length]) != first[:length])
        length = int(differ[0]) if len(differ) else length
    return length


def lay_row(groups: Sequence[Sequence[TrainingSample]], *, shared: bool = True) -> LaidRow:
    """One row of these samples; those of one inner sequence are siblings. Every sample has a trained token."""
    tokens: list[Tokens] = []
    positions: list[Tokens] = []
    predictors: list[Tokens] = []
    sequences: list[PackedSequence] = []
    used = 0

    def lay(ids: Tokens, first_position: int, prefix: int) -> None:
        nonlocal used
        if len(ids):
            tokens.append(ids)
            positions.append(np.arange(first_position, first_position + len(ids)))
            sequences.append(PackedSequence(used, len(ids), prefix))
            used += len(ids)

    for siblings in groups:
        length = shared_prefix(siblings) if shared else 0
        prefix_start, prefix = used, len(sequences) if length else -1
        lay(np.asarray(siblings[0].token_ids[:length], dtype=np.int64), 0, -1)
        for sample in siblings:
            own_start = used
            lay(np.asarray(sample.token_ids[length : needed_tokens(sample)], dtype=np.int64), length, prefix)
            before = trained_indices(sample) - 1
            predictors.append(np.where(before < length, prefix_start + before, own_start + before - length))
    return LaidRow(np.concatenate(tokens), np.concatenate(positions), sequences, np.concatenate(predictors))
