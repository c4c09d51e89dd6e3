"""Events of a run in its trace: evaluations, pushes, pauses and checkpoints with their durations; alarms, decisions,
and engines that were lost or came back. ``launch/run_controller.py`` makes ``TraceEvents`` as one of its sinks, and
``launch/observers.py`` adds it to the observers, both in the process of the controller."""

from __future__ import annotations

from streamrl.base.messages import Message
from streamrl.base.run_events import EngineBack, EngineLost, RunDecided, RunResumed, RunWarning, StallSeen
from streamrl.contracts import Observer, PushReport
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.observe.report.run_report import RunReport
from streamrl.observe.report.trajectory_trace import EventLine, TrajectoryTrace

EVALUATION = "evaluation"
PUSH = "push"
PAUSE = "pause"
CHECKPOINT = "checkpoint"
HELD = "paused by hand"
MOST_TEXT = 500
"""Characters of the text of an event."""


class TraceEvents(Observer):
    """A sink and an observer that appends ``EventLine`` objects to a trace. Events before ``open``, such as engines
    that died while the run started, are appended by ``open``."""

    def __init__(self) -> None:
        self._trace: TrajectoryTrace | None = None
        self._report: RunReport | None = None
        self._step = 0
        self._before_open: list[EventLine] = []
        self._began_s: dict[tuple[str, int], float] = {}
        self._push_text = ""

    def open(self, trace: TrajectoryTrace, report: RunReport, step: int, *, paused: bool) -> None:
        """Append to ``trace`` of ``report`` from now on. ``step``: the live version. ``paused``: whether a person had
        paused the run before it was resumed."""
        self._trace = trace
        self._report = report
        self._step = step
        if self._before_open:
            trace.append(*self._before_open)
        if paused:
            self._begin(HELD, 0)

    def routed(self, completion: str, engine: str) -> None:
        """Note which engine samples ``completion``, the common id of its parts. Called by the pool of engines."""
        if self._report is not None:
            self._report.trajectories.routed(completion, engine, self._now())

    def record(self, event: Message) -> None:
        """Append an event of the run, where the trace shows its kind."""
        match event:
            case RunWarning():
                self._append("alarm", event.message, event.step)
            case RunDecided():
                self._append("decision", f"{event.subject}: {event.reason}", event.step)
            case EngineLost():
                self._append("engine lost", f"{event.engine} with {event.requests} requests: {event.reason}")
            case EngineBack():
                self._append("engine back", f"{event.engine}, {event.seconds:.1f} s after it was missed")
            case StallSeen():
                self._append("stall", f"no progress for {event.seconds:.0f} s: {'; '.join(event.waits)}")
            case RunResumed():
                self._append("resumed", f"at version {event.policy_version}", event.policy_version)

    def close(self) -> None:
        """Do nothing: further events may follow, and the report closes the trace."""

    async def on_action(self, action: do.ControlAction) -> None:
        """Note the start of an action that the trace shows."""
        match action:
            case do.Evaluate():
                self._begin(EVALUATION, action.policy_version)
            case do.CancelEvaluation():
                self._end(EVALUATION, action.policy_version, "cancelled")
            case do.PauseEngines():
                self._begin(PAUSE, action.policy_version)
            case do.PublishWeights():
                self._begin(PUSH, action.policy_version)
            case do.WriteCheckpoint():
                self._begin(CHECKPOINT, action.policy_version)
            case do.PauseTrajectories() | do.ResumeTrajectories() if self._report is not None:
                paused = isinstance(action, do.PauseTrajectories)
                self._report.trajectories.paused(action.ids, self._now(), paused=paused)

    async def on_event(self, event: on.ControlEvent) -> None:
        """Append the end of an action, or an event without a duration."""
        match event:
            case on.EvaluationDone():
                self._end(EVALUATION, event.policy_version)
            case on.CheckpointDone():
                self._end(CHECKPOINT, event.policy_version)
            case on.Steered(order="pause"):
                self._began_s.setdefault((HELD, 0), self._now())  # it may be ordered again
            case on.Steered(order="continue"):
                self._end(HELD, 0, "nothing was launched")
            case on.SettingsChanged():
                self._append("setting", event.assignments, event.step or self._step + 1)
            case on.StopRequested():
                self._end(HELD, 0, "nothing was launched")
                self._append("drain", event.reason)
            case on.WeightsLive():
                self._step = event.policy_version
                self._end(PUSH, event.policy_version, self._push_text)
                self._end(PAUSE, event.policy_version)

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Note the figures of the push. ``WeightsLive``, the event that ends it, comes next."""
        if self._report is not None:
            self._report.trajectories.went_live(push.policy_version, self._now())
        self._push_text = f"{push.payload_bytes} bytes, engines paused {push.paused_s:.3f} s"
        if push.reanchored:
            self._push_text += f", {push.reanchored} engines needed it complete"

    def _now(self) -> float:
        return self._report.elapsed() if self._report is not None else 0.0

    def _begin(self, kind: str, version: int) -> None:
        self._began_s[kind, version] = self._now()

    def _end(self, kind: str, version: int, text: str = "") -> None:
        if (began := self._began_s.pop((kind, version), None)) is not None:
            self._append(kind, text, version or None, began)

    def _append(self, kind: str, text: str, step: int | None = None, began: float | None = None) -> None:
        now = self._now()
        line = EventLine(
            time_s=round(now if began is None else began, 4),
            kind=kind,
            text=text[:MOST_TEXT],
            step=max(self._step, 0) if step is None else step,
            seconds=0.0 if began is None else round(now - began, 4),
        )
        if self._trace is None:
            self._before_open.append(line)
        elif not self._trace.closed:
            self._trace.append(line)
