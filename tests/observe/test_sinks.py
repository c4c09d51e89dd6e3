"""Files of JSON lines, and the reporter that feeds the sinks."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.files import json_lines

from streamrl.base.messages import Message
from streamrl.base.run_events import (
    EngineLost,
    EvaluationFinished,
    RunDecided,
    RunProgress,
    RunStarted,
    RunWarning,
    StepFinished,
)
from streamrl.observe.sinks import JsonlSink, Reporter
from streamrl.observe.telemetry import TelemetryPublisher, TelemetrySubscriber

EVALUATION = EvaluationFinished(step=1, policy_version=1, metrics={"eval/held_out/avg@1": 0.25})


def test_each_record_is_on_disk_before_the_call_returns(tmp_path: Path) -> None:
    reporter = Reporter([JsonlSink(tmp_path / "metrics.jsonl", clock=lambda: 17.0)])
    metrics = {"reward/mean": 0.5, "optim/grad_norm": float("nan")}
    reporter.record(StepFinished(step=1, policy_version=1, metrics=metrics))
    assert json_lines(tmp_path / "metrics.jsonl") == [
        {"kind": "step", "time": 17.0, "step": 1, "policy_version": 1, "reward/mean": 0.5, "optim/grad_norm": None}
    ]
    reporter.record(EVALUATION)
    reporter.record(RunWarning(step=1, message="look there"))
    assert len(json_lines(tmp_path / "metrics.jsonl")) == 2
    reporter.close()


def test_half_a_line_of_a_killed_run_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "st')
    sink = JsonlSink(path)
    sink.record(StepFinished(step=2, policy_version=2, metrics={}))
    sink.close()
    assert [line["step"] for line in json_lines(path)] == [2]


def test_close_reaches_every_sink_and_then_tells_the_first_error() -> None:
    closed = []

    class Broken:
        def record(self, event: Message) -> None: ...

        def close(self) -> None:
            closed.append(self)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Reporter([Broken(), Broken()]).close()
    assert len(closed) == 2


def test_the_socket_sink_publishes_what_the_document_lists(tmp_path: Path) -> None:
    sink = TelemetryPublisher(f"ipc://{tmp_path}/m", run_id="run-7")
    reporter = Reporter([sink])
    started = RunStarted(run_id="run-7", directory="/r", metrics_endpoint=sink.endpoint, steps=3, parameters=9)
    reporter.record(started)
    try:
        with TelemetrySubscriber(sink.endpoint) as subscriber:
            first = subscriber.receive(5)
            assert first is not None
            assert first.topic == "run"
            assert first.fields["state"] == "started"
            assert first.fields["steps"] == 3
            for event in (
                StepFinished(step=1, policy_version=1, metrics={"optim/grad_norm": float("inf")}),
                EVALUATION,
                RunProgress(step=2, phase="rollout", finished=1, wanted=2),
                RunWarning(step=2, message="look there"),
                RunDecided(step=2, subject="rounds", reason="long ones wait", figures={"goodput": 2.5}),
                EngineLost(engine="engine-0", reason="it died"),
            ):
                reporter.record(event)
            topics = {}
            for _ in range(6):
                message = subscriber.receive(5)
                assert message is not None
                topics[message.topic] = message.fields
    finally:
        reporter.close()
    assert topics == {
        "step": {
            "step": 1,
            "policy_version": 1,
            "metrics": {"optim/grad_norm": None, "health/telemetry_dropped_total": 0},
        },
        "evaluation": {"step": 1, "policy_version": 1, "metrics": {"eval/held_out/avg@1": 0.25}},
        "progress": {"step": 2, "phase": "rollout", "finished": 1, "wanted": 2},
        "warning": {"step": 2, "message": "look there"},
        "decision": {"step": 2, "subject": "rounds", "reason": "long ones wait", "figures": {"goodput": 2.5}},
        "event": {"event": "EngineLost", "fields": {"engine": "engine-0", "reason": "it died", "requests": 0}},
    }
