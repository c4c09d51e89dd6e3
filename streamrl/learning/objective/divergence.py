"""Exact divergence of the policy from its teacher, over the vocabulary.

``batches.gradients`` calls it in each trainer rank, chunk by chunk of trained tokens. Shapes: ``N`` trained tokens,
``V`` vocabulary."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class _Divergence(torch.autograd.Function):
    """Generalised Jensen-Shannon divergence of each row, with one [N, V] buffer: its gradient by the policy's logits,
    which the forward computes."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, teacher_NV: Tensor, beta: float) -> Tensor:
        divergence_N: Tensor
        log_policy_NV = logits_NV.log_softmax(-1)
        log_teacher_NV = teacher_NV.log_softmax(-1)
        policy_NV = log_policy_NV.exp()
        if beta == 0:
            divergence_N = _kl(log_teacher_NV, log_policy_NV)
            ctx.save_for_backward(policy_NV.sub_(log_teacher_NV.exp()))
            return divergence_N
        # log of the ratio of the policy to what it is compared with: the teacher, or the mixture of both.
        if beta == 1:
            log_ratio_NV = log_policy_NV - log_teacher_NV
            of_policy_N = torch.linalg.vecdot(policy_NV, log_ratio_NV)
            divergence_N = of_policy_N
        else:
            log_mixture_NV = torch.logaddexp(log_policy_NV + math.log1p(-beta), log_teacher_NV + math.log(beta))
            log_ratio_NV = log_policy_NV - log_mixture_NV
            of_policy_N = torch.linalg.vecdot(policy_NV, log_ratio_NV)
            divergence_N = beta * _kl(log_teacher_NV, log_mixture_NV) + (1 - beta) * of_policy_N
            policy_NV.mul_(1 - beta)
        ctx.save_for_backward(policy_NV.mul_(log_ratio_NV.sub_(of_policy_N[:, None])))
        return divergence_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient_NV: Tensor
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV * gradients[0][:, None], None, None


def _kl(log_first_NV: Tensor, log_second_NV: Tensor) -> Tensor:
    """KL(first, second) of each row. [N]."""
    divergence_N: Tensor = torch.linalg.vecdot(log_first_NV.exp(), log_first_NV - log_second_NV)
    return divergence_N


def divergence(logits_NV: Tensor, teacher_NV: Tensor, beta: float) -> Tensor:
    """beta KL(teacher, m) + (1 - beta) KL(policy, m) with m = beta teacher + (1 - beta) policy, in nats, differentiable
    by ``logits_NV`` once. [N]. GKD's generalised Jensen-Shannon divergence (arXiv 2306.13649, as TRL writes it), with
    its limits divided by beta (1 - beta): 1 is KL(policy, teacher), 0 is KL(teacher, policy).

    ``logits_NV``, ``teacher_NV``: finite logits of both, processed alike."""
    with torch.autocast(logits_NV.device.type, enabled=False):  # autocast would compute the products in bfloat16
        result: Tensor = _Divergence.apply(logits_NV, teacher_NV, beta)  # type: ignore[no-untyped-call]
    return result
