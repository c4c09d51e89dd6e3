"""The state hash: a 64-bit hash of all weights of a model, whose update takes time in proportion to the changes.

``H = sum over elements of mix(tensor name, flat index in the full tensor, bits)  mod 2**64``

The publisher computes it in each trainer rank, the replica and the live weights compute it in each vLLM worker. The
hash is additive over elements, so over shards, ranks and workers, in any order. It is incremental: ``H' = H - terms(old
bits) + terms(new bits)`` over the changed positions. It detects accidents (a lost chunk, a wrong route, a stale rank);
against an adversary there are the digests of chunks."""

from __future__ import annotations

import hashlib

import numpy as np

from streamrl.weights.codec.bits import BitArray, PositionArray
from streamrl.weights.codec.kernels import frozen, hash_at, hash_from


def tensor_key(name: str) -> np.uint64:
    """Return the 64-bit key of a tensor's checkpoint name."""
    return np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def hash_range(name: str, offset: int, bits: BitArray) -> int:
    """Sum the terms of the contiguous elements ``[offset, offset + bits.size)`` of a tensor, mod 2**64."""
    return int(hash_from(tensor_key(name), np.uint64(offset), frozen(bits)))


def hash_elements(name: str, positions: PositionArray, bits: BitArray) -> int:
    """Sum the terms of the elements at ``positions`` (int64 [n], flat in the full tensor), mod 2**64."""
    return int(hash_at(tensor_key(name), frozen(positions), frozen(bits)))
