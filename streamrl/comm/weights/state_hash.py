"""A 64-bit hash of a whole model that can be updated in proportion to what changed.

``H = sum over elements of mix(tensor name, flat index in the full tensor, bits)  mod 2**64``

It is additive over elements, so over shards, ranks and workers, in any order; and incremental:
``H' = H - terms(old bits) + terms(new bits)`` over the changed positions. It detects accidents (a lost
chunk, a wrong route, a stale rank), not an adversary: chunk digests do that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from streamrl.comm.weights.bit_patterns import BitArray, PositionArray

MODULUS = 2**64
_BLOCK = 1 << 15  # elements hashed at once: temporaries stay in the cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_VALUE = np.uint64(0xD6E8FEB86659FD93)


def tensor_key(name: str) -> np.uint64:
    """The 64-bit key of a tensor's checkpoint name."""
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def hash_range(name: str, offset: int, bits: BitArray) -> int:
    """Terms of the contiguous elements ``[offset, offset + bits.size)`` of a tensor, summed mod 2**64."""
    key, total = tensor_key(name), 0
    for start, stop in _blocks(bits.size):
        indices = np.arange(offset + start, offset + stop, dtype=np.uint64)
        total += int(_terms(key, indices, bits[start:stop]).sum(dtype=np.uint64))
    return total % MODULUS


def hash_elements(name: str, positions: PositionArray, bits: BitArray) -> int:
    """Terms of the elements at ``positions`` (int64 [n], flat in the full tensor), summed mod 2**64."""
    key, total = tensor_key(name), 0
    for start, stop in _blocks(bits.size):
        indices = positions[start:stop].astype(np.uint64)
        total += int(_terms(key, indices, bits[start:stop]).sum(dtype=np.uint64))
    return total % MODULUS


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, _BLOCK):
        yield start, min(start + _BLOCK, count)


def _terms(key: np.uint64, indices: npt.NDArray[np.uint64], bits: BitArray) -> npt.NDArray[np.uint64]:
    """Two rounds of the splitmix64 finaliser: one over the place, one over place and value."""
    mixed = indices * _GOLDEN
    mixed += key
    _finalise(mixed)
    mixed ^= (bits.astype(np.uint64) + np.uint64(1)) * _VALUE
    _finalise(mixed)
    return mixed


def _finalise(x: npt.NDArray[np.uint64]) -> None:
    x ^= x >> np.uint64(30)
    x *= _FIRST
    x ^= x >> np.uint64(27)
    x *= _SECOND
    x ^= x >> np.uint64(31)
