"""Attention over packed sequences, through transformers' registries: no model code is changed.

``packing`` makes a layout for each row, and the model's layers call ``packed_attention``, in each trainer rank. A
micro-batch is one row of ``T`` tokens. transformers' own packing (by ``position_ids``) builds a T x T mask, which is 3
to 7 times slower on CPU. Here sequences of nearly equal length are gathered into buckets, and padded inside attention
only: each bucket is one ``scaled_dot_product_attention``. On CUDA the full row is one flash variable-length call.

A sequence may continue another sequence, its prefix: its tokens attend to the prefix and to themselves. Outside of
attention the tokens of the prefix are computed once for all sequences that continue it.

With context parallel a rank has the queries of its slice of the row, and the keys of the row up to its slice's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad, scaled_dot_product_attention

from streamrl.base.errors import StreamRLError
from streamrl.learning.layers.sinks import flash_knows_sinks, flash_with_sink, with_sink
from streamrl.learning.model.context_parallel import ContextGroup, SharedKeys, gather_rows
from streamrl.learning.model.hugging_face import AttentionInterface, AttentionMaskInterface
from streamrl.recipe.sections import BFLOAT16_CAPABILITY

ATTENTION_NAME = "streamrl_packed"
BUCKET_RATIO = 1.25
BUCKET_SLACK = 8
"""Sequences share a bucket when the longest is at most 1.25 times, or 8 tokens, longer than the shortest."""
LONG_PREFIX = 32
"""Length from which on the queries of a prefix are computed once, if it is longer than all its continuations. The
queries of a shorter prefix are repeated in every continuation: plain causal attention without a mask is faster then."""

LARGEST_FLASH_HEAD = 256
"""Elements of a head up to which flash kernels go, in steps of eight."""

Places = NDArray[np.int64]


class PackedSequence(NamedTuple):
    """Tokens ``[start, start + length)`` of a row. ``prefix``: index of the sequence that they continue, -1: none."""

    start: int
    length: int
    prefix: int = -1


class Bucket(NamedTuple):
    """A number of ``sequences`` that are padded to equal sizes: ``queries`` tokens, which are the last ones of the
    ``keys`` tokens that they attend to."""

    sequences: int
    queries: int
    keys: int


class Spread(Struct, frozen=True, eq=False):
    """Indices that copy the ``T`` tokens of a row to the ``P`` places of its buckets. All are int64.

    ``tokens_P``: token of each place.
    ``places_T``: first place of each token.
    ``repeats_R``: further places of tokens that are copied more than once. All other places are padding.
    ``repeated_R``: token at each of these further places."""

    tokens_P: Tensor
    places_T: Tensor
    repeats_R: Tensor
    repeated_R: Tensor


class FlashBoundaries(Struct, frozen=True, eq=False):
    """Arguments of the variable-length kernel.

    ``queries``, ``keys``: cumulative lengths, int32 [sequences + 1].
    ``keys_K``: indices in the row of all keys, one sequence after the other; None: the tokens of the row in order."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    keys_K: Tensor | None


class PackedLayout(Struct, frozen=True, eq=False):
    """Layout of the sequences of one row. It is an object and not a tuple, as a compiled layer must not specialise on
    its numbers.

    ``queries``: places of the queries in the buckets.
    ``keys``: places of the keys and values in the buckets.
    ``flash``: arguments of the flash kernel; None: the buckets are computed.
    ``longest``: number of tokens that a token attends to at most.
    ``shared``: keys that come from other ranks; None: the rank has the full row."""

    buckets: tuple[Bucket, ...]
    queries: Spread
    keys: Spread
    flash: FlashBoundaries | None
    longest: int
    shared: SharedKeys | None = None


class _Attended(NamedTuple):
    """Places in the row of the queries and of the keys of one sequence of a bucket."""

    queries: Places
    keys: Places


