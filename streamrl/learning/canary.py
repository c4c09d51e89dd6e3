"""Probe tokens that engines and the trainer score after each push (``weights.canary``), and bounds of the difference.

A trainer rank scores the tokens during each batch. The controller sends the same tokens to the engines after a push
(``engines.push.verify``) and compares their logprobs."""

from __future__ import annotations

from msgspec import Struct

from streamrl.recipe.sections import ROUNDING, ComputeDtype, Engines, Training

PROBE_TOKENS = 33
"""The first token is the prompt, 32 are scored: one short prefill of the engine, one short row of the trainer."""

_STEP = 7919
_START = 20_250_701


class CanaryBounds(Struct, frozen=True):
    """Bounds of the median difference of logprobs over the probe tokens, in nats.

    ``alarm``: difference above which the run reports it.
    ``limit``: difference above which an engine counts as broken and gets an anchor."""

    alarm: float
    limit: float


EXACT = CanaryBounds(alarm=1e-3, limit=0.05)
"""Bounds where engines and trainer compute in float32: on the demo model their logprobs differ by 1e-6."""

ROUNDED = CanaryBounds(alarm=0.15, limit=1.0)
"""Bounds where either computes in 16 bits: the median difference is 1e-2, and larger where a model is confident."""


def probe_tokens(vocabulary: int) -> tuple[int, ...]:
    """Return ``PROBE_TOKENS`` token ids spread over the vocabulary, always the same ids."""
    return tuple((_START + _STEP * place * (place + 3)) % max(vocabulary, 1) for place in range(PROBE_TOKENS))


def canary_bounds(training: Training, engines: Engines, device: str) -> CanaryBounds:
    """Return the bounds where engines run on ``device`` (``cpu`` or ``cuda``)."""
    trainer_on_cpu = training.device == "cpu" or (training.device == "auto" and device == "cpu")
    trainer_dtype = training.compute_dtype
    trainer_exact = trainer_dtype is ComputeDtype.FLOAT32 or (trainer_dtype is ComputeDtype.AUTO and trainer_on_cpu)
    engines_exact = engines.dtype == "float32" or (engines.dtype == "auto" and device == "cpu")
    unquantized = all(engines.args.get(name) in (None, "auto") for name in ROUNDING)
    return EXACT if trainer_exact and engines_exact and unquantized else ROUNDED
