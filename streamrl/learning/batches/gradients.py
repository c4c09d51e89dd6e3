"""Forward and backward of one packed row. ``updates`` calls it in each trainer rank, row by row.

Gradients and sums stay un-normalised, so rows may run before their batch is closed."""

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
    """Sums over the tokens that went through the model. The close adds up the sums of all ranks, field by field.

    ``packed_tokens``: number of tokens of all rows.
    ``computed_tokens``: number of trained tokens of all rows. The sums are over these tokens, unless noted.
    ``on_policy_tokens``: number of trained tokens that the version which is trained sampled itself.
    ``kl``: estimate of KL(behaviour, trainer).
    ``importance``, ``importance_square``: importance ratio of trainer to behaviour policy, and its square.
    ``mismatch``: absolute difference of trainer and engine logprobs, over the ``on_policy_tokens`` only.
    ``unreplayed_tokens``: number of packed tokens whose experts no engine returned."""

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
    """Counts and sums of one rank over the open batch.

    ``samples``, ``loss_tokens``: divisors of the loss. Groups without signal count in both: their gradient is exactly
    0, so they are not computed. Truncated samples without loss count in ``samples``, and not in ``loss_tokens``.
    ``seconds``: time that preparation, forward and backward took.
    ``differences``: absolute difference of trainer and behaviour logprobs of each computed token, a tensor a row."""

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

    The head and the loss run over chunks of trained positions, each with its own backward. Then one backward goes
    through the model. So the logits of the whole row never exist, and no chunk is computed twice unless a sequence is
    longer than a chunk under an objective that needs whole sequences.
    Raises ``StreamRLError`` naming batch and samples when the loss is not finite."""
    separate_critic = critic is not None and critic.trunk is not None
    with compute_context(options, row.tokens_T.device):
        # A separate critic runs first: its activations are freed before the policy makes its own.
        critic_loss = _through_critic(critic if separate_critic else None, None, row, options)
        hidden_ND = policy(row)
        leaf_ND = hidden_ND.detach().requires_grad_()
        logprobs_N, entropy_N, losses = _through_head(policy, leaf_ND, row, options)
        critic_loss = critic_loss + _through_critic(None if separate_critic else critic, leaf_ND, row, options)
    if options.routing_replay is True and row.sample_ids:
        unreplayed = row.tokens_T.numel() if row.routed is None else row.routed.missing
        sums.tokens.unreplayed_tokens += unreplayed
    _add_sums(sums, row, logprobs_N, entropy_N, losses, critic_loss)
    if not math.isfinite(sums.tokens.loss + sums.tokens.value_loss):
        names = ", ".join(row.sample_ids[:NAMED_SAMPLES])
        raise StreamRLError(
            f"the loss of batch {batch_id} is not finite: look at samples {names} "
            f"({len(row.sample_ids)} in the row); lower training.learning_rate if optim/grad_norm grew before"
        )
    torch.autograd.backward(hidden_ND, leaf_ND.grad)


def _through_critic(critic: Critic | None, leaf_ND: Tensor | None, row: MicroBatch, options: TrainerOptions) -> Tensor:
    """Return the sum of the value loss; add its gradient to the critic and to ``leaf_ND``. 0 without a critic."""
    if critic is None:
        return row.inputs.weights_N.new_zeros(())
    losses_N = value_loss(options.objective, critic(row, leaf_ND), row.inputs)
    loss = (losses_N * row.inputs.weights_N).sum()
    torch.autograd.backward(options.objective.value_coefficient * loss)
    return loss.detach()


def _through_head(
    policy: PackedPolicy, leaf_ND: Tensor, row: MicroBatch, options: TrainerOptions
) -> tuple[Tensor, Tensor, TokenLoss]:
    """Return logprob, entropy and loss of every trained token, without gradient. Add the gradient of the loss to
    ``leaf_ND`` and to the head."""
    settings = options.objective
    off_policy = options.off_policy
    parts = chunks(policy, row.targets_N.numel())

    def processed(part: slice) -> tuple[Tensor, Tensor]:
        return processed_logprobs(
            policy, leaf_ND, row, part, options, entropy_gradient=settings.entropy_coefficient != 0
        )

    def loss_of(logprobs_N: Tensor, entropy_N: Tensor, inputs: TokenInputs) -> TokenLoss:
        losses = token_loss(settings, off_policy, logprobs_N, entropy_N, inputs)
        torch.autograd.backward((losses.loss_N * inputs.weights_N).sum())
        return losses._replace(loss_N=losses.loss_N.detach())

    sequences_are_split = len(parts) > 1 or row.full_row is not None
    if sequences_are_split and needs_whole_sequences(settings, off_policy):
        return _through_head_twice(parts, processed, loss_of, row)
    outcomes = []
    for part in parts:
        logprobs_N, entropy_N = processed(part)
        losses = loss_of(logprobs_N, entropy_N, row.inputs.part(part))
        outcomes.append((logprobs_N.detach(), entropy_N.detach(), losses))
    if len(outcomes) == 1:
        return outcomes[0]
    logprobs, entropies, token_losses = zip(*outcomes, strict=True)
    joined = TokenLoss(*(torch.cat(tensors) for tensors in zip(*token_losses, strict=True)))
    return torch.cat(logprobs), torch.cat(entropies), joined


def _through_head_twice(
    parts: list[slice],
    processed: Callable[[slice], tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor, Tensor, TokenInputs], TokenLoss],
    row: MicroBatch,
) -> tuple[Tensor, Tensor, TokenLoss]:
    """Do the same as ``_through_head`` where chunks or ranks split sequences: first the logprobs of all chunks without
    gradient, then their gradients chunk by chunk. Each rank of a context group computes the losses of the full row,
    and takes the gradients of its own tokens from them."""
    with torch.no_grad():
        outcomes = [processed(part) for part in parts]
    logprobs_N, entropy_N = (row.gather(torch.cat(tensors)).requires_grad_() for tensors in zip(*outcomes, strict=True))
    inputs = row.inputs
    indices: Tensor | slice = slice(None)
    if row.full_row is not None:
        inputs = row.full_row.inputs
        indices = row.full_row.indices_N
    losses = loss_of(logprobs_N, entropy_N, inputs)
    grads = [None if tensor.grad is None else tensor.grad[indices] for tensor in (logprobs_N, entropy_N)]
    for part in parts:
        outputs = zip(processed(part), grads, strict=True)
        pairs = [(output, grad[part]) for output, grad in outputs if output.requires_grad and grad is not None]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    rank_losses = TokenLoss(*(values_N[indices] for values_N in losses))
    return logprobs_N.detach()[indices], entropy_N.detach()[indices], rank_losses


def _add_sums(
    sums: BatchSums, row: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor, losses: TokenLoss, critic_loss: Tensor
) -> None:
    inputs = row.inputs
    # With several updates on a batch, the proximal logprobs are those of the policy that engines sampled with.
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
        # The unbiased, never negative estimate k3 of KL(behaviour, trainer): http://joschu.net/blog/kl-approx.html.
        kl=(importance_N - 1 - difference_N).sum(),
        importance=importance_N.sum(),
        importance_square=importance_N.square().sum(),
        mismatch=(difference_N.abs() * on_policy_N).sum(),
    )
    sums.differences.append(difference_N.abs())