def has_bfloat16(device: torch.device) -> bool:
    """Return whether ``device`` is a GPU that multiplies matrices in bfloat16. torch's variable-length flash kernel,
    which takes 16-bit values, runs on the same GPUs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY


def packed_layout(
    sequences: Sequence[PackedSequence], device: torch.device, context: ContextGroup | None = None
) -> PackedLayout:
    """Make the layout of ``sequences``, which follow each other in the row without a gap. With a ``context``, the
    layout is for this rank's slice of the row, which has a multiple of ``context.size`` tokens."""
    places = [np.arange(sequence.start, sequence.start + sequence.length) for sequence in sequences]
    keys = [
        places[index] if sequence.prefix < 0 else np.concatenate([places[sequence.prefix], places[index]])
        for index, sequence in enumerate(sequences)
    ]
    items = [_Attended(*pair) for pair in zip(places, keys, strict=True)]
    row_tokens = sequences[-1].start + sequences[-1].length
    if context is None:
        query_tokens = row_tokens
        key_tokens = row_tokens
        attended = _attended(sequences, places, keys)
        shared = None
    else:
        items, shared_places = _slice_items(items, context.slice_of_rank(row_tokens))
        attended = items
        shared = SharedKeys(context, torch.from_numpy(shared_places).to(device))
        query_tokens = row_tokens // context.size
        key_tokens = len(shared_places)
    buckets = _buckets(attended)
    shapes = tuple(
        Bucket(len(bucket), max(len(item.queries) for item in bucket), max(len(item.keys) for item in bucket))
        for bucket in buckets
    )
    spread_queries = _spread([[item.queries for item in bucket] for bucket in buckets], query_tokens, device)
    spread_keys = spread_queries
    if shared is not None or any(bucket.queries != bucket.keys for bucket in shapes):
        spread_keys = _spread([[item.keys for item in bucket] for bucket in buckets], key_tokens, device)
    return PackedLayout(
        buckets=shapes,
        queries=spread_queries,
        keys=spread_keys,
        flash=_flash_boundaries(items, device) if has_bfloat16(device) else None,
        longest=max(len(item) for item in keys),
        shared=shared,
    )


def _slice_items(items: list[_Attended], part: slice) -> tuple[list[_Attended], Places]:
    """Pair the queries of a slice of the row with their keys. Queries are numbered from the start of the slice, keys
    among the tokens that the slice attends to. The places in the row of these tokens are the second result."""
    sliced = []
    for queries, keys in items:
        first, last = np.searchsorted(queries, (part.start, part.stop))
        if first < last:
            sliced.append(_Attended(queries[first:last] - part.start, keys[: len(keys) - len(queries) + last]))
    key_places = np.unique(np.concatenate([item.keys for item in sliced]))
    return [item._replace(keys=np.searchsorted(key_places, item.keys)) for item in sliced], key_places


def _attended(sequences: Sequence[PackedSequence], places: list[Places], keys: list[Places]) -> list[_Attended]:
    """Pair queries with their keys. Tokens of a short prefix are queries in each of its continuations, and have no item
    of their own."""
    longest_after: dict[int, int] = {}
    for sequence in sequences:
        longest_after[sequence.prefix] = max(longest_after.get(sequence.prefix, 0), sequence.length)

    def is_repeated(prefix: int) -> bool:
        return len(places[prefix]) < max(LONG_PREFIX, longest_after[prefix])

    items = []
    for index, sequence in enumerate(sequences):
        if sequence.prefix >= 0:
            queries = keys[index] if is_repeated(sequence.prefix) else places[index]
            items.append(_Attended(queries, keys[index]))
        elif index not in longest_after or not is_repeated(index):
            items.append(_Attended(places[index], places[index]))
    return items


def _buckets(items: list[_Attended]) -> list[list[_Attended]]:
    """Group sequences of nearly equal length. A bucket has one mask, so sequences that continue a long prefix share a
    bucket only with sequences whose prefix is as long."""
    ordered = sorted(items, key=lambda item: (len(item.keys) - len(item.queries), len(item.queries)))
    buckets: list[list[_Attended]] = []
    for item in ordered:
        if buckets:
            first = buckets[-1][0]
            prefix = len(first.keys) - len(first.queries)
            limit = max(BUCKET_RATIO * len(first.queries), len(first.queries) + BUCKET_SLACK)
            if prefix == len(item.keys) - len(item.queries) and len(item.queries) <= limit:
                buckets[-1].append(item)
                continue
        buckets.append([item])
    return buckets


