"""Forward and backward of one packed row. ``updates`` calls it in each trainer rank, row by row.

Gradients and sums stay un-normalised, so rows may run before their batch is closed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.base.errors import StreamRLError
from streamrl.learning.batches.processed_logprobs import processed_logprobs, teacher_divergence
from streamrl.learning.model.critic import Critic
from streamrl.learning.model.policy import MicroBatch, PackedPolicy, chunks, compute_context
from streamrl.learning.objective.logprobs import token_logprobs
from streamrl.learning.objective.objectives import TokenInputs, TokenLoss, needs_whole_sequences, token_loss, value_loss
from streamrl.learning.options import TrainerOptions

NAMED_SAMPLES = 8
FAR_NATS = 1.0
"""Difference of the logprobs of trainer and engine on one version beyond which a token counts as far off."""


@dataclass
class TokenSums:
    """Sums over the tokens that went through the model. The close adds up the sums of all ranks, field by field.

    ``packed_tokens``: number of tokens of all rows.
    ``computed_tokens``: number of trained tokens of all rows. The sums are over these tokens, unless noted.
    ``on_policy_tokens``: number of trained tokens that the version which is trained sampled itself.
    ``kl``: estimate of KL(behaviour, trainer).
    ``importance``, ``importance_square``: importance ratio of trainer to behaviour policy, and its square.
    ``mismatch``: absolute difference of trainer and engine logprobs, over the ``on_policy_tokens`` only.
    ``far_below``: number of the ``on_policy_tokens`` whose logprob is more than ``FAR_NATS`` below the engine's.
    ``unreplayed_tokens``: number of packed tokens whose experts no engine returned.
    ``kept_sets``: number of trained tokens with the kept set of the engine.
    ``imitated_tokens``, ``imitation``: number of imitated tokens, and their cross-entropy."""

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
    teacher_kl: float = 0.0
    kl: float = 0.0
    importance: float = 0.0
    importance_square: float = 0.0
    mismatch: float = 0.0
    far_below: float = 0.0
    unreplayed_tokens: float = 0.0
    kept_sets: float = 0.0
    imitated_tokens: float = 0.0
    imitation: float = 0.0

    def add(self, **sums: Tensor) -> None:
        """Add 0-d tensors by field name; one transfer from the device."""
        values: list[float] = torch.stack([value.detach().double() for value in sums.values()]).tolist()
        for name, value in zip(sums, values, strict=True):
            setattr(self, name, getattr(self, name) + value)


class ScoredRow(NamedTuple):
    """A row with the logprobs of its trained tokens, float32 [N]."""

    row: MicroBatch
    logprobs_N: Tensor


@dataclass
class BatchSums:
    """Counts and sums of one rank over the open batch.

    ``samples``, ``loss_tokens``: divisors of the loss. Groups without signal count in both: their gradient is exactly
    0, so they are not computed. Truncated samples without loss count in ``samples``, and not in ``loss_tokens``.
    ``seconds``: time that preparation, forward and backward took.
    ``differences``: absolute difference of trainer and behaviour logprobs of each computed token, a tensor a row.
    ``first_row``: first row that was computed, with its logprobs before the steps on the batch, where the objective
    tracks prompts."""

    groups: int = 0
    samples: int = 0
    trained_tokens: int = 0
    groups_without_signal: int = 0
    loss_tokens: int = 0
    seconds: float = 0.0
    tokens: TokenSums = field(default_factory=TokenSums)
    differences: list[Tensor] = field(default_factory=list)
    first_row: ScoredRow | None = None


class HeadOutputs(NamedTuple):
    """Results of the head for trained tokens: float32 [N] each. ``divergence_N``: divergence from the teacher over the
    vocabulary; 0 where it is no part of the loss."""

    logprobs_N: Tensor
    entropy_N: Tensor
    divergence_N: Tensor


class _Teacher(NamedTuple):
    """A teacher beside the policy. ``hidden_ND``: states of the teacher that predict the trained tokens of a row."""

    model: PackedPolicy
    hidden_ND: Tensor


def accumulate(
    policy: PackedPolicy,
    critic: Critic | None,
    row: MicroBatch,
    options: TrainerOptions,
    sums: BatchSums,
    batch_id: int,
    teacher: PackedPolicy | None = None,
) -> None:
    """Add the un-normalised gradient of a row to the parameters, and its sums to ``sums``. ``teacher``: model whose
    divergence over the vocabulary is a part of the loss; None: there is no such part.

    The head and the loss run over chunks of trained positions, each with its own backward. Then one backward goes
    through the model. So the logits of the whole row never exist, and no chunk is computed twice unless a sequence is
    longer than a chunk under an objective that needs whole sequences.
    Raises ``StreamRLError`` naming batch and samples when the loss is not finite."""
    separate_critic = critic is not None and critic.trunk is not None
    with compute_context(options, row.tokens_T.device):
        # A separate critic runs first: its activations are freed before the policy makes its own.
        critic_loss = _through_critic(critic if separate_critic else None, None, row, options)
        scored = None
        if teacher is not None:
            with torch.no_grad():
                scored = _Teacher(teacher, teacher(row._replace(routed=None)))  # its routers choose for themselves
        hidden_ND = policy(row)
        leaf_ND = hidden_ND.detach().requires_grad_()
        outputs, losses = _through_head(policy, leaf_ND, row, options, scored)
        trained_ND = leaf_ND[: row.targets_N.numel()]
        critic_loss = critic_loss + _through_critic(None if separate_critic else critic, trained_ND, row, options)
        _imitate(policy, leaf_ND, row, sums)
    if options.routing_replay is True and row.sample_ids:
        unreplayed = row.tokens_T.numel() if row.routed is None else row.routed.missing
        sums.tokens.unreplayed_tokens += unreplayed
    _add_sums(sums, row, outputs, losses, critic_loss)
    if options.objective.estimator.tracks_prompts and sums.first_row is None and row.targets_N.numel():
        sums.first_row = ScoredRow(row, outputs.logprobs_N)
    if not isfinite(sums.tokens.loss + sums.tokens.value_loss):
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


def _imitate(policy: PackedPolicy, leaf_ND: Tensor, row: MicroBatch, sums: BatchSums) -> None:
    """Add the gradient of the cross-entropy of the imitated tokens to ``leaf_ND`` and to the head. It is that of the
    model's own distribution: nobody sampled these tokens."""
    if row.imitated is None:
        return
    _, targets_M, weights_M = row.imitated
    first = row.targets_N.numel()
    sums.tokens.imitated_tokens += targets_M.numel()
    for part in chunks(policy, targets_M.numel()):
        logits_MV = policy.head(leaf_ND[first + part.start : first + part.stop])
        losses_M = -token_logprobs(logits_MV, targets_M[part])[0]
        loss = (losses_M * weights_M[part]).sum()
        torch.autograd.backward(loss)
        sums.tokens.add(imitation=losses_M.sum(), loss=loss)


