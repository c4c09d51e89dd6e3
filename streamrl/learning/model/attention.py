"""Attention over packed sequences, through transformers' registries: no model code is changed.

A micro-batch is one row of ``T`` tokens. transformers' own packing (by ``position_ids``) builds a T x T mask, 3 to 7
times slower on CPU. Here sequences of nearly equal length are gathered into buckets, padded inside attention only: one
``scaled_dot_product_attention`` each. On CUDA the whole row is one flash variable-length call.

A sequence may continue another one, its prefix: its tokens attend to the prefix and to themselves, and the tokens of
the prefix go through the rest of the model once for all that continue it.

With context parallel a rank has the queries of its piece of the row, and the keys of the row up to there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.context import Context, SharedKeys, gather_rows
from streamrl.learning.model.hugging_face import AttentionInterface, AttentionMaskInterface

ATTENTION_NAME = "streamrl_packed"
BUCKET_RATIO = 1.25
BUCKET_SLACK = 8
"""Sequences share a bucket when the longest is at most 1.25 times, or 8 tokens, longer than the shortest."""
LONG_PREFIX = 32
"""A prefix this long and longer than what continues it is attended once; the queries of a shorter one are repeated in
every continuation, where plain causal attention without a mask is faster."""

FLASH_DEVICES = ("cuda",)
"""Device types with torch's variable-length flash kernel, which takes 16-bit values."""

Places = NDArray[np.int64]


class PackedSequence(NamedTuple):
    """Tokens ``[start, start + length)`` of a row. ``prefix``: index of the sequence that it continues, -1: none."""

    start: int
    length: int
    prefix: int = -1


class Bucket(NamedTuple):
    """A number of sequences with equal sizes: ``queries`` tokens, the last ones of the ``keys`` tokens that they attend
    to."""

    sequences: int
    queries: int
    keys: int


class Spread(msgspec.Struct, frozen=True, eq=False):
    """Copies the ``T`` tokens of a row to the ``P`` places of its buckets. All int64.

    ``tokens_P``: what is copied to each place. ``places_T``: one place of each token. ``repeats_R``, ``repeated_R``:
    further places, and the token there, of tokens that are copied more than once. Other places are padding."""

    tokens_P: Tensor
    places_T: Tensor
    repeats_R: Tensor
    repeated_R: Tensor


