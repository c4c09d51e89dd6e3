"""The state hash of consecutive elements on a GPU, in one pass over them: ``tensor_hash`` takes some 25, of 8 bytes an
element each. ``device_writes.py`` imports this file where a part is on a GPU, whose vLLM brings triton."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from streamrl.base.messages import HASH_MODULUS
from streamrl.weights.codec.state_hash import tensor_key
from streamrl.weights.vllm.tensor_hash import signed

_BLOCK = 1024


def hash_run(name: str, first: int, bits: Tensor) -> int:
    """Sum the terms of the elements from flat index ``first`` on, mod 2**64. ``bits``: patterns, int16 [n]."""
    count = bits.numel()
    sums = torch.empty(triton.cdiv(count, _BLOCK), dtype=torch.int64, device=bits.device)
    _sum_blocks[(sums.numel(),)](bits, sums, signed(tensor_key(name)), first, count, BLOCK=_BLOCK)
    return int(sums.sum()) % HASH_MODULUS


@triton.jit  # type: ignore[untyped-decorator]
def _sum_blocks(bits, sums, key, first, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pattern = (tl.load(bits + place, mask=place < count, other=0).to(tl.int64) & 0xFFFF).to(tl.uint64)
    index = (place + first).to(tl.uint64)
    term = _mixed(_mixed(index * 0x9E3779B97F4A7C15 + key.to(tl.uint64)) ^ ((pattern + 1) * 0xD6E8FEB86659FD93))
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(place < count, term, 0).to(tl.int64)))


@triton.jit
def _mixed(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)
