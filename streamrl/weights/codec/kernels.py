"""The loops over every element of a work unit, compiled by numba: one pass each, without temporaries and without the
GIL.

``codec.py`` and ``state_hash.py`` call them, in trainer ranks and in vLLM's workers. Numba compiles a loop at its first
call on a machine (a second or two for all) and keeps the result beside this file. Callers pass arrays through
``frozen``, so that writeable and read-only arrays share one compiled form."""

# Typed by numba, at the first call: patterns are uint16 or uint32, counts and positions int64, hashes uint64.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from typing import Any

import numba  # type: ignore[import-untyped]
import numpy as np


def compiled(function):
    """Compile ``function``. The machine code is kept on disk where numba finds a directory that can be written."""
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no such directory, neither beside the file nor below the home directory
        return numba.njit(**options)(function)


_NEVER = np.int64(1) << 62

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
VALUE = np.uint64(0xD6E8FEB86659FD93)


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array as contiguous and read-only; a copy only where it is strided."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


@compiled
def count_exponents(bits, lowest, counts):
    """Count the patterns with each exponent into ``counts``. ``lowest``: lowest bit of the exponent."""
    last = counts.size - 1
    for i in range(bits.size):
        counts[np.int64(bits[i] >> lowest) & last] += 1


@compiled
def gaps_between(bits, lowest, class_at, classes, positions, gaps):
    """Write to ``gaps`` the gap before each of ``positions`` (increasing): the number of elements of the same class
    since the previous position of this class. ``class_at``: class of each exponent; ``classes``: number of classes."""
    last = class_at.size - 1
    since = np.zeros(classes, np.int64)
    start = np.int64(0)
    for n in range(positions.size):
        for i in range(start, positions[n]):
            since[class_at[np.int64(bits[i] >> lowest) & last]] += 1
        start = positions[n] + 1
        kind = class_at[np.int64(bits[positions[n]] >> lowest) & last]
        gaps[n] = since[kind]
        since[kind] = 0


@compiled
def places_of(bits, lowest, class_at, starts, gaps, positions, sources):
    """Restore positions from gaps: the inverse of ``gaps_between``. ``gaps``: gaps of all changes, sorted by class;
    ``starts``: index of the first gap of each class, then the number of all gaps. Writes ``positions`` (increasing),
    and to ``sources`` the index in ``gaps`` of each change. The sum of a class's gaps and changes must not exceed the
    size of the class; then all of ``positions`` is written, and no element behind its end."""
    last = class_at.size - 1
    following = starts[:-1].copy()  # index of the next gap of each class
    remaining = np.full(following.size, _NEVER)  # elements of each class before its next change
    for kind in range(following.size):
        if following[kind] < starts[kind + 1]:
            remaining[kind] = gaps[following[kind]]
    n = 0
    for i in range(bits.size):
        kind = class_at[np.int64(bits[i] >> lowest) & last]
        remaining[kind] -= 1
        if remaining[kind] < 0:
            source = following[kind]
            positions[n] = i
            sources[n] = source
            n += 1
            following[kind] = source + 1
            remaining[kind] = np.int64(gaps[source + 1]) if source + 1 < starts[kind + 1] else _NEVER


@compiled
def _finalise(word):
    word = (word ^ (word >> np.uint64(30))) * FIRST
    word = (word ^ (word >> np.uint64(27))) * SECOND
    return word ^ (word >> np.uint64(31))


@compiled
def _term(key, index, pattern):
    """Hash a position and its value by two rounds of the splitmix64 finaliser: one over the position, one over both."""
    return _finalise(_finalise(index * GOLDEN + key) ^ ((np.uint64(pattern) + np.uint64(1)) * VALUE))


@compiled
def hash_from(key, offset, bits):
    """Sum the hash terms of the elements from flat index ``offset`` (uint64) on."""
    total = np.uint64(0)
    for i in range(bits.size):
        total += _term(key, offset + np.uint64(i), bits[i])
    return total


@compiled
def hash_at(key, positions, bits):
    """Sum the hash terms of the elements at ``positions``."""
    total = np.uint64(0)
    for i in range(bits.size):
        total += _term(key, np.uint64(positions[i]), bits[i])
    return total
