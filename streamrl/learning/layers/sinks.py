"""Attention sinks: each head has one more score, which takes a part of the weight and has no value (gpt-oss).

``attention`` calls it in each trainer rank, for models whose layers give it sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad


class WithSink(NamedTuple):
    """Queries, keys, values ``[sequences, heads, tokens, D or D + 1]`` and a mask ``[queries, keys]`` in which every
    query sees one key more, at the front: its score is the sink of the head, and its value 0."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor


def with_sink(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks_H: Tensor, scaling: float) -> WithSink:
    """Add the sink to attention with scores times ``scaling``. Queries get an element that only the added key has."""
    element = (sinks_H.to(query.dtype) / scaling)[None, :, None, None].expand(*query.shape[:3], 1)
    more_keys = pad(key, (0, 1, 1, 0))
    is_sink = pad(torch.ones_like(key[:1, :1, :1, :1]), (key.shape[-1], 0, 0, key.shape[-2]))
    return WithSink(
        torch.cat([query, element], dim=-1),
        more_keys + is_sink,
        pad(value, (0, 0, 1, 0)),
        pad(mask, (1, 0), value=True),
    )


def flash_knows_sinks() -> bool:
    """Return whether this torch has the operators of its flash kernel that ``flash_with_sink`` calls."""
    from torch.nn.attention import varlen

    return hasattr(varlen, "_varlen_attn") and hasattr(varlen, "_varlen_attn_backward")


class _FlashWithSink(torch.autograd.Function):
    """torch's flash kernel, whose outputs are scaled by the weight that the sink leaves.

    With L the log of the sum of a query's scores and S its sink, all weights shrink by exp(L - L'), where L' =
    log(exp(L) + exp(S)). The kernel's backward computes weights from the L and the outputs that it is given: with L'
    and the scaled outputs its gradients are those of attention with a sink. The sink's own weight exp(S - L') meets a
    value of 0, so that the gradient of S is minus this weight times the product of outputs and their gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, *bounds: Any) -> Tensor:
        output, log_sums_HT, random = torch.ops.torch_attn._varlen_attn(query, key, value, *bounds)
        with_sink_HT = torch.logaddexp(log_sums_HT, sinks_H.float()[:, None])
        share_TH1 = (log_sums_HT - with_sink_HT).exp().T[..., None]
        output = (output.float() * share_TH1).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks_H, output, with_sink_HT, random)
        ctx.bounds = bounds
        return cast("Tensor", output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_H, output, with_sink_HT, random = ctx.saved_tensors
        starts_q, starts_k, longest_q, longest_k, is_causal, scale, window = ctx.bounds[:7]
        gradient = gradients[0].contiguous()
        bounds = (starts_q, starts_k, longest_q, longest_k, is_causal, random, scale, window)
        of_inputs = torch.ops.torch_attn._varlen_attn_backward(
            gradient, query, key, value, output, with_sink_HT, *bounds
        )
        weight_HT = (sinks_H.float()[:, None] - with_sink_HT).exp()
        of_sinks_H = -(weight_HT * (gradient.float() * output.float()).sum(-1).T).sum(-1)
        return (*of_inputs, of_sinks_H.to(sinks_H.dtype), *[None] * len(ctx.bounds))


_apply = cast("Callable[..., Tensor]", _FlashWithSink.apply)


def flash_with_sink(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, bounds: tuple[Any, ...]) -> Tensor:
    """Attend as ``varlen_attn`` does, with a sink: ``[T, heads, D]`` in and out. ``bounds``: arguments of its operator
    after the values."""
    return _apply(query, key, value, sinks_H, *bounds)
