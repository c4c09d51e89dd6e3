"""What the controller reports, to every sink: steps, evaluations, progress and events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

MOST_NAMES = 4096
LONGEST_NAME = 256
"""Characters."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one step (``kind`` step) or of one evaluation. Names: docs/metrics.md."""

    kind: str
    time: float
    step: int
    policy_version: int
    metrics: dict[str, float]


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. ``sequence`` counts from 1 in a run."""

    kind: str
    time: float
    sequence: int
    fields: dict[str, Any]


class Sink(Protocol):
    """A place where records go. It must not block for long: it is called from the event loop."""

    def record_step(self, record: StepRecord) -> None: ...

    def record_event(self, record: EventRecord) -> None: ...

    def close(self) -> None: ...


class Reporter:
    """Gives each record its time and hands it to every sink, in order. ``standing``: metrics of every step that do not
    change in a run."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        clock: Callable[[], float] = time.time,
        standing: Mapping[str, float] | None = None,
    ) -> None:
        self._sinks = tuple(sinks)
        self._standing = dict(standing or {})
        self._clock = clock
        self._events = 0
        self._names: set[str] = set()
        self._refused = 0

    def step(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Report one optimizer step whose version is live."""
        self._report("step", step, policy_version, {**metrics, **self._standing})

    def evaluation(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """Report one evaluation."""
        self._report("evaluation", step, policy_version, metrics)

    def event(self, kind: str, **fields: Any) -> None:
        """Report something that happened; ``fields`` must be what JSON or msgspec can write."""
        self._events += 1
        record = EventRecord(kind=kind, time=self._clock(), sequence=self._events, fields=fields)
        for sink in self._sinks:
            sink.record_event(record)

    def close(self) -> None:
        """Close every sink; the first error is raised after all were closed."""
        errors = []
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:  # a full disk must not keep the socket open
                errors.append(error)
        if errors:
            raise errors[0]

    def _report(self, kind: str, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        record = StepRecord(
            kind=kind, time=self._clock(), step=step, policy_version=policy_version, metrics=self._bounded(metrics)
        )
        for sink in self._sinks:
            sink.record_step(record)

    def _bounded(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Without names that would be more than a run may have: rewards name their parts, and may name each anew."""
        kept: dict[str, float] = {}
        for name, value in metrics.items():
            if name not in self._names:
                if len(self._names) >= MOST_NAMES or len(name) > LONGEST_NAME:
                    self._refused += 1
                    continue
                self._names.add(name)
            kept[name] = value
        return kept | {"health/metrics_refused_total": float(self._refused)} if self._refused else kept


def finite_or_none(value: Any) -> Any:
    """JSON has no nan and no infinity: None stands for both."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
