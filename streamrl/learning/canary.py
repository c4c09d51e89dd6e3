"""Tokens that engines and the trainer compare after each push (``weights.canary``), and the bounds of their
difference."""

from __future__ import annotations

import msgspec

from streamrl.recipe.sections import ROUNDING, ComputeDtype, Engines, Training

PROBE_TOKENS = 33
"""One is given, 32 are scored: one short prefill of the engine, one short row of the trainer."""

_STEP = 7919
_START = 20_250_701


class CanaryBounds(msgspec.Struct, frozen=True):
    """Nats. Above ``alarm`` the run reports it; an engine above ``limit`` is taken for broken and gets an anchor."""

    alarm: float
    limit: float


EXACT = CanaryBounds(alarm=1e-3, limit=0.05)
"""Both compute in float32: on the demo model they lie 1e-6 apart."""

ROUNDED = CanaryBounds(alarm=0.15, limit=1.0)
"""Either computes in 16 bits: 1e-2 in the middle, more where a model is sure of itself."""


def probe_tokens(vocabulary: int) -> tuple[int, ...]:
    """``PROBE_TOKENS`` token ids spread over the vocabulary, always the same."""
    return tuple((_START + _STEP * place * (place + 3)) % max(vocabulary, 1) for place in range(PROBE_TOKENS))


def canary_bounds(training: Training, engines: Engines, device: str) -> CanaryBounds:
    """Return the bounds where engines run on ``device`` (``cpu`` or ``cuda``)."""
    on_cpu = {"auto": device == "cpu", "cpu": True}.get(training.device, False)
    compute = training.compute_dtype
    sampled = engines.dtype
    exact = compute is ComputeDtype.FLOAT32 or (compute is ComputeDtype.AUTO and on_cpu)
    exact = exact and all(engines.args.get(name) in (None, "auto") for name in ROUNDING)
    return EXACT if exact and (sampled == "float32" or (sampled == "auto" and device == "cpu")) else ROUNDED