def _spread(buckets: list[list[Places]], total: int, device: torch.device) -> Spread:
    """Spread the sequences of ``buckets``, one after the other, each padded with its last token to the longest of its
    bucket. ``total``: number of different tokens."""
    sequences = [sequence for bucket in buckets for sequence in bucket]
    widths = []
    for bucket in buckets:
        longest = max(len(sequence) for sequence in bucket)
        widths += [longest] * len(bucket)
    padded = [
        np.pad(sequence, (0, width - len(sequence)), mode="edge")
        for sequence, width in zip(sequences, widths, strict=True)
    ]
    tokens = np.concatenate(padded)
    starts = np.cumsum([0, *widths[:-1]])
    # Places that are no padding, and the token at each.
    places = np.concatenate([start + np.arange(len(s)) for s, start in zip(sequences, starts, strict=True)])
    placed_tokens = tokens[places]
    order = np.arange(len(placed_tokens))
    first_order = np.full(total, -1)
    first_order[placed_tokens[::-1]] = order[::-1]  # in reverse: the first copy of a token is written last
    repeats = order[first_order[placed_tokens] != order]

    def tensor(values: Places) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Spread(tensor(tokens), tensor(places[first_order]), tensor(places[repeats]), tensor(placed_tokens[repeats]))


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
    """Copy tokens to their places: ``rows_T.. -> rows_P..``.

    torch's own backward adds row by row into zeros; here the backward is a gather and few additions. The gradient of
    padding is not read: it is 0, as no real query attends to padding and its outputs are dropped."""

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
    """Read the first place of each token: ``rows_P.. -> rows_T..``. All other places get a gradient of 0."""

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


class Reach(NamedTuple):
    """Part of a sequence that a token attends to.

    ``window``: number of tokens, itself included.
    ``chunk``: a token attends to those of its own chunk of so many tokens.
    ``sinks_H``: sink of each head; None: there are none."""

    window: int
    chunk: int
    sinks_H: Tensor | None