def _through_head(
    policy: PackedPolicy, leaf_ND: Tensor, row: MicroBatch, options: TrainerOptions, teacher: _Teacher | None
) -> tuple[HeadOutputs, TokenLoss]:
    """Return outputs and loss of every trained token, without gradient. Add the gradient of the loss to ``leaf_ND`` and
    to the head."""
    settings = options.objective
    off_policy = options.off_policy
    parts = chunks(policy, row.targets_N.numel())

    def processed(part: slice) -> HeadOutputs:
        logits_NV = policy.head(leaf_ND[part])
        logprobs_N, entropy_N = processed_logprobs(
            logits_NV, row, part, options, entropy_gradient=settings.entropy_coefficient != 0
        )
        divergence_N = torch.zeros_like(entropy_N)
        if teacher is not None:
            with torch.no_grad():
                teacher_NV = teacher.model.head(teacher.hidden_ND[part])
            divergence_N = teacher_divergence(logits_NV, teacher_NV, row, part, options)
        return HeadOutputs(logprobs_N, entropy_N, divergence_N)

    def loss_of(outputs: HeadOutputs, inputs: TokenInputs) -> TokenLoss:
        divergence_N = None if teacher is None else outputs.divergence_N
        losses = token_loss(settings, off_policy, outputs.logprobs_N, outputs.entropy_N, inputs, divergence_N)
        torch.autograd.backward((losses.loss_N * inputs.weights_N).sum())
        return losses._replace(loss_N=losses.loss_N.detach())

    sequences_are_split = len(parts) > 1 or row.full_row is not None
    if sequences_are_split and needs_whole_sequences(settings, off_policy):
        return _through_head_twice(parts, processed, loss_of, row)
    outcomes = []
    token_losses = []
    for part in parts:
        outputs = processed(part)
        token_losses.append(loss_of(outputs, row.inputs.part(part)))
        outcomes.append(HeadOutputs(*(values_N.detach() for values_N in outputs)))
    if len(parts) == 1:
        return outcomes[0], token_losses[0]
    return _joined(outcomes), TokenLoss(*(torch.cat(tensors) for tensors in zip(*token_losses, strict=True)))


