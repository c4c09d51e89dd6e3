"""The loops over every element of a unit, compiled by numba: one pass each, without temporaries and without the GIL.

Compiled at the first call on a machine (a second or two in all), then kept beside this file. Arguments go in by
``frozen``, so that arrays that may and may not be written to share one compiled form."""

# Typed by numba, at the first call: patterns are uint16 or uint32, what counts is int64, hashes are uint64.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np


def compiled(function):
    """``function`` compiled; kept on disk where some directory for it can be written."""
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither beside the file nor below the home directory
        return numba.njit(**options)(function)


_NEVER = np.int64(1) << 62

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
VALUE = np.uint64(0xD6E8FEB86659FD93)


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array, contiguous and not writable; a copy only where it lies apart."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


@compiled
def count_exponents(bits, lowest, counts):
    """Add to ``counts`` how many patterns have each exponent; ``lowest``: its lowest bit."""
    last = counts.size - 1
    for i in range(bits.size):
        counts[np.int64(bits[i] >> lowest) & last] += 1


@compiled
def gaps_between(bits, lowest, class_at, classes, positions, gaps):
    """Count, for each of ``positions`` (increasing), the members of its class since the one before it of that class."""
    last = class_at.size - 1
    since = np.zeros(classes, np.int64)
    start = np.int64(0)
    for found in range(positions.size):
        for i in range(start, positions[found]):
            since[class_at[np.int64(bits[i] >> lowest) & last]] += 1
        start = positions[found] + 1
        kind = class_at[np.int64(bits[positions[found]] >> lowest) & last]
        gaps[found] = since[kind]
        since[kind] = 0


@compiled
def places_of(bits, lowest, class_at, starts, gaps, positions, sources):
    """The inverse: ``positions`` (increasing) of the changes whose ``gaps`` class after class begin at ``starts``, and
    of each its index there (``sources``). The gaps of a class, and a member for each, must add up to its size at most;
    then all of ``positions`` is filled, and nothing beyond."""
    last = class_at.size - 1
    following = starts[:-1].copy()
    left = np.full(following.size, _NEVER)
    for kind in range(following.size):
        if following[kind] < starts[kind + 1]:
            left[kind] = gaps[following[kind]]
    found = 0
    for i in range(bits.size):
        kind = class_at[np.int64(bits[i] >> lowest) & last]
        left[kind] -= 1
        if left[kind] < 0:
            at = following[kind]
            positions[found] = i
            sources[found] = at
            found += 1
            following[kind] = at + 1
            left[kind] = np.int64(gaps[at + 1]) if at + 1 < starts[kind + 1] else _NEVER


@compiled
def _finalise(x):
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


@compiled
def _term(key, index, pattern):
    """Hash a place and its value by two rounds of the splitmix64 finaliser: one over the place, one over both."""
    return _finalise(_finalise(index * GOLDEN + key) ^ ((np.uint64(pattern) + np.uint64(1)) * VALUE))


@compiled
def hash_from(key, offset, bits):
    """Hash terms of the elements from flat index ``offset`` (uint64) on, summed."""
    total = np.uint64(0)
    for i in range(bits.size):
        total += _term(key, offset + np.uint64(i), bits[i])
    return total


@compiled
def hash_at(key, positions, bits):
    """Hash terms of the elements at ``positions``, summed."""
    total = np.uint64(0)
    for i in range(bits.size):
        total += _term(key, np.uint64(positions[i]), bits[i])
    return total
