"""Torch's flash kernel for rows of sequences (``varlen_attn``) by its documentation, with what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

FIRST_CAPABILITY = (8, 0)
LARGEST_HEAD = 256
_TYPES = (torch.bfloat16, torch.float16)


def variable_length_attention(
    kernel: Any, host: Any, device_of: Callable[[torch.Tensor], Any], refusal: Callable[..., Exception]
) -> Any:
    """What stands in the place of ``kernel``. ``host`` has the cards and what was seen."""

    def varlen_attn(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, **options: Any
    ) -> torch.Tensor:
        host.seen.calls["varlen_attn"] += 1
        rows = {"query": query, "key": key, "value": value}
        ends = {"cu_seq_q": cu_seq_q, "cu_seq_k": cu_seq_k}
        on_host = [name for name, one in (rows | ends).items() if getattr(device_of(one), "type", "cpu") != "cuda"]
        problems = [f"{name} is on the host" for name in on_host]
        problems += _problems(rows, ends, (max_q, max_k), grouped=bool(options.get("enable_gqa")))
        if any(card.capability < FIRST_CAPABILITY for card in host.cards):
            problems.append("FlashAttention only supports Ampere GPUs or newer.")
        if problems:
            raise refusal(RuntimeError, f"varlen_attn: {'; '.join(problems)}")
        return _attention(query, key, value, cu_seq_q.tolist(), cu_seq_k.tolist(), options)

    varlen_attn.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
    return varlen_attn


def _problems(rows: dict[str, Any], ends: dict[str, Any], longest: tuple[Any, Any], *, grouped: bool) -> Iterator[str]:
    for name, one in rows.items():
        if one.dtype not in _TYPES:
            yield f"{name} is {one.dtype}, and the flash kernel takes float16 and bfloat16"
        if one.stride(-1) != 1:
            yield f"the last dimension of {name} is not contiguous"
    for name, one in ends.items():
        if one.dtype is not torch.int32:
            yield f"{name} is {one.dtype}, not int32"
    size = rows["query"].shape[-1]
    if size % 8 or size > LARGEST_HEAD:
        yield f"heads of {size} values: a multiple of 8 up to {LARGEST_HEAD} is taken"
    if rows["query"].shape[1] != rows["key"].shape[1] and not grouped:
        yield f"{rows['query'].shape[1]} and {rows['key'].shape[1]} heads without enable_gqa"
    for name, end, bound in zip(("query", "key"), ends.values(), longest, strict=True):
        if type(bound) is not int:
            yield f"the longest {name} is {type(bound).__name__}, not int"
            continue
        places = end.tolist()
        if places[-1] != len(rows[name]):
            yield f"boundaries end at {places[-1]} of {len(rows[name])} tokens of {name}"
        if any(after - before > bound for before, after in pairwise(places)):
            yield f"a sequence of {name} is longer than {bound}"


def _attention(
    query: Any, key: Any, value: Any, query_ends: list[int], key_ends: list[int], options: dict[str, Any]
) -> torch.Tensor:
    """Each sequence by itself, in float32; the last query sees up to the last key."""
    scale = options.get("scale") or query.shape[-1] ** -0.5
    before, after = options.get("window_size", (-1, -1))
    outputs = []
    for (q_from, q_to), (k_from, k_to) in zip(pairwise(query_ends), pairwise(key_ends), strict=True):
        q, k, v = (one.transpose(0, 1).float() for one in (query[q_from:q_to], key[k_from:k_to], value[k_from:k_to]))
        repeats = q.shape[0] // k.shape[0]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        keys, queries = k.shape[1], q.shape[1]
        place = torch.arange(queries, device=query.device)[:, None] + keys - queries
        other = torch.arange(keys, device=query.device)[None]
        visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        if after >= 0:
            visible = visible & (other <= place + after)
        if before >= 0:
            visible = visible & (other >= place - before)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
    return torch.cat(outputs)