def _joined(outcomes: list[HeadOutputs]) -> HeadOutputs:
    """Join the outputs of chunks."""
    return HeadOutputs(*(torch.cat(tensors) for tensors in zip(*outcomes, strict=True)))


def _through_head_twice(
    parts: list[slice],
    processed: Callable[[slice], HeadOutputs],
    loss_of: Callable[[HeadOutputs, TokenInputs], TokenLoss],
    row: MicroBatch,
) -> tuple[HeadOutputs, TokenLoss]:
    """Do the same as ``_through_head`` where chunks or ranks split sequences: first the outputs of all chunks without
    gradient, then their gradients chunk by chunk. Each rank of a context group computes the losses of the full row,
    and takes the gradients of its own tokens from them."""
    with torch.no_grad():
        outcomes = [processed(part) for part in parts]
    full = HeadOutputs(*(row.gather(values_N).requires_grad_() for values_N in _joined(outcomes)))
    inputs = row.inputs
    indices: Tensor | slice = slice(None)
    if row.full_row is not None:
        inputs = row.full_row.inputs
        indices = row.full_row.indices_N
    losses = loss_of(full, inputs)
    grads = [None if values_N.grad is None else values_N.grad[indices] for values_N in full]
    for part in parts:
        outputs = zip(processed(part), grads, strict=True)
        pairs = [(output, grad[part]) for output, grad in outputs if output.requires_grad and grad is not None]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    rank_losses = TokenLoss(*(values_N[indices] for values_N in losses))
    return HeadOutputs(*(values_N.detach()[indices] for values_N in full)), rank_losses


def _add_sums(sums: BatchSums, row: MicroBatch, outputs: HeadOutputs, losses: TokenLoss, critic_loss: Tensor) -> None:
    inputs = row.inputs
    # With several updates on a batch, the proximal logprobs are those of the policy that engines sampled with.
    trainer_N = outputs.logprobs_N if inputs.proximal_N is None else inputs.proximal_N
    difference_N = trainer_N - inputs.behavior_N
    on_policy_N = inputs.staleness_N == 0
    importance_N = difference_N.exp()
    sums.tokens.packed_tokens += row.tokens_T.numel()
    sums.tokens.computed_tokens += row.targets_N.numel()
    sums.tokens.add(
        on_policy_tokens=on_policy_N.sum(),
        loss=(losses.loss_N * inputs.weights_N).sum(),
        value_loss=critic_loss,
        entropy=outputs.entropy_N.sum(),
        clipped=losses.clipped_N.sum(),
        masked=losses.masked_N.sum(),
        correction=losses.correction_N.sum(),
        reference_kl=losses.reference_kl_N.sum(),
        teacher_kl=losses.teacher_kl_N.sum(),
        # The unbiased, never negative estimate k3 of KL(behaviour, trainer): http://joschu.net/blog/kl-approx.html.
        kl=(importance_N - 1 - difference_N).sum(),
        importance=importance_N.sum(),
        importance_square=importance_N.square().sum(),
        mismatch=(difference_N.abs() * on_policy_N).sum(),
        far_below=((difference_N < -FAR_NATS) & on_policy_N).sum(),
    )
    if row.kept_NK is not None:
        sums.tokens.add(kept_sets=(row.kept_NK[:, 0] >= 0).sum())
    sums.differences.append(difference_N.abs())
