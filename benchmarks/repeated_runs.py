"""Learning runs that are compared: what one run shows, and how sure a mean over a few of them is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import msgspec
from training_run import timed_run

# Two-sided 95 % points of Student's t, by degrees of freedom from 1 on.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
STUDENT_T_BEYOND = 1.96


class LearningRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``metrics``: for each name that was asked for, its value in every step that reports it.

    ``accuracy``: of the last held-out evaluation; NaN without one.
    """

    arm: str
    seed: int
    step_seconds: list[float]
    metrics: dict[str, list[float]]
    accuracy: float


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


def learning_run(
    arm: str, seed: int, recipe: Path, overrides: Mapping[str, object], *, names: Sequence[str] = (), timeout_s: float
) -> LearningRun:
    """Run ``recipe`` to its end with ``overrides`` and this seed. Nothing is evaluated or saved unless they say so."""
    settings = {"evaluation.at_start": False, "checkpoint.at_end": False, **overrides, "run.seed": seed}
    steps, evaluations, _ = timed_run(recipe, settings, timeout_s=timeout_s)
    last = evaluations[-1] if evaluations else {}
    return LearningRun(
        arm=arm,
        seed=seed,
        step_seconds=[step["time/step_s"] for step in steps],
        metrics={name: [step[name] for step in steps if name in step] for name in names},
        accuracy=last.get("eval/held_out/avg@1", math.nan),
    )


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
