"""The trace: what is written is read back, a killed run's file too, and writes are few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders.base import trajectory as finished
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.trace_header import trace_header

from streamrl.base.errors import StreamRLError
from streamrl.base.stage_messages import Scored, TrajectoryLost, TrajectoryPaused
from streamrl.base.types import EnvironmentResult, ScoredTrajectory, TrajectoryId
from streamrl.control.actions import LaunchGroup
from streamrl.observe.report.trajectory_stats import TrajectoryStats
from streamrl.observe.report.trajectory_trace import (
    TRAINED,
    EnginesLine,
    StepLine,
    TraceLine,
    TrajectoryLine,
    TrajectoryTrace,
    read_trace,
)


def trajectory(time_s: float, **fields: Any) -> TrajectoryLine:
    defaults: dict[str, Any] = {
        "prompt_id": "p-1",
        "group": 4,
        "sample": 2,
        "attempt": 1,
        "prompt_tokens": 20,
        "tokens": 130,
        "finish_reason": "stop",
        "outcome": TRAINED,
        "round_kind": "short",
        "launched_s": 0.5,
        "ended_s": time_s,
        "rollout_s": 0.4,
        "reward_s": 0.01,
        "reward": 1.0,
        "oldest_version": 2,
        "newest_version": 3,
    }
    return TrajectoryLine(**(defaults | fields))


def step(time_s: float) -> StepLine:
    return StepLine(
        time_s=time_s,
        policy_version=1,
        round_kind="long",
        group_size=8.0,
        samples=64,
        trained_tokens=900,
        generated_tokens=1200,
        step_s=1.5,
        rollout_s=1.0,
        training_s=0.3,
        push_s=0.1,
    )


def engines(time_s: float) -> EnginesLine:
    return EnginesLine(
        time_s=time_s, running=3, waiting=1, kv_usage=0.25, token_s=0.002, mean_running=3.5, generated_tokens=70
    )


def write(path: Path, lines: list[TraceLine]) -> None:
    trace = TrajectoryTrace(path, trace_header())
    for line in lines:
        trace.append(line)
    trace.close()
    trace.close()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    lost = trajectory(2.0, outcome="lost_race", finish_reason="", reward=None, tokens=0, reward_s=0.0)
    write(tmp_path / "t", [trajectory(1.0), engines(1.1), lost, step(2.5)])
    run = read_trace(tmp_path / "t")
    assert run.header == trace_header()
    assert run.trajectories == (trajectory(1.0), lost)
    assert run.trajectories[1].reward is None, "no reward is not a reward of 0"
    assert (run.steps, run.engines) == ((step(2.5),), (engines(1.1),))


@settings(max_examples=40)
@given(st.data())
def test_a_torn_file_loses_its_last_line_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    write(path, [trajectory(float(i), group=i) for i in range(5)])
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    cut = data.draw(st.integers(ends[0], len(whole)))
    path.write_bytes(whole[:cut])
    kept = sum(end <= cut for end in ends) - 1
    assert [line.group for line in read_trace(path).trajectories] == list(range(kept))


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_trace_of_a_run_of_days_is_bounded(goes_on: bool, tmp_path: Path) -> None:
    path, most = tmp_path / "t", 20_000
    trace = TrajectoryTrace(path, trace_header(), most_bytes=most)
    for number in range(400):
        trace.append(trajectory(float(number), group=number))
        if goes_on and number % 50 == 0:
            trace.close()
            trace = TrajectoryTrace(path, trace_header(), goes_on=True, most_bytes=most)
    trace.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["older-t", "t"] and all(f.stat().st_size < most + 1000 for f in files)
    groups = [line.group for file in files for line in read_trace(file).trajectories]
    assert groups == list(range(400 - len(groups), 400)) and len(groups) > 60


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a trace"),
        (b'{"type":"header"', "not a trace"),
        (msgspec.json.encode(step(1.0)) + b"\n", "not the header"),
        (msgspec.json.encode(trace_header()) + b"\nnot json\n" + msgspec.json.encode(step(1.0)) + b"\n", "line 2"),
        (msgspec.json.encode(trace_header(schema=99)) + b"\n", "schema 99"),
        (msgspec.json.encode(trace_header()) + b"\n" + msgspec.json.encode(trace_header()) + b"\n", "second header"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(StreamRLError, match=message):
        read_trace(tmp_path / "t")


def test_a_trajectory_has_its_engine_and_waiting_times(tmp_path: Path) -> None:
    """A trajectory has its engine, and the times for which it was queued and paused. Queued until its version is live
    on the engine that has it; a pause counts from when it left the engine."""
    trace = TrajectoryTrace(tmp_path / "t", trace_header())
    stats = TrajectoryStats(trace)
    ids = tuple(TrajectoryId(prompt_id="p", group_id=1, sample=sample) for sample in range(4))
    stats.launched(LaunchGroup(group_id=1, ids=ids, policy_version=4, seed_base=0, round_kind="long"), 5, 10.0)
    stats.routed("1.0.0", "engine-1", 10.5)
    stats.routed("1.1.0", "engine-0", 10.5)
    stats.went_live(4, 12.0)
    stats.paused(ids[:1], 13.0, paused=True)
    stats.on_outcome(TrajectoryPaused(id=ids[0], tokens=3), 13.5)
    stats.paused(ids[1:2], 13.0, paused=True)
    stats.paused(ids[:2], 15.0, paused=False)
    stats.on_outcome(TrajectoryPaused(id=ids[1], tokens=3), 15.5)  # that pause was taken back before it was answered
    stats.routed("1.0.0", "engine-2", 15.1)
    for number, trajectory in enumerate(ids[:3]):
        lost = TrajectoryLost(id=trajectory, cancelled=True, reason="cancelled")
        stats.on_outcome(lost, 17.0 + number)
    turns = ((9, 0.5, 4, 0.25), (0, 1.0, 0, 0.0))
    talked = finished(3, 1, rollout_seconds=0.25, environment=EnvironmentResult(turns=turns))
    stats.on_outcome(Scored(outcome=ScoredTrajectory(trajectory=talked, reward=1.0)), 12.0)
    stats.close(20.0)
    trace.close()
    lines = read_trace(tmp_path / "t").trajectories
    assert [(line.engine, line.queued_s, line.paused_s, line.returned_s) for line in lines] == [
        ("engine-2", 2.0, 1.5, 17.0),
        ("engine-0", 2.0, 0.0, 18.0),
        ("", 9.0, 0.0, 19.0),
        ("", 2.0, 0.0, 12.0),
    ]
    assert (lines[3].turns, lines[3].rollout_s) == (turns, 1.75), "to the end of its environment"
