"""Figures of a finished run for comparison with other runs, at equal trained samples. Used by ``compare`` in the
command's own process, and by benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from streamrl.base.types import Metrics, MetricsMapping

WARM_UP_STEPS = 2
"""Unmeasured first steps of every run, in which engines and trainer compile and fill their caches."""


class RunFigures(Struct, frozen=True, kw_only=True):
    """``steps``: metrics of each optimizer step (docs/metrics.md). ``accuracy``: held-out score after the last measured
    step (NaN: not measured). ``cool_down``: steps at the end that are not measured."""

    steps: list[Metrics]
    accuracy: float
    cool_down: int = 0

    @property
    def measured(self) -> list[Metrics]:
        """The steps after the warm-up and before the cool-down."""
        return self.steps[WARM_UP_STEPS : len(self.steps) - self.cool_down]

    @property
    def seconds(self) -> float:
        """Wall time of the measured steps, without waits for an evaluation."""
        return sum(step["time/step_s"] - step.get("time/wait_eval_s", 0.0) for step in self.measured)

    @property
    def samples(self) -> float:
        """Number of samples that the measured steps trained."""
        return sum(map(samples_of, self.measured))

    @property
    def sample_ms(self) -> float:
        """Milliseconds of wall time a trained sample."""
        return 1e3 * self.seconds / self.samples

    @property
    def trained_tokens(self) -> float:
        """Number of tokens that the measured steps trained."""
        return sum(step["perf/train_tok_s"] * step["time/step_s"] for step in self.measured)

    @property
    def length(self) -> float:
        """Mean tokens of a trained sample."""
        return self.trained_tokens / self.samples

    def weighted(self, name: str) -> float:
        """Mean of a metric over the time of the measured steps. NaN where no step has it."""
        return self.mean_by(name, lambda step: step["time/step_s"])

    def mean_by(self, name: str, weight: Callable[[MetricsMapping], float]) -> float:
        """Mean of a metric over the measured steps that have it, each with its ``weight``. NaN where no step has it."""
        rows = [(step[name], weight(step)) for step in self.measured if name in step]
        total_weight = sum(row_weight for _, row_weight in rows)
        if not total_weight:
            return math.nan
        return sum(value * row_weight for value, row_weight in rows) / total_weight


def samples_of(step: MetricsMapping) -> float:
    """Number of samples that a step trained, from its metrics."""
    return step["perf/samples_s"] * step["time/step_s"]
