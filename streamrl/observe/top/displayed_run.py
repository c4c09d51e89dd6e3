"""The state of a run for ``streamrl top``, from the messages of its metrics socket, and from ``metrics.jsonl`` for the
steps before. ``cli/views/top.py`` fills it in the process of the command, ``application`` and ``screen_lines`` read it.
No I/O."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from msgspec import Struct, ValidationError, convert

from streamrl.base import run_events
from streamrl.base.printable import one_line
from streamrl.base.types import Clock, JsonMapping, Metrics
from streamrl.observe.run_files.run_reader import MetricLine, set_size
from streamrl.observe.telemetry import Telemetry, to_run_event
from streamrl.observe.terminal.step_line import duration, evaluation_line
from streamrl.observe.top.live_figures import Live
from streamrl.run.wait_reason import WAIT_METRICS

SILENT_S = 5.0
"""Seconds without a message after which the run is shown as silent: a run publishes twice a second."""
MOST_STEPS = 2000
MOST_EVENTS = 500
_WORDS = {"StartProgress": "start", "EngineLost": "engine lost", "EngineBack": "engine back", "RunResumed": "resumed"}


class ShownEvent(Struct, frozen=True):
    """A row of the list of events. ``time``: seconds since 1970. ``style``: style of rich. ``text``: a single line."""

    time: float
    style: str
    text: str


class Picture:
    """State of a run: ``take`` updates it, the boxes read its attributes.

    ``listens``: returns whether a process publishes at the endpoint. ``clock``: monotonic seconds."""

    def __init__(self, listens: Callable[[], bool] = lambda: True, clock: Clock = time.monotonic) -> None:
        self._listens = listens
        self._clock = clock
        self.run_id = ""
        self.steps = 0
        self.end_text = ""  # empty while the run goes on
        self.gone = False
        self.live: Live | None = None
        self.history: dict[int, JsonMapping] = {}
        self.scores: dict[int, JsonMapping] = {}
        self.events: deque[ShownEvent] = deque(maxlen=MOST_EVENTS)
        self._message_s = -1.0  # when the last message came, by the clock
        self._message_time = 0.0  # the time in the last message, since 1970

    def take(self, message: Telemetry) -> None:
        """Update the state by a message. A message that this version does not know changes nothing."""
        self._message_s = self._clock()
        self._message_time = message.time
        self.run_id = one_line(message.run_id)
        self.gone = False
        if message.topic == "live":
            try:
                self.live = convert(message.fields, Live)
                self.steps = self.live.steps
            except ValidationError:
                self.live = None
        elif message.topic == "event":
            name = str(message.fields.get("event"))
            fields = dict(message.fields.get("fields") or {})
            texts = [_field_text(field, value) for field, value in fields.items()]
            self._add_event(message, "yellow", f"{_WORDS.get(name, name)}: {', '.join(texts)}")
        elif (event := to_run_event(message)) is not None:
            self._take_event(message, event)

    def remember(self, line: MetricLine) -> None:
        """Add a line of ``metrics.jsonl`` from before the first message."""
        rows = self.scores if line.kind == "evaluation" else self.history
        rows[line.step] = line.values

    def _take_event(self, message: Telemetry, event: run_events.RunEvent) -> None:
        match event:
            case run_events.RunStarted():
                self.steps = event.steps
                self.end_text = ""
                self._add_event(message, "green", f"started, {event.parameters:,} parameters")
            case run_events.StepFinished():
                # A resumed run makes steps again.
                for later_step in [step for step in self.history if step >= event.step]:
                    del self.history[later_step]
                self.history[event.step] = event.metrics
                if len(self.history) > MOST_STEPS:
                    del self.history[next(iter(self.history))]
            case run_events.EvaluationFinished():
                self.scores[event.step] = event.metrics
                self._add_event(message, "cyan", evaluation_line(event.step, event.metrics))
            case run_events.RunWarning():
                self._add_event(message, "bold red", f"alarm at step {event.step}: {event.message}")
            case run_events.RunDecided():
                self._add_event(message, "blue", f"{event.subject} from step {event.step} on: {event.reason}")
            case run_events.StallSeen():
                waits = "; ".join(event.waits[:3])
                self._add_event(message, "bold red", f"nothing has moved for {duration(event.seconds)}: {waits}")
            case run_events.RunFinished():
                self.end_text = f"{event.reason} after step {event.step} of {self.steps}"
                self._add_event(message, "green", self.end_text)

    def _add_event(self, message: Telemetry, style: str, text: str) -> None:
        self.events.append(ShownEvent(message.time, style, one_line(text)))

    def look(self) -> None:
        """Check whether a silent run is gone: no process publishes at its endpoint any more."""
        if self.silent_s > SILENT_S and not self.end_text:
            self.gone = not self._listens()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message, or since the first call where no message has come."""
        if self._message_s < 0:
            self._message_s = self._clock()
        return self._clock() - self._message_s

    @property
    def status(self) -> tuple[str, str]:
        """State of the run in few words, and its style."""
        at = time.strftime("%H:%M:%S", time.localtime(self._message_time))
        if self.end_text:
            return self.end_text, "bold green"
        if self.gone and self.run_id:
            return f"DIED: no process publishes any more; the picture is of {at}", "bold red"
        if self.gone:
            return "no run there: it has ended, or has not begun", "bold red"
        if not self.run_id:
            return "nothing has come yet", "yellow"
        if self.live is None:
            return "starting", "yellow"
        if self.silent_s > SILENT_S:
            return f"SILENT for {duration(self.silent_s)}; the picture is of {at}", "bold yellow"
        if self.live.stopping:
            return "draining: it saves and ends", "bold yellow"
        if self.live.paused:
            return "paused: P goes on", "bold yellow"
        return "running", "green"

    @property
    def last(self) -> JsonMapping:
        """Metrics of the last step."""
        return _last_row(self.history)

    def remaining_s(self) -> float | None:
        """Return the expected seconds of the remaining steps, from the last 20 steps; None where they are not known."""
        last_metrics = list(self.history.values())[-20:]
        seconds = [metrics["time/step_s"] for metrics in last_metrics if metrics.get("time/step_s")]
        if not seconds or not self.steps:
            return None
        return fmean(seconds) * max(self.steps - max(self.history), 0)

    def names(self, name_part: str) -> list[str]:
        """Return the names of the metrics that contain ``name_part``. Where it is empty: reward, held-out score and
        length."""
        names = [*self.last, *_last_row(self.scores)]
        if name_part:
            return sorted(name for name in names if name_part.lower() in name.lower())
        held_out = [name for name in names if name.startswith("eval/") and "/avg@" in name][:1]
        return [name for name in ("reward/mean", *held_out, "completion/length_mean") if name in names]

    def points(self, name: str) -> tuple[tuple[float, float], ...]:
        """Return the values of a metric by step, ascending."""
        rows = {step: metrics for step, metrics in self.history.items() if metrics.get(name) is not None}
        if name.startswith("eval/"):
            rows = {step: metrics for step, metrics in self.scores.items() if metrics.get(name) is not None}
            newest = set_size(name, _last_row(rows))
            rows = {step: metrics for step, metrics in rows.items() if set_size(name, metrics) == newest}
        return tuple((float(step), float(metrics[name])) for step, metrics in rows.items())

    def waits(self, steps: int) -> list[tuple[int, float, Metrics]]:
        """Return for each of the last ``steps`` steps (at least 1) its number, its seconds, and the shares of the
        reasons that the run waited for, by name."""
        rows = list(self.history.items())[-steps:]
        return [(step, metrics.get("time/step_s") or 0.0, _wait_shares(metrics)) for step, metrics in rows]


def _last_row(rows: Mapping[int, JsonMapping]) -> JsonMapping:
    if not rows:
        return {}
    return rows[max(rows)]


def _wait_shares(metrics: JsonMapping) -> Metrics:
    return {
        name.removeprefix(WAIT_METRICS): share
        for name, share in sorted(metrics.items())
        if name.startswith(WAIT_METRICS) and share
    }


def _field_text(name: str, value: Any) -> str:
    """Return a field of an event as text for the list."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.1f} s"
    return f"{name} {value}"
