"""What a real run recorded, as the calibration and the replay need it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.control.trajectory_trace import RecordedRun, TrajectoryLine, read_trace
from streamrl.errors import StreamRLError

Floats = NDArray[np.float64]
TRACE_FILE = "trace.jsonl"


def load_recording(path: Path) -> RecordedRun:
    """The trace of a run directory, or a trace file. Raises ``StreamRLError`` where there is none, or a damaged one."""
    file = path / TRACE_FILE if path.is_dir() else path
    if not file.is_file():
        raise StreamRLError(f"{path} has no {TRACE_FILE}: give the directory of a run that recorded one")
    return read_trace(file)


class LifeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Completions that ran from launch to end under one version, one row each.

    ``seconds``: launch to last token; ``tokens``; ``running``: mean number of requests in flight on its engine
    meanwhile; ``arrivals``: requests submitted to its engine from its launch to its end, itself included.
    """

    seconds: Floats
    tokens: Floats
    running: Floats
    arrivals: Floats


def life_times(run: RecordedRun) -> LifeTimes:
    """From the launch and the end of every recorded trajectory; those that were stopped count as load only."""
    lines = [line for line in run.trajectories if line.rollout_s > 0]
    begins = np.array([line.launched_s for line in lines])
    ends = begins + np.array([line.rollout_s for line in lines])
    whole = np.array([_whole(line) for line in lines], dtype=bool)
    times = np.concatenate([begins, ends])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([np.ones(len(lines)), -np.ones(len(lines))])[order]
    times = times[order]
    count = np.cumsum(changes)
    # Integral of the number in flight, up to each time.
    integral = np.concatenate([[0.0], np.cumsum(count[:-1] * np.diff(times))]) if len(times) else np.zeros(0)
    engines = run.header.engines
    seconds = (ends - begins)[whole]
    load = np.interp(ends[whole], times, integral) - np.interp(begins[whole], times, integral)
    starts = np.sort(begins)
    arrivals = np.searchsorted(starts, ends[whole], side="right") - np.searchsorted(starts, begins[whole], side="left")
    return LifeTimes(
        seconds=seconds,
        tokens=np.array([line.tokens for line in lines], dtype=float)[whole],
        running=np.maximum(load / seconds / engines, 1.0),
        arrivals=arrivals / engines,
    )


def _whole(line: TrajectoryLine) -> bool:
    return bool(line.finish_reason) and line.tokens > 0 and line.oldest_version == line.newest_version
