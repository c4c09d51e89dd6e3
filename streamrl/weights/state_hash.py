"""A 64-bit hash of a whole model that can be updated in proportion to what changed.

``H = sum over elements of mix(tensor name, flat index in the full tensor, bits)  mod 2**64``

It is additive over elements, so over shards, ranks and workers, in any order; and incremental:
``H' = H - terms(old bits) + terms(new bits)`` over the changed positions. It detects accidents (a lost
chunk, a wrong route, a stale rank), not an adversary: chunk digests do that.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import numpy.typing as npt

from streamrl.weights.bit_patterns import BitArray, PositionArray
from streamrl.weights.compiled_paths import worth_compiling

MODULUS = 2**64
_BLOCK = 1 << 15  # elements hashed at once: temporaries stay in the cache
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
VALUE = np.uint64(0xD6E8FEB86659FD93)


def tensor_key(name: str) -> np.uint64:
    """The 64-bit key of a tensor's checkpoint name."""
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def hash_range(name: str, offset: int, bits: BitArray) -> int:
    """Terms of the contiguous elements ``[offset, offset + bits.size)`` of a tensor, summed mod 2**64."""
    key, total = tensor_key(name), 0
    if worth_compiling(bits.size):
        return int(_compiled().sum_range(key, np.uint64(offset), bits))
    for start, stop in _blocks(bits.size):
        indices = np.arange(offset + start, offset + stop, dtype=np.uint64)
        total += int(_terms(key, indices, bits[start:stop]).sum(dtype=np.uint64))
    return total % MODULUS


def hash_elements(name: str, positions: PositionArray, bits: BitArray) -> int:
    """Terms of the elements at ``positions`` (int64 [n], flat in the full tensor), summed mod 2**64."""
    key, total = tensor_key(name), 0
    if worth_compiling(bits.size):
        return int(_compiled().sum_elements(key, positions, bits))
    for start, stop in _blocks(bits.size):
        indices = positions[start:stop].astype(np.uint64)
        total += int(_terms(key, indices, bits[start:stop]).sum(dtype=np.uint64))
    return total % MODULUS


def _compiled() -> ModuleType:
    return importlib.import_module("streamrl.weights.compiled_hash")


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _BLOCK):
        yield start, min(start + _BLOCK, count)


def _terms(key: np.uint64, indices: npt.NDArray[np.uint64], bits: BitArray) -> npt.NDArray[np.uint64]:
    """Two rounds of the splitmix64 finaliser: one over the place, one over place and value."""
    mixed = indices * GOLDEN
    mixed += key
    _finalise(mixed)
    mixed ^= (bits.astype(np.uint64) + np.uint64(1)) * VALUE
    _finalise(mixed)
    return mixed


def _finalise(x: npt.NDArray[np.uint64]) -> None:
    x ^= x >> np.uint64(30)
    x *= FIRST
    x ^= x >> np.uint64(27)
    x *= SECOND
    x ^= x >> np.uint64(31)
