"""The sinks of the controller: ``Reporter`` hands each event to all sinks, ``JsonlSink`` writes ``metrics.jsonl``.
``launch/run_controller.py`` makes both in the process of the controller. The metrics socket (``telemetry``) and the
events of the trace (``report/trace_events.py``) are sinks as well."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from streamrl.base.line_file import LineFile
from streamrl.base.messages import Message
from streamrl.base.run_events import EvaluationFinished, StepFinished
from streamrl.base.types import Clock, Metrics, MetricsMapping
from streamrl.contracts import Sink
from streamrl.observe.telemetry import finite_or_none

EventT = TypeVar("EventT", bound=Message)

MOST_NAMES = 4096
"""Metrics that one run may have."""
LONGEST_NAME = 256
"""Characters of the name of a metric."""


class Reporter:
    """Hands each event to every sink, in order. ``constant_metrics``: metrics that do not change in a run."""

    def __init__(self, sinks: Sequence[Sink], *, constant_metrics: MetricsMapping | None = None) -> None:
        self._sinks = tuple(sinks)
        self._constant_metrics = dict(constant_metrics or {})
        self._names: set[str] = set()
        self._refused_values = 0

    def record(self, event: EventT) -> EventT:
        """Hand ``event`` to every sink. Returns the event as the sinks got it, with its metrics bounded."""
        if isinstance(event, StepFinished):
            event = replace(event, metrics=self._bounded(event.metrics | self._constant_metrics))
        elif isinstance(event, EvaluationFinished):
            event = replace(event, metrics=self._bounded(event.metrics))
        for sink in self._sinks:
            sink.record(event)
        return event

    def close(self) -> None:
        """Close every sink. An error is raised after all sinks were closed: a full disk must not keep the socket
        open."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)

    def _bounded(self, metrics: MetricsMapping) -> Metrics:
        """Drop names above ``MOST_NAMES``: a reward function names its parts, and may invent a name at each call."""
        bounded = {}
        for name, value in metrics.items():
            if name not in self._names:
                if len(self._names) >= MOST_NAMES or len(name) > LONGEST_NAME:
                    self._refused_values += 1
                    continue
                self._names.add(name)
            bounded[name] = value
        if self._refused_values:
            bounded["health/metrics_refused_total"] = float(self._refused_values)
        return bounded


class JsonlSink(LineFile):
    """Writes ``metrics.jsonl``: a flat object for each step and each evaluation. Other events are in the journal, or go
    to the metrics socket alone.

    ``clock``: seconds since 1970. ``most_bytes``: size at which the file is rotated, as in ``LineFile``."""

    def __init__(self, path: Path, *, clock: Clock = time.time, most_bytes: int = 0) -> None:
        super().__init__(path, most_bytes=most_bytes)
        self._clock = clock

    def record(self, event: Message) -> None:
        if isinstance(event, StepFinished | EvaluationFinished):
            kind = "step" if isinstance(event, StepFinished) else "evaluation"
            head = {"kind": kind, "time": self._clock(), "step": event.step, "policy_version": event.policy_version}
            self.append(head | finite_or_none(event.metrics))
