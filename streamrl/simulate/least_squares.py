"""Least squares with constants that are never negative."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_REWEIGHTED = 12


def non_negative_least_squares(columns: Floats, target: Floats) -> Floats:
    """The non-negative ``x`` [n] of least ``|columns x - target|``: exact for few columns, by trying each support.

    ``columns``: [m, n]; ``target``: [m].
    """
    count = columns.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for size in range(1, count + 1):
        for support in combinations(range(count), size):
            chosen = columns[:, support]
            solution, *_ = np.linalg.lstsq(chosen, target, rcond=None)
            if (solution < 0).any():
                continue
            left = target - chosen @ solution
            error = float(left @ left)
            if error < least * (1 - 1e-9):
                best, least = np.zeros(count), error
                best[list(support)] = solution
    return best


def unbiased_fit(columns: Floats, target: Floats, weights: Floats) -> Floats:
    """Non-negative ``x`` [n] with ``columns x`` near ``target`` where the error of a row grows with its *expected*
    value (quasi-likelihood): every row counts relatively, and the sum is kept all the same.

    ``columns``: [m, n]; ``target``, ``weights``: [m].
    """
    expected = np.full(len(target), np.average(target, weights=weights))
    found = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTED):
        scale = np.sqrt(weights) / expected
        found = non_negative_least_squares(columns * scale[:, None], target * scale)
        expected = np.maximum(columns @ found, 1e-3 * expected)
    return found
