"""The square-root rule, a rule of thumb for the learning rate of RL: by the size of the policy, and whether all weights
or low-rank adapters are trained."""

from __future__ import annotations

import math

SMALL_MODEL = 1e6
SMALL_RATE = 5e-5
"""A policy of a million parameters learns at about this rate; larger ones at less, with the root of their size,"""
LEAST_RATE = 1e-6
"""down to the rate that the field uses from some billions on."""
SPREAD = 3.0
ADAPTER_FACTOR = 10.0
"""Low-rank adapters take about ten times the rate of all weights."""


def usual_learning_rate(parameters: int, *, adapters: bool = False) -> float:
    """The rate of AdamW by the square-root rule: ``SMALL_RATE`` x sqrt(``SMALL_MODEL`` / ``parameters``), at least
    ``LEAST_RATE``; ``ADAPTER_FACTOR`` times that for adapters of a model of that size."""
    return max(SMALL_RATE * math.sqrt(SMALL_MODEL / max(parameters, 1)), LEAST_RATE) * (ADAPTER_FACTOR**adapters)


def learning_rate_notice(rate: float, parameters: int, *, adapters: bool = False) -> str | None:
    """One sentence where ``rate`` of AdamW is unusual for RL on a model of that size, else None: a rule of thumb."""
    usual = usual_learning_rate(parameters, adapters=adapters)
    low = usual / SPREAD
    high = usual * SPREAD
    if not parameters or low <= rate <= high:
        return None
    what = "adapters of a model" if adapters else "a model"
    return (
        f"training.learning_rate = {rate:g} is {'high' if rate > high else 'low'} for {what} of {parameters:,} "
        f"parameters: as a rule of thumb try {low:.0e} to {high:.0e}"
    )
