"""How sure a mean over a few runs is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

# Two-sided 95 % points of Student's t, by degrees of freedom from 1 on.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
STUDENT_T_BEYOND = 1.96


class Interval(msgspec.Struct, frozen=True):
    """A mean, its standard error and its 95 % interval by Student's t. NaN where there is one value only."""

    mean: float
    standard_error: float
    low: float
    high: float

    @property
    def holds_zero(self) -> bool:
        """Whether no difference is among what the values allow."""
        return self.low <= 0 <= self.high

    def __str__(self) -> str:
        return f"{self.mean:+.4f} (95 %: {self.low:+.4f} to {self.high:+.4f})"


def interval(values: Sequence[float]) -> Interval:
    """Mean of ``values`` with its 95 % interval. Raises ``ValueError`` for none."""
    if not values:
        raise ValueError("an interval needs values")
    mean, freedom = fmean(values), len(values) - 1
    if freedom == 0:
        return Interval(mean, math.nan, math.nan, math.nan)
    error = stdev(values) / math.sqrt(len(values))
    reach = error * (STUDENT_T[freedom - 1] if freedom <= len(STUDENT_T) else STUDENT_T_BEYOND)
    return Interval(mean, error, mean - reach, mean + reach)
