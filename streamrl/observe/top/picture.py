"""The state of a run as its metrics socket told it, and its files for what was before. Pure but for the clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import msgspec

from streamrl.base import run_events
from streamrl.base.printable import one_line
from streamrl.observe.follow.run_files import MetricLine
from streamrl.observe.telemetry import Telemetry, to_run_event
from streamrl.observe.terminal.step_line import duration, evaluation_line
from streamrl.observe.top.live_figures import Live
from streamrl.run.wait_reason import WAIT_METRICS

SILENT_S = 5.0
"""A run publishes twice a second: longer without a message is worth a word."""
MOST_STEPS = 2000
MOST_EVENTS = 500
_WORDS = {"StartProgress": "start", "EngineLost": "engine lost", "EngineBack": "engine back", "RunResumed": "resumed"}


class Happened(msgspec.Struct, frozen=True):
    """An event for the list: seconds since 1970, a style, one line of text."""

    time: float
    style: str
    text: str


class Picture:
    """Take messages in; read the fields. ``listens``: whether somebody publishes at the endpoint; ``clock``: seconds,
    monotonic."""

    def __init__(self, listens: Callable[[], bool] = lambda: True, clock: Callable[[], float] = time.monotonic) -> None:
        self._listens = listens
        self._clock = clock
        self.run_id = ""
        self.steps = 0
        self.ended = ""
        self.gone = False
        self.live: Live | None = None
        self.history: dict[int, Mapping[str, Any]] = {}
        self.scores: dict[int, Mapping[str, Any]] = {}
        self.events: deque[Happened] = deque(maxlen=MOST_EVENTS)
        self._seen_s = -1.0
        self._seen_at = 0.0

    def take(self, message: Telemetry) -> None:
        """Take one message in; one that this version does not understand changes nothing."""
        self._seen_s = self._clock()
        self._seen_at = message.time
        self.run_id = one_line(message.run_id)
        self.gone = False
        if message.topic == "live":
            try:
                self.live = msgspec.convert(message.fields, Live)
                self.steps = self.live.steps
            except msgspec.ValidationError:
                self.live = None
        elif message.topic == "event":
            name = str(message.fields.get("event"))
            parts = dict(message.fields.get("fields") or {}).items()
            said = (v if isinstance(v, str) else f"{v:.1f} s" if isinstance(v, float) else f"{k} {v}" for k, v in parts)
            self._happened(message, "yellow", f"{_WORDS.get(name, name)}: {', '.join(said)}")
        elif (event := to_run_event(message)) is not None:
            self._take_event(message, event)

    def remember(self, line: MetricLine) -> None:
        """Take a line of ``metrics.jsonl`` in, from before the first message."""
        (self.scores if line.kind == "evaluation" else self.history)[line.step] = line.values

    def _take_event(self, message: Telemetry, event: run_events.RunEvent) -> None:
        match event:
            case run_events.RunStarted():
                self.steps = event.steps
                self.ended = ""
                self._happened(message, "green", f"started, {event.parameters:,} parameters")
            case run_events.StepFinished():
                for later in [step for step in self.history if step >= event.step]:  # the run was resumed before it
                    del self.history[later]
                self.history[event.step] = event.metrics
                if len(self.history) > MOST_STEPS:
                    del self.history[next(iter(self.history))]
            case run_events.EvaluationFinished():
                self.scores[event.step] = event.metrics
                self._happened(message, "cyan", evaluation_line(event.step, event.metrics))
            case run_events.RunWarning():
                self._happened(message, "bold red", f"alarm at step {event.step}: {event.message}")
            case run_events.RunDecided():
                self._happened(message, "blue", f"{event.subject} from step {event.step} on: {event.reason}")
            case run_events.StallSeen():
                waits = "; ".join(event.waits[:3])
                self._happened(message, "bold red", f"nothing has moved for {duration(event.seconds)}: {waits}")
            case run_events.RunFinished():
                self.ended = f"{event.reason} after step {event.step} of {self.steps}"
                self._happened(message, "green", self.ended)

    def _happened(self, message: Telemetry, style: str, text: str) -> None:
        self.events.append(Happened(message.time, style, one_line(text)))

    def look(self) -> None:
        """Find out whether the run is gone, where it has been silent."""
        if self.silent_s > SILENT_S and not self.ended:
            self.gone = not self._listens()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message; from the start on where none has come."""
        if self._seen_s < 0:
            self._seen_s = self._clock()
        return self._clock() - self._seen_s

    @property
    def status(self) -> tuple[str, str]:
        """State of the run as a whole in few words, and a style."""
        at = time.strftime("%H:%M:%S", time.localtime(self._seen_at))
        if self.ended:
            return self.ended, "bold green"
        if self.gone:
            died = f"DIED: no process publishes any more; the picture is of {at}"
            return (died if self.run_id else "no run there: it has ended, or has not begun", "bold red")
        if not self.run_id:
            return "nothing has come yet", "yellow"
        if self.live is None:
            return "starting", "yellow"
        if self.silent_s > SILENT_S:
            return f"SILENT for {duration(self.silent_s)}; the picture is of {at}", "bold yellow"
        if self.live.stopping:
            return "draining: it saves and ends", "bold yellow"
        return ("paused: P goes on", "bold yellow") if self.live.paused else ("running", "green")

    @property
    def last(self) -> Mapping[str, Any]:
        """Metrics of the last step."""
        return self.history[max(self.history)] if self.history else {}

    def left_s(self) -> float | None:
        """Seconds that the steps to come will take, as the last 20 did; None where it is not known."""
        seconds = [m["time/step_s"] for m in list(self.history.values())[-20:] if m.get("time/step_s")]
        return fmean(seconds) * max(self.steps - max(self.history), 0) if seconds and self.steps else None

    def names(self, wanted: str) -> list[str]:
        """Names of the metrics that contain ``wanted``; where it is empty reward, held-out score and length."""
        known = [*self.last, *(self.scores[max(self.scores)] if self.scores else {})]
        if wanted:
            return sorted(name for name in known if wanted.lower() in name.lower())
        held_out = [name for name in known if name.startswith("eval/") and "/avg@" in name][:1]
        return [name for name in ("reward/mean", *held_out, "completion/length_mean") if name in known]

    def points(self, name: str) -> tuple[tuple[float, float], ...]:
        """The values of a metric by step, ascending."""
        rows = self.scores if name.startswith("eval/") else self.history
        return tuple((float(step), float(m[name])) for step, m in rows.items() if m.get(name) is not None)

    def waits(self, steps: int) -> list[tuple[int, float, dict[str, float]]]:
        """For each of the last ``steps`` steps: number, seconds, and the share of each reason by its name."""
        rows = list(self.history.items())[-steps:] if steps > 0 else []
        return [
            (
                step,
                m.get("time/step_s") or 0.0,
                {k.removeprefix(WAIT_METRICS): v for k, v in sorted(m.items()) if k.startswith(WAIT_METRICS) and v},
            )
            for step, m in rows
        ]
