"""From training samples to rows of packed tokens, in an order that does not depend on arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from streamrl.errors import StreamRLError
from streamrl.learning.attention import PackedLayout, packed_layout
from streamrl.types import TrainingSample


class WeightedSample(msgspec.Struct, frozen=True):
    """A sample with what its group and the normalisation say about each of its trained tokens."""

    sample: TrainingSample
    advantage: float
    weight: float


class MicroBatch(NamedTuple):
    """One row of ``T`` tokens with ``N`` trained ones among them.

    ``tokens_T``, ``positions_T``: int64. ``predictors_N``: index in the row of the token whose output predicts
    the target ``targets_N`` (the one before it). ``on_policy_N``: bool, sampled by the version that is differentiated.
    """

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    predictors_N: Tensor
    targets_N: Tensor
    behavior_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    on_policy_N: Tensor
    sample_ids: tuple[str, ...]


def plan_micro_batches(samples: Sequence[WeightedSample], budget: int) -> list[list[WeightedSample]]:
    """Split into rows of about equal size and at most ``budget`` tokens (a longer sample has a row of its own).

    Canonical: sorted by (length, id), so the same set gives the same rows however it arrived, and neighbours have
    nearly equal lengths, which makes attention cheap.
    """
    total = sum(len(item.sample.token_ids) for item in samples)
    # A small last row costs almost as much as a full one: share the tokens out.
    wanted = total / max(1, math.ceil(total / budget))
    rows: list[list[WeightedSample]] = []
    used = taken = 0
    for item in sorted(samples, key=lambda item: (len(item.sample.token_ids), item.sample.id)):
        length = len(item.sample.token_ids)
        if not rows or used + length > budget or taken >= wanted * len(rows):
            rows.append([])
            used = 0
        rows[-1].append(item)
        used += length
        taken += length
    return rows


def pack(row: Sequence[WeightedSample], policy_version: int, device: torch.device) -> MicroBatch:
    """One row as tensors. Raises ``StreamRLError`` for a sample whose first token is trained: nothing predicts it."""
    lengths = [len(item.sample.token_ids) for item in row]
    tokens = np.concatenate([np.frombuffer(item.sample.token_ids, dtype=np.int32) for item in row])
    mask = np.concatenate([np.frombuffer(item.sample.loss_mask, dtype=np.uint8) for item in row]) != 0
    behavior = np.concatenate([np.frombuffer(item.sample.behavior_logprobs, dtype=np.float32) for item in row])
    starts = np.cumsum([0, *lengths[:-1]])
    if not len(tokens) == len(mask) == len(behavior) or mask[starts].any():
        ids = [str(item.sample.id) for item in row]
        raise StreamRLError(
            f"samples {ids}: token ids, loss mask and logprobs differ in length, or a first token is trained"
        )
    trained = np.flatnonzero(mask)
    counts = [item.sample.trained_tokens for item in row]

    def per_token(values: list[float] | list[bool], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)).to(device)

    return MicroBatch(
        tokens_T=torch.from_numpy(tokens.astype(np.int64)).to(device),
        positions_T=torch.from_numpy(np.arange(len(tokens)) - np.repeat(starts, lengths)).to(device),
        layout=packed_layout(lengths, device),
        predictors_N=torch.from_numpy(trained - 1).to(device),
        targets_N=torch.from_numpy(tokens[trained].astype(np.int64)).to(device),
        behavior_N=torch.from_numpy(behavior[trained]).to(device),
        advantages_N=per_token([item.advantage for item in row], np.float32),
        weights_N=per_token([item.weight for item in row], np.float32),
        on_policy_N=per_token([item.sample.oldest_version == policy_version for item in row], np.bool_),
        sample_ids=tuple(str(item.sample.id) for item in row),
    )


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """Two tokens, none trained: keeps a rank in step with collectives when it has nothing to train."""
    nothing = torch.zeros(0, device=device)
    index = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens_T=torch.zeros(2, dtype=torch.int64, device=device),
        positions_T=torch.arange(2, device=device),
        layout=packed_layout([2], device),
        predictors_N=index,
        targets_N=index,
        behavior_N=nothing,
        advantages_N=nothing,
        weights_N=nothing,
        on_policy_N=torch.zeros(0, dtype=torch.bool, device=device),
        sample_ids=(),
    )
