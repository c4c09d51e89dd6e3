"""Events of a run as lines of its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oracle.trace_header import trace_header

from streamrl.base.run_events import EngineBack, EngineLost, RunWarning
from streamrl.contracts import PushReport
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.observe.report.trace_events import TraceEvents
from streamrl.observe.report.trajectory_stats import TrajectoryStats
from streamrl.observe.report.trajectory_trace import TrajectoryTrace, read_trace


class Report:
    """The part of the run's report that events take: its clock, and its trajectories."""

    def __init__(self) -> None:
        self.now, self.trajectories = 0.0, TrajectoryStats()

    def elapsed(self) -> float:
        return self.now


async def test_events_have_their_begin_their_length_and_their_step(tmp_path: Path) -> None:
    trace, report, events = TrajectoryTrace(tmp_path / "t", trace_header()), Report(), TraceEvents()
    events.record(EngineLost(engine="engine-1", reason="killed", requests=3))  # before there is a trace
    events.open(trace, report, 4, paused=True)  # type: ignore[arg-type]
    push = PushReport(policy_version=5, payload_bytes=7, paused_s=0.25)
    happens: list[tuple[float, Any]] = [
        (1.0, do.PauseEngines(policy_version=5)),
        (2.0, do.PublishWeights(policy_version=5)),
        (3.0, push),
        (3.0, on.WeightsLive(policy_version=5)),
        (3.5, do.Evaluate(policy_version=5, limit=0)),
        (4.0, do.WriteCheckpoint(policy_version=5)),
        (4.5, on.CheckpointDone(policy_version=5)),
        (5.0, on.SettingsChanged(values={"sampling.temperature": 0.5})),
        (5.2, on.Steered(order="continue")),  # of a pause from before the run was resumed
        (5.5, on.Steered(order="pause")),
        (5.8, on.Steered(order="pause")),
        (6.0, on.EvaluationDone(policy_version=5)),
        (7.0, on.Steered(order="continue")),
        (7.5, RunWarning(step=5, message="x" * 900)),
        (8.0, EngineBack(engine="engine-1", seconds=2.0)),
        (8.5, on.Steered(order="pause")),
        (9.0, on.StopRequested(reason="drained")),
    ]
    for report.now, what in happens:
        if isinstance(what, PushReport):
            await events.on_weights_live(what, last=False)
        elif isinstance(what, do.Action):
            await events.on_action(what)
        elif isinstance(what, on.Event):
            await events.on_event(what)
        else:
            events.record(what)
    trace.close()
    events.record(RunWarning(step=5, message="after its end"))
    lines = read_trace(tmp_path / "t").events
    assert [(line.time_s, line.kind, line.step, line.seconds) for line in lines] == [
        (0.0, "engine lost", 0, 0.0),
        (2.0, "push", 5, 1.0),
        (1.0, "pause", 5, 2.0),
        (4.0, "checkpoint", 5, 0.5),
        (5.0, "setting", 6, 0.0),
        (0.0, "paused by hand", 5, 5.2),
        (3.5, "evaluation", 5, 2.5),
        (5.5, "paused by hand", 5, 1.5),
        (7.5, "alarm", 5, 0.0),
        (8.0, "engine back", 5, 0.0),
        (8.5, "paused by hand", 5, 0.5),
        (9.0, "drain", 5, 0.0),
    ]
    texts = [line.text for line in lines]
    assert texts[1] == "7 bytes, engines paused 0.250 s" and texts[4] == "sampling.temperature = 0.5"
    assert len(texts[8]) == 500
    trace, events = TrajectoryTrace(tmp_path / "begins", trace_header()), TraceEvents()
    events.open(trace, report, -1, paused=False)  # type: ignore[arg-type]
    await events.on_action(do.Evaluate(policy_version=0, limit=0))
    await events.on_event(on.EvaluationDone(policy_version=0))
    trace.close()
    assert [line.step for line in read_trace(tmp_path / "begins").events] == [0]
