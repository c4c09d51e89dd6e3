"""Rule of thumb for the learning rate of RL: it falls with the square root of the policy's size, and is larger for
low-rank adapters. The command's process shows it in the dry run and in the history of a run."""

from __future__ import annotations

import math

SMALL_MODEL = 1e6
SMALL_RATE = 5e-5
"""Usual rate of a policy with ``SMALL_MODEL`` parameters. It falls with the square root of the size."""
LEAST_RATE = 1e-6
"""Usual rate of policies with some billions of parameters and more."""
SPREAD = 3.0
"""Factor by which a rate may differ from the usual one without a notice."""
ADAPTER_FACTOR = 10.0
"""Usual rate of low-rank adapters, as a multiple of the rate of all weights."""


def usual_learning_rate(parameters: int, *, adapters: bool) -> float:
    """Return the usual rate of AdamW: ``SMALL_RATE`` x sqrt(``SMALL_MODEL`` / ``parameters``), at least ``LEAST_RATE``;
    ``ADAPTER_FACTOR`` times this rate for adapters of a model of this size."""
    rate = max(SMALL_RATE * math.sqrt(SMALL_MODEL / max(parameters, 1)), LEAST_RATE)
    return rate * ADAPTER_FACTOR if adapters else rate


def learning_rate_notice(rate: float, parameters: int, *, adapters: bool) -> str | None:
    """Return a sentence about an unusual ``rate`` of AdamW for a model of this size; None: the rate is usual, or the
    size is unknown (0)."""
    usual = usual_learning_rate(parameters, adapters=adapters)
    low = usual / SPREAD
    high = usual * SPREAD
    if not parameters or low <= rate <= high:
        return None
    trained = "adapters of a model" if adapters else "a model"
    return (
        f"training.learning_rate = {rate:g} is {'high' if rate > high else 'low'} for {trained} of {parameters:,} "
        f"parameters: as a rule of thumb try {low:.0e} to {high:.0e}"
    )
