"""Probe tokens that engines and the trainer score after each push (``weights.canary``), and bounds of the difference.

A trainer rank scores the tokens during each batch. The controller sends the same tokens to the engines after a push
(``engines.push.verify``) and compares their logprobs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import inf, isfinite

from msgspec import Struct

from streamrl.recipe.field_types import EngineDtype
from streamrl.recipe.sections import ROUNDING, ComputeDtype, Engines, Training

PROBE_TOKENS = 33
"""The first token is the prompt, 32 are scored: one short prefill of the engine, one short row of the trainer."""

_STEP = 7919
_START = 20_250_701


class CanaryBounds(Struct, frozen=True):
    """Bounds of the median difference of logprobs over the probe tokens, in nats.

    ``alarm``: difference above which the run reports it.
    ``limit``: difference above which an engine counts as broken and gets an anchor.
    ``first``: largest difference with which a run may begin; None: ``factor`` times what 16 bits cost, as measured."""

    alarm: float
    limit: float
    first: float | None = None
    factor: float = 3.0


EXACT = CanaryBounds(alarm=1e-3, limit=0.05, first=1e-3)
"""Bounds where engines and trainer compute in float32: on the demo model their logprobs differ by 1e-6."""

ROUNDED = CanaryBounds(alarm=0.15, limit=1.0)
"""Bounds where either computes in 16 bits: the median difference is 1e-2, and larger where a model is confident."""

QUANTISED = CanaryBounds(alarm=0.15, limit=1.0, factor=24.0)
"""Bounds where engines compute in fewer bits: weights in fp8 cost eight times what bfloat16 does."""

LEAST_ROUNDING = 0.01
"""Nats that computing in 16 bits may cost even where the trainer measured less."""


def median_difference(logprobs: Sequence[float], expected: Sequence[float]) -> float:
    """Return the median over tokens of the absolute difference, in nats. Rounding alone may move the logprob of a
    single token far, for example by the choice of another expert; a fault of a layer moves all. Infinite when more than
    half of the differences are not finite."""
    pairs = zip(logprobs, expected, strict=True)
    differences = [abs(float(logprob) - float(reference)) for logprob, reference in pairs]
    return statistics.median_low([nats if isfinite(nats) else inf for nats in differences])


def first_bound(bounds: CanaryBounds, rounding: float) -> float:
    """Return the largest median difference, in nats, with which a run may begin. ``rounding``: cost of bfloat16 on
    the same tokens, which counts where engines or the trainer compute in 16 bits."""
    if bounds.first is not None:
        return bounds.first
    return min(bounds.factor * max(rounding, LEAST_ROUNDING), bounds.limit)


def probe_tokens(vocabulary: int) -> tuple[int, ...]:
    """Return ``PROBE_TOKENS`` token ids spread over the vocabulary, always the same ids."""
    return tuple((_START + _STEP * place * (place + 3)) % max(vocabulary, 1) for place in range(PROBE_TOKENS))


def canary_bounds(training: Training, engines: Engines, device: str, dtype: EngineDtype) -> CanaryBounds:
    """Return the bounds where engines run on ``device`` (``cpu`` or ``cuda``) in ``dtype``."""
    trainer_on_cpu = training.device == "cpu" or (training.device == "auto" and device == "cpu")
    trainer_dtype = training.compute_dtype
    trainer_exact = trainer_dtype is ComputeDtype.FLOAT32 or (trainer_dtype is ComputeDtype.AUTO and trainer_on_cpu)
    engines_exact = dtype == "float32"
    arguments = [engines.args, *(engine_set.args for engine_set in engines.sets)]
    if any(of_set.get(name) not in (None, "auto") for of_set in arguments for name in ROUNDING):
        return QUANTISED
    return EXACT if trainer_exact and engines_exact else ROUNDED
