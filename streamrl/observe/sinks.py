"""Where records go: files of JSON lines, and the metrics socket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.whole_files import append_whole
from streamrl.observe.reporter import EventRecord, StepRecord, finite_or_none
from streamrl.observe.telemetry import TelemetryPublisher

_RUN_STATES = {"RunStarted": "started", "RunFinished": "finished"}
_TOPICS = {
    "RunProgress": "progress",
    "CompletionSampled": "sample",
    "RunWarning": "warning",
    "RunDecided": "decision",
    "StallSeen": "stall",
}


class _LineFile:
    """Appends JSON objects, one a line, each flushed: what was reported survives a kill of this process."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("a+b", buffering=0)
        if self._stream.tell():
            self._stream.seek(-1, os.SEEK_END)
            if self._stream.read(1) != b"\n":
                self._stream.write(b"\n")  # a killed run may have left half a line

    def append(self, fields: dict[str, Any]) -> None:
        append_whole(self._stream, msgspec.json.encode(fields) + b"\n")

    def close(self) -> None:
        self._stream.close()


class JsonlSink:
    """``metrics.jsonl``: one flat object for each step and each evaluation."""

    def __init__(self, path: Path) -> None:
        self._lines = _LineFile(path)

    def record_step(self, record: StepRecord) -> None:
        """Append one line."""
        metrics = {name: finite_or_none(value) for name, value in record.metrics.items()}
        head = {"kind": record.kind, "time": record.time, "step": record.step, "policy_version": record.policy_version}
        self._lines.append(head | metrics)

    def record_event(self, record: EventRecord) -> None:
        """Events are in the journal, or go to the socket alone."""

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._lines.close()


class PublishSink:
    """The metrics socket (schema in docs/metrics.md). Never blocks; what a slow subscriber missed is counted."""

    def __init__(self, endpoint: str, *, run_id: str = "") -> None:
        self._publisher = TelemetryPublisher(endpoint, run_id=run_id)

    @property
    def endpoint(self) -> str:
        """Where it bound."""
        return self._publisher.endpoint

    @property
    def dropped(self) -> int:
        """A lower bound of the messages that some subscriber did not get."""
        return self._publisher.dropped

    def record_step(self, record: StepRecord) -> None:
        """Publish on topic ``step`` or ``evaluation``."""
        metrics = {name: finite_or_none(value) for name, value in record.metrics.items()}
        if record.kind == "step":
            metrics["health/telemetry_dropped_total"] = self.dropped
        self._publisher.publish(
            record.kind, {"step": record.step, "policy_version": record.policy_version, "metrics": metrics}
        )

    def record_event(self, record: EventRecord) -> None:
        """Publish on topic ``run`` (started, finished), on that of its kind, else on ``event``."""
        if state := _RUN_STATES.get(record.kind):
            self._publisher.publish("run", {"state": state} | record.fields)
        elif topic := _TOPICS.get(record.kind):
            self._publisher.publish(topic, record.fields)
        else:
            self._publisher.publish("event", {"event": record.kind, "fields": record.fields})

    def close(self) -> None:
        """Send what is queued and unbind. Idempotent."""
        self._publisher.close()
