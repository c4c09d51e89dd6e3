"""Events of a run as messages of the metrics socket, and back (docs/metrics.md lists topics and fields)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.base import run_events
from streamrl.base.messages import Message
from streamrl.observe.telemetry import Telemetry

_TOPICS: dict[type[Message], str] = {
    run_events.StepFinished: "step",
    run_events.EvaluationFinished: "evaluation",
    run_events.RunProgress: "progress",
    run_events.CompletionSampled: "sample",
    run_events.RunWarning: "warning",
    run_events.RunDecided: "decision",
    run_events.StallSeen: "stall",
}
_STATES: dict[type[Message], str] = {run_events.RunStarted: "started", run_events.RunFinished: "finished"}
_KINDS: dict[str, Any] = {name: kind for kind, name in (*_TOPICS.items(), *_STATES.items())}


def topic_and_fields(event: Message) -> tuple[str, dict[str, Any]]:
    """Return the topic of an event and its fields: ``run`` for start and end, else that of its kind, or ``event``."""
    fields = msgspec.structs.asdict(event)
    if state := _STATES.get(type(event)):
        return "run", {"state": state} | fields
    if (topic := _TOPICS.get(type(event))) is None:
        return "event", {"event": type(event).__name__, "fields": fields}
    return topic, fields | ({"metrics": finite_or_none(fields["metrics"])} if "metrics" in fields else {})


def finite_or_none(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no nan and no infinity: None stands for both."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def to_run_event(message: Telemetry) -> run_events.RunEvent | None:
    """The message as the run's own event, or None where there is no such event (free-form ones, unknown topics)."""
    fields = dict(message.fields)
    if "metrics" in fields:  # null stands for what JSON cannot say: not finite, so nothing to show
        fields["metrics"] = {name: value for name, value in fields["metrics"].items() if value is not None}
    kind = _KINDS.get(fields.pop("state", "") if message.topic == "run" else message.topic)
    if kind is None:
        return None
    if kind is run_events.RunStarted:
        # The directory is another host's or another user's: a watcher must not write there.
        fields |= {"run_id": message.run_id, "directory": ""}
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    try:
        event: run_events.RunEvent = msgspec.convert(known | {"type": kind.__struct_config__.tag}, kind)
    except msgspec.ValidationError:
        return None
    return event
