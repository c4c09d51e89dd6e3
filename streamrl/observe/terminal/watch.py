"""``streamrl watch ENDPOINT``: the metrics socket of a running run, seen from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TextIO

import msgspec

from streamrl.base.run_events import (
    CompletionSampled,
    EvaluationFinished,
    RunDecided,
    RunEvent,
    RunFinished,
    RunProgress,
    RunStarted,
    RunWarning,
    StallSeen,
    StepFinished,
)
from streamrl.observe.telemetry import Telemetry

_EVENTS: dict[str, type[RunEvent]] = {
    "step": StepFinished,
    "evaluation": EvaluationFinished,
    "progress": RunProgress,
    "sample": CompletionSampled,
    "warning": RunWarning,
    "decision": RunDecided,
    "stall": StallSeen,
}


def to_run_event(message: Telemetry) -> RunEvent | None:
    """The message as the run's own event, or None where there is no such event (free-form ones, unknown topics)."""
    fields = dict(message.fields)
    if "metrics" in fields:  # null stands for what JSON cannot say: not finite, so nothing to show
        fields["metrics"] = {name: value for name, value in fields["metrics"].items() if value is not None}
    kind: Any = _EVENTS.get(message.topic)
    if message.topic == "run":
        state = fields.pop("state", "")
        kind = {"started": RunStarted, "finished": RunFinished}.get(state)
        if kind is RunStarted:
            fields["run_id"] = message.run_id
            # The directory is another host's or another user's: a watcher must not write there.
            fields["directory"] = ""
    if kind is None:
        return None
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    try:
        event: RunEvent = msgspec.convert(known | {"type": kind.__struct_config__.tag}, kind)
    except msgspec.ValidationError:
        return None
    return event


def follow(receive: Callable[[float], Telemetry | None], patience_s: float) -> Iterator[Telemetry | None]:
    """Messages until the run says that it is finished; None each time ``patience_s`` passed without one."""
    while True:
        message = receive(patience_s)
        yield message
        if message is not None and message.topic == "run" and message.fields.get("state") == "finished":
            return


def write_json(message: Telemetry, stream: TextIO) -> None:
    """One message as a JSON line."""
    stream.write(msgspec.json.encode(message).decode() + "\n")
    stream.flush()
