"""The terms of the state hash, summed where a tensor is. ``codec.kernels`` has the same sum for arrays, compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamrl.base.messages import HASH_MODULUS
from streamrl.weights.codec.kernels import FIRST, GOLDEN, SECOND, VALUE
from streamrl.weights.codec.state_hash import tensor_key


def hash_tensor(name: str, positions: Tensor, bits: Tensor) -> int:
    """Sum the terms of the elements at ``positions`` (int64 [n], flat in the full tensor), mod 2**64. ``bits``:
    bfloat16 or float16 patterns of these elements, int16 [n], on the same device."""
    places = _mixed(positions * signed(GOLDEN) + signed(tensor_key(name)))
    values = ((bits.to(torch.int64) & 0xFFFF) + 1) * signed(VALUE)
    return int(_mixed(places ^ values).sum()) % HASH_MODULUS


def _mixed(words: Tensor) -> Tensor:
    """Return splitmix64's finaliser of each word. Products of int64 are those of uint64, modulo 2**64."""
    words = (words ^ _shifted(words, 30)) * signed(FIRST)
    words = (words ^ _shifted(words, 27)) * signed(SECOND)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros from the left: torch copies the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def signed(word: Any) -> int:
    """Return the int64 with the bits of a uint64."""
    return (int(word) + HASH_MODULUS // 2) % HASH_MODULUS - HASH_MODULUS // 2