def packed_attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | int | None,
    *,
    packed: PackedLayout | None = None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence, for transformers: query ``[1, heads, T, D]``, out ``[1, T, heads, D]``.

    ``attention_mask``: chunk to which attention is restricted (``chunk_of_mask``); None: it is not.
    ``sliding_window``: number of tokens that a token attends to, itself included.
    ``s_aux``: sink of each head (``sinks``).
    Raises ``StreamRLError`` for soft caps of the scores, and for a model that does not hand on ``packed``."""
    if packed is None:
        raise StreamRLError("its layers do not hand keyword arguments on to their attention, which has to know the row")
    if softcap is not None:
        raise StreamRLError(f"its attention caps scores at {softcap}, which no packed kernel here does")
    reach = Reach(
        window=packed.longest if sliding_window is None else min(sliding_window, packed.longest),
        chunk=attention_mask if isinstance(attention_mask, int) else packed.longest,
        sinks_H=s_aux,
    )
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if packed.shared is not None:
        keys_and_values = gather_rows(torch.cat([key.to(value.dtype), value], dim=-1), packed.shared)
        key, value = torch.split(keys_and_values, [key.shape[-1], value.shape[-1]], dim=-1)
    if packed.flash is not None and _fits_flash(query, value, reach, packed.longest):
        # Under autocast rope and norms have multiplied queries and keys by float32 tables.
        query = query.to(value.dtype)
        key = key.to(value.dtype)
        return _flash_attention(query, key, value, packed.flash, packed.longest, scaling, reach)[None], None
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
        _bucket_attention(q, k, v, bucket, scaling, reach)
        for q, k, v, bucket in zip(*parts, packed.buckets, strict=True)
    ]
    return collect_rows(torch.cat(outputs), packed.queries)[None], None


def _bucket_attention(
    query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scaling: float, reach: Reach
) -> Tensor:
    """Attention of one bucket: ``[places, heads, D]`` in and out. The mask is causal from the bottom right: the last
    query attends to the last keys."""
    q, k, v = (x.reshape(bucket.sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    mask = None
    if bucket.queries != bucket.keys or min(reach.window, reach.chunk) < bucket.keys or reach.sinks_H is not None:
        all_pairs = torch.ones(bucket.queries, bucket.keys, dtype=torch.bool, device=query.device)
        prefix = bucket.keys - bucket.queries
        mask = all_pairs.tril(prefix).triu(prefix - reach.window + 1)
        if reach.chunk < bucket.keys:
            chunks_K = torch.arange(bucket.keys, device=query.device) // reach.chunk
            mask &= chunks_K[prefix:, None] == chunks_K
    grouped = q.shape[1] != k.shape[1]
    if reach.sinks_H is not None and mask is not None:
        q, k, v, mask = with_sink(q, k, v, mask, reach.sinks_H, scaling)
    if grouped and q.device.type != "cpu":
        # On a GPU the only kernel that takes grouped heads in float32 keeps the scores of all pairs.
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        grouped = False
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).flatten(0, 1)


def _fits_flash(query: Tensor, value: Tensor, reach: Reach, longest: int) -> bool:
    """Whether torch's flash kernel computes this attention."""
    sizes_fit = (
        query.shape[-1] <= LARGEST_FLASH_HEAD and query.shape[-1] % 8 == 0 and value.shape[-1] <= query.shape[-1]
    )
    masks_fit = reach.chunk >= longest and (reach.sinks_H is None or flash_knows_sinks())
    return value.dtype in (torch.bfloat16, torch.float16) and sizes_fit and masks_fit


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, flash: FlashBoundaries, longest: int, scaling: float, reach: Reach
) -> Tensor:
    """One flash kernel over the row, causal from the bottom right: ``[T, heads, D]`` in and out."""
    from torch.nn.attention.varlen import varlen_attn

    width = value.shape[-1]
    value = pad(value, (0, key.shape[-1] - width))  # latent attention has wider keys than values
    if flash.keys_K is not None:
        key = key.index_select(0, flash.keys_K)
        value = value.index_select(0, flash.keys_K)
    queries_per_key = query.shape[1] // key.shape[1]
    grouping: dict[str, Any] = {}
    if queries_per_key > 1 and "enable_gqa" in signature(varlen_attn).parameters:
        grouping = {"enable_gqa": True}
    elif queries_per_key > 1:  # torch 2.11
        key, value = (tensor.repeat_interleave(queries_per_key, dim=1) for tensor in (key, value))
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    window = (reach.window - 1 if reach.window < longest else -1, 0)
    if reach.sinks_H is not None:
        lengths = (flash.queries, flash.keys, flash.longest_query, longest)
        bounds = (*lengths, window == (-1, 0), scaling, list(window), *grouping.values())
        return flash_with_sink(query, key, value, reach.sinks_H, bounds)[..., :width]
    output = varlen_attn(
        query,
        key,
        value,
        flash.queries,
        flash.keys,
        flash.longest_query,
        longest,
        scale=scaling,
        window_size=window,
        **grouping,
    )
    assert isinstance(output, Tensor)
    return output[..., :width]


def chunk_of_mask(*_: Any, config: Any = None, local_size: int | None = None, **__: Any) -> int | None:
    """Return, in the place of a mask, the chunk to which it restricts attention; None for any other mask, as
    ``packed_attention`` takes the layout of the row and the window of the layer instead."""
    if local_size is None or local_size == getattr(config, "sliding_window", None):
        return None
    return local_size if local_size == getattr(config, "attention_chunk_size", None) else None


def register_packed_attention() -> str:
    """Make ``attn_implementation=ATTENTION_NAME`` known to transformers. Idempotent; returns the name."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, chunk_of_mask)
    return ATTENTION_NAME


def register_uncompiled_attention() -> str:
    """Make ``packed_attention`` known to transformers under a second name, with a mark that ``torch.compile`` skips it.
    Only this name has the mark, which imports the compiler. Idempotent; returns the name."""
    name = f"{ATTENTION_NAME}_uncompiled"
    AttentionInterface.register(name, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(name, chunk_of_mask)
    return name
