"""Supervised training of a small policy on demonstrations, for ``warm_up``, ``chats`` and ``examples``.

A demonstration is the token ids of ``<bos>prompt completion<eos>``, and the number of tokens of the prompt, ``<bos>``
among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

Demonstration = tuple[list[int], int]
Batch = TypeVar("Batch")
PEAK = 3e-3
WARMUP_STEPS = 50
DECAY_SHARE = 0.4
LOWEST_SHARE = 0.02
"""Share of the peak rate below which the rate does not fall."""


def completion_losses(
    policy: PreTrainedModel, batch: Sequence[tuple[list[int], int | Sequence[int]]], padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the losses of the completion tokens of ``batch``.

    An example is token ids with the length of the prompt, or, for a chat of several completions, with the places of all
    completion tokens. Returns the cross-entropy of each completion token, float32 ``(tokens,)``; all ids, int64
    ``(samples, width)``; and a mask of the ids that a completion token follows, bool ``(samples, width - 1)``."""
    width = max(len(ids) for ids, _ in batch)
    token_ids = torch.full((len(batch), width), padding)
    targets = torch.full((len(batch), width), -100)
    for row, (ids, completion) in enumerate(batch):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        places = list(range(completion, len(ids)) if isinstance(completion, int) else completion)
        targets[row, places] = token_ids[row, places]
    predicted = targets[:, 1:] != -100
    hidden = policy.model(token_ids).last_hidden_state[:, :-1][predicted]
    return cross_entropy(policy.lm_head(hidden), targets[:, 1:][predicted], reduction="none"), token_ids, predicted


def imitate(
    policy: PreTrainedModel, batches: Iterable[Batch], loss_of: Callable[[Batch], Tensor], steps: int
) -> Iterator[float]:
    """Take a step of AdamW on each batch and yield its loss. The rate rises over the first 50 steps, holds, and falls
    linearly over the last 40 % of ``steps``."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.01)
    for step, batch in enumerate(batches):
        rate = min(1.0, (step + 1) / WARMUP_STEPS, max(LOWEST_SHARE, (1 - step / steps) / DECAY_SHARE))
        for group in optimizer.param_groups:
            group["lr"] = PEAK * rate
        loss = loss_of(batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        yield loss.item()
