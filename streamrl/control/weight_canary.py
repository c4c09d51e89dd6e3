"""The logprob canary: after a push all engines sample the same few tokens, and must find them equally likely.

The state hash proves that the weights are right; the canary looks at what is computed with them: a kernel's packed copy
that was not packed again, a cache of old keys, a layer that reads something else. How far sound engines lie apart, by
rounding and by what else is in their batches, is measured with the first version. One engine alone has nobody to be
compared with: there the trainer's logprobs of each batch say the same (``off_policy`` metrics).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import anyio
import msgspec

from streamrl.messages import Generate
from streamrl.types import Completion, token_array

PROBES = 3
"""Prompts. One whose first token lies between two equally likely ones says nothing; the middle one of three counts."""

TOKENS = 4
"""Sampled of each prompt, which costs as many steps of decoding."""

MARGIN = 4.0
"""Times the largest deviation that was measured with the first version."""

SMALLEST_TOLERANCE = 1e-3
"""Nats. The demo model in float32 deviates by 1e-5, in bfloat16 models up to 1e-1 are rounding: those are measured."""

_MEASUREMENTS = 3
_PROMPT_TOKENS = 12
_SEED = 20_250_701


class ProbedEngine(Protocol):
    """The part of ``streamrl.engines.engine.Engine`` that the canary needs."""

    async def generate(self, request: Generate) -> Completion: ...


Engine = TypeVar("Engine", bound=ProbedEngine)


class CanaryReport(msgspec.Struct, frozen=True):
    """``deviation``: the largest of all engines, in nats (infinite: other tokens from the start; 0: nobody to compare
    with). ``tolerance``: what is let pass. ``engines``: how many were compared."""

    deviation: float
    tolerance: float
    engines: int


class WeightCanary:
    """Compares engines that hold the same version. ``vocabulary``: token ids below it are in every prompt's range."""

    def __init__(self, vocabulary: int = 256) -> None:
        self.tolerance: float | None = None
        self._prompts = [
            [(_SEED * (probe + 1) + 7919 * place) % vocabulary for place in range(_PROMPT_TOKENS)]
            for probe in range(PROBES)
        ]
        self._asked = 0

    async def measure(self, engines: Sequence[Engine]) -> None:
        """With engines that are known to be sound: how far they lie apart, also each from itself."""
        found = [await self._answers(engines) for _ in range(_MEASUREMENTS)]
        all_answers = [answers for measured in found for answers in measured.values()]
        apart = [deviation(first, second) for first in all_answers for second in all_answers]
        finite = [d for d in apart if math.isfinite(d)]
        self.tolerance = max(SMALLEST_TOLERANCE, MARGIN * max(finite, default=0.0))

    async def deviating(self, engines: Sequence[Engine]) -> tuple[CanaryReport, dict[Engine, float]]:
        """Engines that do not agree with the others, and by how much: all of them where only two are there to differ.

        The first call measures the tolerance.
        """
        if self.tolerance is None:
            await self.measure(engines)
        assert self.tolerance is not None
        answers = await self._answers(engines)
        distances = {
            engine: statistics.median_low([deviation(own, other) for e, other in answers.items() if e is not engine])
            for engine, own in answers.items()
            if len(answers) > 1
        }
        report = CanaryReport(max(distances.values(), default=0.0), self.tolerance, len(distances))
        return report, {engine: d for engine, d in distances.items() if not d <= self.tolerance}

    async def _answers(self, engines: Sequence[Engine]) -> Mapping[Engine, list[Completion]]:
        answers: dict[Engine, list[Completion | None]] = {engine: [None] * PROBES for engine in engines}
        self._asked += 1

        async def ask(engine: Engine, probe: int) -> None:
            request = Generate(
                request_id=f"canary-{self._asked}-{probe}",
                token_ids=token_array(self._prompts[probe]),
                max_tokens=TOKENS,
                seed=_SEED + probe,
                temperature=1.0,
            )
            answers[engine][probe] = await engine.generate(request)

        async with anyio.create_task_group() as group:
            for engine in engines:
                for probe in range(PROBES):
                    group.start_soon(ask, engine, probe)
        return {engine: [c for c in completions if c is not None] for engine, completions in answers.items()}


def deviation(first: Sequence[Completion], second: Sequence[Completion]) -> float:
    """The median over probes of the mean absolute difference of logprobs, in nats, of the tokens that both sampled."""
    return statistics.median(_apart(a, b) for a, b in zip(first, second, strict=True))


def _apart(first: Completion, second: Completion) -> float:
    """Up to the first token that differs: what follows has another past. Infinite where that is the first of all."""
    differences = []
    pairs = zip(first.token_ids, second.token_ids, first.behavior_logprobs, second.behavior_logprobs, strict=False)
    for mine, theirs, own_logprob, other_logprob in pairs:
        if mine != theirs:
            break
        differences.append(abs(float(own_logprob) - float(other_logprob)))
    return statistics.fmean(differences) if differences else math.inf
