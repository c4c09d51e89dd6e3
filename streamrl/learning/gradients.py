"""Forward and backward of one packed row: un-normalised sums only, so rows may run before their batch is closed."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamrl.errors import StreamRLError
from streamrl.learning.losses import grpo_loss, token_logprobs
from streamrl.learning.options import TrainerOptions
from streamrl.learning.packing import MicroBatch
from streamrl.learning.policy import PackedPolicy

LOGITS_IN_A_CHUNK = 1 << 24
"""Logits that exist at once (64 MiB of float32): the head runs over so many trained positions at a time."""
NAMED_SAMPLES = 8


@dataclass
class BatchSums:
    """What one rank added up over the open batch. Sums only: ranks are added to each other at the close.

    ``computed_tokens``: trained tokens that went through the model; groups without signal are counted in
    ``trained_tokens`` and not computed, as their gradient is exactly 0.
    """

    groups: int = 0
    samples: int = 0
    trained_tokens: int = 0
    groups_without_signal: int = 0
    packed_tokens: int = 0
    computed_tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    importance: float = 0.0
    importance_square: float = 0.0
    seconds: float = 0.0
    differences: list[Tensor] = field(default_factory=list)

    def add(self, sums: list[float]) -> None:
        """Add the token sums of one chunk, as ``_token_sums`` orders them."""
        self.loss += sums[0]
        self.entropy += sums[1]
        self.clipped += sums[2]
        self.kl += sums[3]
        self.importance += sums[4]
        self.importance_square += sums[5]


def _token_sums(loss: Tensor, entropy_N: Tensor, clipped_N: Tensor, difference_N: Tensor) -> list[float]:
    """Sums over the tokens of a chunk. ``difference_N``: trainer minus behaviour logprob."""
    importance_N = difference_N.exp()
    # An unbiased, never negative estimate of KL(behaviour, trainer): http://joschu.net/blog/kl-approx.html (k3).
    kl_N = importance_N - 1 - difference_N
    parts = (
        loss.detach(),
        entropy_N.sum(),
        clipped_N.sum(),
        kl_N.sum(),
        importance_N.sum(),
        importance_N.square().sum(),
    )
    values: list[float] = torch.stack([part.double() for part in parts]).tolist()
    return values


def accumulate(policy: PackedPolicy, row: MicroBatch, options: TrainerOptions, sums: BatchSums, batch_id: int) -> None:
    """Add the un-normalised gradient of a row to the parameters, and its sums to ``sums``.

    The head and the loss run over chunks of trained positions, each with its own backward, then one backward goes
    through the model: the logits of the whole row never exist, and nothing is computed twice.
    Raises ``StreamRLError`` naming batch and samples when the loss is not finite.
    """
    autocast = options.bfloat16_autocast and row.tokens_T.is_cuda
    with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
        hidden_ND = policy(row)
        gradients, before = [], sums.loss
        tokens = row.targets_N.numel()
        rows = max(1, LOGITS_IN_A_CHUNK // policy.hugging_face.config.get_text_config().vocab_size)
        for start in range(0, max(1, tokens), rows):
            part = slice(start, start + rows)
            leaf_ND = hidden_ND.detach()[part].requires_grad_()
            logprobs_N, entropy_N = token_logprobs(
                policy.head(leaf_ND), row.targets_N[part], temperature=options.temperature, top_p=options.top_p
            )
            token_loss = grpo_loss(
                logprobs_N,
                row.behavior_N[part],
                row.advantages_N[part],
                row.on_policy_N[part],
                clip_low=options.clip_low,
                clip_high=options.clip_high,
                importance_cap=options.importance_cap,
            )
            loss = (token_loss.loss_N * row.weights_N[part]).sum()
            torch.autograd.backward(loss)
            difference_N = logprobs_N.detach() - row.behavior_N[part]
            sums.add(_token_sums(loss, entropy_N, token_loss.clipped_N, difference_N))
            sums.differences.append(difference_N.abs())
            gradients.append(leaf_ND.grad)
    if not math.isfinite(sums.loss):
        names = ", ".join(row.sample_ids[:NAMED_SAMPLES])
        raise StreamRLError(
            f"the loss of batch {batch_id} is {sums.loss - before}: look at samples {names} "
            f"({len(row.sample_ids)} in the row); lower training.learning_rate if optim/grad_norm grew before"
        )
    torch.autograd.backward(hidden_ND, torch.cat(gradients) if len(gradients) > 1 else gradients[0])
    sums.packed_tokens += row.tokens_T.numel()
    sums.computed_tokens += tokens