class FlashBoundaries(msgspec.Struct, frozen=True, eq=False):
    """Arguments of the variable-length kernel: int32 [sequences + 1] cumulative lengths. ``keys_K`` None: the row as it
    is."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    keys_K: Tensor | None


class PackedLayout(msgspec.Struct, frozen=True, eq=False):
    """Layout of the sequences of one row. An object, not a tuple: a compiled layer must not specialise on its numbers.
    ``longest``: tokens that a token attends to at most. ``shared``: keys that come from other ranks (None: the row is
    not cut)."""

    buckets: tuple[Bucket, ...]
    queries: Spread
    keys: Spread
    flash: FlashBoundaries | None
    longest: int
    shared: SharedKeys | None = None


class _Attended(NamedTuple):
    """A sequence as its bucket sees it: places in the row of its queries and of its keys."""

    queries: Places
    keys: Places


def packed_layout(
    sequences: Sequence[PackedSequence], device: torch.device, context: Context | None = None
) -> PackedLayout:
    """Layout of these sequences, which follow each other in the row without a gap; of this rank's piece of it, with a
    ``context``. The row has a multiple of ``context.size`` tokens then."""
    places = [np.arange(sequence.start, sequence.start + sequence.length) for sequence in sequences]
    keys = [
        places[index] if sequence.prefix < 0 else np.concatenate([places[sequence.prefix], places[index]])
        for index, sequence in enumerate(sequences)
    ]
    whole = [_Attended(*pair) for pair in zip(places, keys, strict=True)]
    tokens = keyed = sequences[-1].start + sequences[-1].length
    if context is None:
        items = whole
        attended = _attended(sequences, places, keys)
        shared = None
    else:
        items, used = _cut(whole, context.piece(tokens))
        attended = items
        shared = SharedKeys(context, torch.from_numpy(used).to(device))
        tokens = tokens // context.size
        keyed = len(used)
    buckets = _buckets(attended)
    queries = _spread([item.queries for bucket in buckets for item in bucket], buckets, tokens, device, own=True)
    shapes = tuple(Bucket(len(b), max(len(i.queries) for i in b), max(len(i.keys) for i in b)) for b in buckets)
    repeated = shared is not None or any(bucket.queries != bucket.keys for bucket in shapes)
    return PackedLayout(
        buckets=shapes,
        queries=queries,
        keys=_spread([i.keys for b in buckets for i in b], buckets, keyed, device, own=False) if repeated else queries,
        flash=_flash_boundaries(items, device) if device.type in FLASH_DEVICES else None,
        longest=max(len(item) for item in keys),
        shared=shared,
    )


def _cut(items: list[_Attended], piece: slice) -> tuple[list[_Attended], Places]:
    """Pair the queries of a piece of the row, numbered from its start, with their keys, numbered among those that any
    of them needs: their places in the row are returned too."""
    found = []
    for queries, keys in items:
        first, last = np.searchsorted(queries, (piece.start, piece.stop))
        if first < last:
            found.append(_Attended(queries[first:last] - piece.start, keys[: len(keys) - len(queries) + last]))
    used = np.unique(np.concatenate([item.keys for item in found]))
    return [item._replace(keys=np.searchsorted(used, item.keys)) for item in found], used


def _attended(sequences: Sequence[PackedSequence], places: list[Places], keys: list[Places]) -> list[_Attended]:
    """Pair queries with their keys. Tokens of a short prefix are queries in each of its continuations, and not
    alone."""
    longest_after: dict[int, int] = {}
    for sequence in sequences:
        longest_after[sequence.prefix] = max(longest_after.get(sequence.prefix, 0), sequence.length)

    def repeated(prefix: int) -> bool:
        return len(places[prefix]) < max(LONG_PREFIX, longest_after[prefix])

    items = []
    for index, sequence in enumerate(sequences):
        if sequence.prefix >= 0:
            items.append(_Attended(keys[index] if repeated(sequence.prefix) else places[index], keys[index]))
        elif index not in longest_after or not repeated(index):
            items.append(_Attended(places[index], places[index]))
    return items


def _buckets(items: list[_Attended]) -> list[list[_Attended]]:
    """Neighbours in length; those that continue a long prefix only with others whose prefix is as long (one mask)."""
    ordered = sorted(items, key=lambda item: (len(item.keys) - len(item.queries), len(item.queries)))
    buckets: list[list[_Attended]] = []
    for item in ordered:
        if buckets:
            first = buckets[-1][0]
            before = len(first.keys) - len(first.queries)
            limit = max(BUCKET_RATIO * len(first.queries), len(first.queries) + BUCKET_SLACK)
            if before == len(item.keys) - len(item.queries) and len(item.queries) <= limit:
                buckets[-1].append(item)
                continue
        buckets.append([item])
    return buckets


def _spread(
    sequences: list[Places], buckets: list[list[_Attended]], total: int, device: torch.device, *, own: bool
) -> Spread:
    """Places of these sequences, one after the other, each padded with its last token to the longest of its bucket."""
    widths = [max(len(item.queries if own else item.keys) for item in bucket) for bucket in buckets]
    widths = [width for bucket, width in zip(buckets, widths, strict=True) for _ in bucket]
    tokens = np.concatenate([np.pad(s, (0, w - len(s)), mode="edge") for s, w in zip(sequences, widths, strict=True)])
    starts = np.cumsum([0, *widths[:-1]])
    filled = np.concatenate([first + np.arange(len(s)) for s, first in zip(sequences, starts, strict=True)])
    filling = tokens[filled]
    first_places = np.full(total, -1)
    where = np.arange(len(filling))
    first_places[filling[::-1]] = where[::-1]
    repeats = where[first_places[filling] != where]

    def tensor(values: Places) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Spread(tensor(tokens), tensor(filled[first_places]), tensor(filled[repeats]), tensor(filling[repeats]))


def _flash_boundaries(items: list[_Attended], device: torch.device) -> FlashBoundaries:
    def cumulative(lengths: list[int]) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device)

    keys = np.concatenate([item.keys for item in items])
    return FlashBoundaries(
        queries=cumulative([len(item.queries) for item in items]),
        keys=cumulative([len(item.keys) for item in items]),
        longest_query=max(len(item.queries) for item in items),
        keys_K=None if np.array_equal(keys, np.arange(len(keys))) else torch.from_numpy(keys).to(device),
    )


class _SpreadRows(torch.autograd.Function):
    """``rows_T.. -> rows_P..``. torch's own backward adds row by row into zeros; here it is a gather and few additions.
    The gradient of padding is not read: it is 0, as no real query attends to it and its outputs are dropped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spread: Spread) -> Tensor:
        ctx.spread = spread
        return rows.index_select(0, spread.tokens_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        spread = ctx.spread
        result = gradient.index_select(0, spread.places_T)
        if spread.repeats_R.numel():
            result.index_add_(0, spread.repeated_R, gradient.index_select(0, spread.repeats_R))
        return result, None


class _CollectRows(torch.autograd.Function):
    """``rows_P.. -> rows_T..``: one place of each token; the others get a gradient of 0."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, spread: Spread) -> Tensor:
        ctx.spread = spread
        return rows.index_select(0, spread.places_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        spread = ctx.spread
        result = gradient.new_zeros(spread.tokens_P.numel(), *gradient.shape[1:])
        return result.index_copy_(0, spread.places_T, gradient), None


spread_rows = cast("Callable[[Tensor, Spread], Tensor]", _SpreadRows.apply)
collect_rows = cast("Callable[[Tensor, Spread], Tensor]", _CollectRows.apply)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout | None = None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence, for transformers: query ``[1, heads, T, D]``, out ``[1, T, heads, D]``.

    ``sliding_window``: a token sees so many, itself included. Raises ``StreamRLError`` for soft caps of the scores, and
    for a model that does not hand on ``packed``."""
    if packed is None:
        raise StreamRLError("its layers do not hand keyword arguments on to their attention, which has to know the row")
    if softcap is not None:
        raise StreamRLError(f"its attention caps scores at {softcap}, which no packed kernel here does")
    window = packed.longest if sliding_window is None else min(sliding_window, packed.longest)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.shared is not None:
        both = gather_rows(torch.cat([key.to(value.dtype), value], dim=-1), packed.shared)
        key, value = torch.split(both, [key.shape[-1], value.shape[-1]], dim=-1)
    if packed.flash is not None and value.dtype in (torch.bfloat16, torch.float16):
        # Under autocast rope and norms have multiplied queries and keys by float32 tables.
        query = query.to(value.dtype)
        key = key.to(value.dtype)
        return _flash_attention(query, key, value, packed.flash, packed.longest, scaling, window)[None], None
    queries = spread_rows(query, packed.queries)
    keys = spread_rows(key, packed.keys)
    values = spread_rows(value, packed.keys)
    key_sizes = [bucket.sequences * bucket.keys for bucket in packed.buckets]
    parts = (
        torch.split(queries, [bucket.sequences * bucket.queries for bucket in packed.buckets]),
        torch.split(keys, key_sizes),
        torch.split(values, key_sizes),
    )
    outputs = [
        _bucket_attention(q, k, v, bucket, scaling, window)
        for q, k, v, bucket in zip(*parts, packed.buckets, strict=True)
    ]
    return collect_rows(torch.cat(outputs), packed.queries)[None], None


def _bucket_attention(query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scaling: float, window: int) -> Tensor:
    """``[places, heads, D]`` in and out. The mask is causal from the bottom right: the last query sees the last
    ``window`` keys."""
    q, k, v = (x.reshape(bucket.sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    mask = None
    if bucket.queries != bucket.keys or window < bucket.keys:
        everything = torch.ones(bucket.queries, bucket.keys, dtype=torch.bool, device=query.device)
        before = bucket.keys - bucket.queries
        mask = everything.tril(before).triu(before - window + 1)
    grouped = q.shape[1] != k.shape[1]
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).flatten(0, 1)


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, flash: FlashBoundaries, longest: int, scaling: float, window: int
) -> Tensor:
    """One flash kernel over the row, causal from the bottom right: ``[T, heads, D]`` in and out."""
    from torch.nn.attention.varlen import varlen_attn

    if flash.keys_K is not None:
        key = key.index_select(0, flash.keys_K)
        value = value.index_select(0, flash.keys_K)
    heads_each = query.shape[1] // key.shape[1]
    grouping: dict[str, Any] = {}
    if heads_each > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        grouping = {"enable_gqa": True}
    elif heads_each > 1:  # torch 2.11
        key, value = (x.repeat_interleave(heads_each, dim=1) for x in (key, value))
    output = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        flash.queries,
        flash.keys,
        flash.longest_query,
        longest,
        scale=scaling,
        window_size=(window - 1 if window < longest else -1, 0),
        **grouping,
    )
    assert isinstance(output, Tensor)
    return output


def no_mask(*_: Any, **__: Any) -> None:
    """The mask function that goes with ``packed_attention``: the layout says all."""
    return


def register_packed_attention() -> str:
    """Make ``attn_implementation=ATTENTION_NAME`` known to transformers. Idempotent; returns the name."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
    return ATTENTION_NAME


def register_uncompiled_attention() -> str:
    """The same function, which ``torch.compile`` leaves alone. Not marked for all: that would import the compiler."""
    name = f"{ATTENTION_NAME}_uncompiled"
    AttentionInterface.register(name, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(name, no_mask)
    return name
