"""Context parallel: the ranks of a group split each packed row into contiguous slices of equal numbers of tokens.

A rank computes the hidden states, logprobs and losses of its own slice. Its attention gathers keys and values of all
slices, and their gradients are summed on the ranks that they came from. All other parts of a decoder layer see one
token at a time. So the sum of the gradients of all ranks is the gradient of the row, and FSDP2 reduces with that sum.
``policy``, ``packing`` and ``attention`` call it in each trainer rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from streamrl.learning.options import TrainerOptions


class ContextGroup(NamedTuple):
    """The ``size`` ranks of ``group``, which split each row; this rank has slice ``number``."""

    group: Any
    number: int
    size: int

    def slice_of_rank(self, tokens: int) -> slice:
        """Slice of this rank in a row of ``tokens`` tokens, a multiple of ``size``."""
        tokens_per_rank = tokens // self.size
        return slice(self.number * tokens_per_rank, (self.number + 1) * tokens_per_rank)

    def gather(self, values_N: Tensor, indices_N: Tensor, trained_tokens: int) -> Tensor:
        """Gather the values of all trained tokens of a row, [trained_tokens]; this rank has ``values_N``, at
        ``indices_N``. No gradient. Collective."""
        all_values = values_N.new_zeros(trained_tokens).index_copy_(0, indices_N, values_N.detach())
        dist.all_reduce(all_values, group=self.group)
        return all_values


class SharedKeys(Struct, frozen=True, eq=False):
    """Keys and values that a rank gathers. ``tokens_U``: int64, places in the row of the tokens that this rank's slice
    attends to."""

    context: ContextGroup
    tokens_U: Tensor


def context_of(options: TrainerOptions) -> ContextGroup | None:
    """Make the context group of this rank; None without context parallel. Ranks count first along tensors, then along
    the row. Collective."""
    size = options.context_parallel_size
    tensor = options.tensor_parallel_size
    if size == 1:
        return None
    ranks = torch.arange(options.ranks).view(-1, size, tensor).transpose(1, 2).reshape(-1, size)
    group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        ranks.tolist(), timeout=timedelta(seconds=options.collective_timeout_s)
    )
    return ContextGroup(group, options.rank // tensor % size, size)


class _GatherRows(torch.autograd.Function):
    """Gather keys and values: ``rows_T.. -> rows_U..``. A token gets the sum of its gradients on the ranks that attend
    to it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: SharedKeys) -> Tensor:
        ctx.shared = shared
        ctx.rank_tokens = len(rows)
        context = shared.context
        all_rows = rows.new_empty(ctx.rank_tokens * context.size, *rows.shape[1:])
        dist.all_gather(list(all_rows.chunk(context.size)), rows.contiguous(), group=context.group)
        return all_rows.index_select(0, shared.tokens_U)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        context = ctx.shared.context
        all_gradients = gradient.new_zeros(ctx.rank_tokens * context.size, *gradient.shape[1:])
        all_gradients.index_copy_(0, ctx.shared.tokens_U, gradient)
        rank_gradient = gradient.new_empty(ctx.rank_tokens, *gradient.shape[1:])
        dist.reduce_scatter(rank_gradient, list(all_gradients.chunk(context.size)), group=context.group)
        return rank_gradient, None


gather_rows = cast("Callable[[Tensor, SharedKeys], Tensor]", _GatherRows.apply)
