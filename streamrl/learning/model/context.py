"""Context parallel: a packed row is cut over the ranks of a group into contiguous pieces of as many tokens.

A rank computes the hidden states, logprobs and losses of its own piece; its attention gathers keys and values of all
pieces, and the gradients of those are summed where they came from. Everything else of a decoder layer sees one token at
a time. So the sum of the gradients of all ranks is that of the row, which is how FSDP2 reduces them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.learning.options import TrainerOptions


class Context(NamedTuple):
    """The ``size`` ranks of ``group``, over which each row is cut; this one has piece ``number``."""

    group: Any
    number: int
    size: int

    def piece(self, tokens: int) -> slice:
        """Places of this rank's tokens in a row of so many, a multiple of ``size``."""
        own = tokens // self.size
        return slice(self.number * own, (self.number + 1) * own)

    def joined(self, own_N: Tensor, own: Tensor, tokens: int) -> Tensor:
        """Values of all trained tokens of a row, [tokens], of which ``own_N`` are those with the indices ``own``. No
        gradient. Collective."""
        whole = own_N.new_zeros(tokens).index_copy_(0, own, own_N.detach())
        dist.all_reduce(whole, group=self.group)
        return whole


class SharedKeys(msgspec.Struct, frozen=True, eq=False):
    """``tokens_U``: int64, places in the row of those tokens that the tokens of this rank's piece attend to."""

    context: Context
    tokens_U: Tensor


def context_of(options: TrainerOptions) -> Context | None:
    """The context group of this rank: ranks count first along tensors, then along the row. Collective."""
    size = options.context_parallel_size
    tensor = options.tensor_parallel_size
    if size == 1:
        return None
    ranks = torch.arange(options.ranks).view(-1, size, tensor).transpose(1, 2).reshape(-1, size)
    group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        ranks.tolist(), timeout=timedelta(seconds=options.collective_timeout_s)
    )
    return Context(group, options.rank // tensor % size, size)


class _GatherRows(torch.autograd.Function):
    """``rows_T.. -> rows_U..``. A token gets the sum of the gradients that it has on the ranks that attend to it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: SharedKeys) -> Tensor:
        ctx.shared = shared
        ctx.own = len(rows)
        context = shared.context
        whole = rows.new_empty(ctx.own * context.size, *rows.shape[1:])
        dist.all_gather(list(whole.chunk(context.size)), rows.contiguous(), group=context.group)
        return whole.index_select(0, shared.tokens_U)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        context = ctx.shared.context
        whole = gradient.new_zeros(ctx.own * context.size, *gradient.shape[1:])
        whole.index_copy_(0, ctx.shared.tokens_U, gradient)
        own = gradient.new_empty(ctx.own, *gradient.shape[1:])
        dist.reduce_scatter(own, list(whole.chunk(context.size)), group=context.group)
        return own, None


gather_rows = cast("Callable[[Tensor, SharedKeys], Tensor]", _GatherRows.apply)
