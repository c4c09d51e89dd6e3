"""Forward and backward of one packed row: un-normalised sums only, so rows may run before their batch is closed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamrl.base.errors import StreamRLError
from streamrl.learning.batches.processed_logprobs import processed_logprobs
from streamrl.learning.model.critic import Critic
from streamrl.learning.model.policy import MicroBatch, PackedPolicy, chunks, compute_context
from streamrl.learning.objective.objectives import TokenInputs, TokenLoss, needs_whole_sequences, token_loss, value_loss
from streamrl.learning.options import TrainerOptions

NAMED_SAMPLES = 8


@dataclass
class TokenSums:
    """Sums over the tokens that went through the model. Ranks are added to each other at the close, field by field.

    ``mismatch``: absolute difference of trainer and engine logprobs over ``on_policy_tokens``, those that the version
    which is trained sampled itself. ``unreplayed_tokens``: whose experts no engine has returned."""

    packed_tokens: float = 0.0
    computed_tokens: float = 0.0
    on_policy_tokens: float = 0.0
    loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    masked: float = 0.0
    correction: float = 0.0
    reference_kl: float = 0.0
    kl: float = 0.0
    importance: float = 0.0
    importance_square: float = 0.0
    mismatch: float = 0.0
    unreplayed_tokens: float = 0.0

    def add(self, **sums: Tensor) -> None:
        """Add 0-d tensors by field name; one transfer from the device."""
        values: list[float] = torch.stack([value.detach().double() for value in sums.values()]).tolist()
        for name, value in zip(sums, values, strict=True):
            setattr(self, name, getattr(self, name) + value)


@dataclass
class BatchSums:
    """Counts and sums of one rank over the open batch. ``loss_tokens``, ``samples``: divisors of the loss; groups
    without signal count, as their gradient is exactly 0, and so are not computed. Tokens of truncated samples that are
    left out do not count; the samples do."""

    groups: int = 0
    samples: int = 0
    trained_tokens: int = 0
    groups_without_signal: int = 0
    loss_tokens: int = 0
    seconds: float = 0.0
    tokens: TokenSums = field(default_factory=TokenSums)
    differences: list[Tensor] = field(default_factory=list)


def accumulate(
    policy: PackedPolicy,
    critic: Critic | None,
    row: MicroBatch,
    options: TrainerOptions,
    sums: BatchSums,
    batch_id: int,
) -> None:
    """Add the un-normalised gradient of a row to the parameters, and its sums to ``sums``.

    The head and the loss run over chunks of trained positions, each with its own backward, then one backward goes
    through the model: the logits of the whole row never exist, and nothing is computed twice unless a sequence is
    longer than a chunk under an objective that needs it whole.
    Raises ``StreamRLError`` naming batch and samples when the loss is not finite."""
    alone = critic is not None and critic.trunk is not None
    with compute_context(options, row.tokens_T.device):
        # A model of its own first: its activations are gone before those of the policy are made.
        critic_loss = _through_critic(critic if alone else None, None, row, options)
        hidden_ND = policy(row)
        leaf_ND = hidden_ND.detach().requires_grad_()
        logprobs_N, entropy_N, losses = _through_head(policy, leaf_ND, row, options)
        critic_loss = critic_loss + _through_critic(None if alone else critic, leaf_ND, row, options)
    if options.routing_replay is True and row.sample_ids:
        sums.tokens.unreplayed_tokens += row.tokens_T.numel() if row.routed is None else row.routed.missing
    _add_sums(sums, row, logprobs_N, entropy_N, losses, critic_loss)
    if not math.isfinite(sums.tokens.loss + sums.tokens.value_loss):
        names = ", ".join(row.sample_ids[:NAMED_SAMPLES])
        raise StreamRLError(
            f"the loss of batch {batch_id} is not finite: look at samples {names} "
            f"({len(row.sample_ids)} in the row); lower training.learning_rate if optim/grad_norm grew before"
        )
    torch.autograd.backward(hidden_ND, leaf_ND.grad)


def _through_critic(critic: Critic | None, leaf_ND: Tensor | None, row: MicroBatch, options: TrainerOptions) -> Tensor:
    """Sum of the value loss, its gradient added to the critic and to ``leaf_ND``; 0 without a critic."""
    if critic is None:
        return row.inputs.weights_N.new_zeros(())
    losses_N = value_loss(options.objective, critic(row, leaf_ND), row.inputs)
    found = (losses_N * row.inputs.weights_N).sum()
    torch.autograd.backward(options.objective.value_coefficient * found)
    return found.detach()


def _through_head(
    policy: PackedPolicy, leaf_ND: Tensor, row: MicroBatch, options: TrainerOptions
) -> tuple[Tensor, Tensor, TokenLoss]:
    """Loss of every trained token, its gradient added to ``leaf_ND`` and to the head. All returned without gradient."""
    settings = options.objective
    off_policy = options.off_policy
    parts = chunks(policy, row.targets_N.numel())

    def processed(part: slice) -> tuple[Tensor, Tensor]:
        return processed_logprobs(
            policy, leaf_ND, row, part, options, entropy_gradient=settings.entropy_coefficient != 0
        )

    def loss_of(logprobs_N: Tensor, entropy_N: Tensor, inputs: TokenInputs) -> TokenLoss:
        found = token_loss(settings, off_policy, logprobs_N, entropy_N, inputs)
        torch.autograd.backward((found.loss_N * inputs.weights_N).sum())
        return found._replace(loss_N=found.loss_N.detach())

    if (len(parts) > 1 or row.cut) and needs_whole_sequences(settings, off_policy):
        return _through_head_twice(parts, processed, loss_of, row)
    pieces = []
    for part in parts:
        logprobs_N, entropy_N = processed(part)
        losses = loss_of(logprobs_N, entropy_N, row.inputs.part(part))
        pieces.append((logprobs_N.detach(), entropy_N.detach(), losses))
    if len(pieces) == 1:
        return pieces[0]
    logprobs, entropies, token_losses = zip(*pieces, strict=True)
    joined = TokenLoss(*(torch.cat(parts) for parts in zip(*token_losses, strict=True)))
    return torch.cat(logprobs), torch.cat(entropies), joined


def _through_head_twice(
    parts: list[slice],
    processed: Callable[[slice], tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor, Tensor, TokenInputs], TokenLoss],
    row: MicroBatch,
) -> tuple[Tensor, Tensor, TokenLoss]:
    """Chunks, or ranks, cut sequences: logprobs of all first, then their gradients chunk by chunk. Each rank of a
    context group computes the losses of the whole row, and takes from there the gradients of its own tokens."""
    with torch.no_grad():
        pieces = [processed(part) for part in parts]
    logprobs_N, entropy_N = (row.whole(torch.cat(found)).requires_grad_() for found in zip(*pieces, strict=True))
    losses = loss_of(logprobs_N, entropy_N, row.cut.inputs if row.cut else row.inputs)
    own = row.cut.own_N if row.cut else slice(None)
    grads = [None if tensor.grad is None else tensor.grad[own] for tensor in (logprobs_N, entropy_N)]
    for part in parts:
        outputs = zip(processed(part), grads, strict=True)
        pairs = [(output, grad[part]) for output, grad in outputs if output.requires_grad and grad is not None]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    return logprobs_N.detach()[own], entropy_N.detach()[own], TokenLoss(*(values[own] for values in losses))


def _add_sums(
    sums: BatchSums, row: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor, losses: TokenLoss, critic_loss: Tensor
) -> None:
    inputs = row.inputs
    # With several updates on a batch the first logprobs are those of the policy that engines sampled with.
    trainer_N = logprobs_N if inputs.proximal_N is None else inputs.proximal_N
    difference_N = trainer_N - inputs.behavior_N
    on_policy_N = inputs.staleness_N == 0
    importance_N = difference_N.exp()
    sums.tokens.packed_tokens += row.tokens_T.numel()
    sums.tokens.computed_tokens += row.targets_N.numel()
    sums.tokens.add(
        on_policy_tokens=on_policy_N.sum(),
        loss=(losses.loss_N * inputs.weights_N).sum(),
        value_loss=critic_loss,
        entropy=entropy_N.sum(),
        clipped=losses.clipped_N.sum(),
        masked=losses.masked_N.sum(),
        correction=losses.correction_N.sum(),
        reference_kl=losses.reference_kl_N.sum(),
        # An unbiased, never negative estimate of KL(behaviour, trainer): http://joschu.net/blog/kl-approx.html (k3).
        kl=(importance_N - 1 - difference_N).sum(),
        importance=importance_N.sum(),
        importance_square=importance_N.square().sum(),
        mismatch=(difference_N.abs() * on_policy_N).sum(),
    )
    sums.differences.append(difference_N.abs())
