"""The sums of ``state_hash`` over many elements, compiled by numba: one pass, without temporaries or the GIL."""

# Typed by numba, at the first call: everything is uint64 but the patterns (uint16 or uint32) and positions (int64).
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import numba  # type: ignore[import-untyped]
import numpy as np

from streamrl.weights.state_hash import FIRST, GOLDEN, SECOND, VALUE

_compiled = numba.njit(nogil=True, cache=True, boundscheck=False)


@_compiled
def _finalise(x):
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


@_compiled
def _term(key, index, pattern):
    return _finalise(_finalise(index * GOLDEN + key) ^ ((np.uint64(pattern) + np.uint64(1)) * VALUE))


@_compiled
def sum_range(key, offset, bits):
    """Terms of the elements from flat index ``offset`` (uint64) on."""
    total = np.uint64(0)
    for i in range(bits.size):
        total += _term(key, offset + np.uint64(i), bits[i])
    return total


@_compiled
def sum_elements(key, positions, bits):
    """Terms of the elements at ``positions``."""
    total = np.uint64(0)
    for i in range(bits.size):
        total += _term(key, np.uint64(positions[i]), bits[i])
    return total
