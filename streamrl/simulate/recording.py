"""What a real run recorded, as the calibration and the replay need it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.base.errors import StreamRLError
from streamrl.observe.report.trajectory_trace import TRAINED, RecordedRun, TrajectoryLine, read_trace

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
TRACE_FILE = "trace.jsonl"


def load_recording(path: Path) -> RecordedRun:
    """The trace of a run directory, or a trace file. Raises ``StreamRLError`` where there is none, or a damaged one."""
    file = path / TRACE_FILE if path.is_dir() else path
    if not file.is_file():
        raise StreamRLError(f"{path} has no {TRACE_FILE}: give the directory of a run that recorded one")
    return read_trace(file)


class LifeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Completions that ran from launch to end under one version, one row each; times in seconds since the run began.

    ``begins``: launch, or when the version that sampled it went live where it waited for that in a paused engine
    (``presubmitted``); ``ends``: last token; ``arrivals``: requests that began on its engine from its begin to its end,
    itself included. From ``times[k]`` to ``times[k + 1]`` ``in_flight[k]`` requests were open on an engine, those that
    were stopped too.
    """

    begins: Floats
    ends: Floats
    tokens: Floats
    arrivals: Floats
    presubmitted: Flags
    times: Floats
    in_flight: Floats

    @property
    def seconds(self) -> Floats:
        """From begin to last token."""
        return self.ends - self.begins

    @property
    def running(self) -> Floats:
        """Mean number of open requests of its engine, itself included, from begin to end."""
        mean: Floats = np.maximum(self._between(self.in_flight) / self.seconds, 1.0)
        return mean

    def decoding_s(self, step_s: Callable[[Floats], Floats]) -> Floats:
        """Seconds that its tokens take where a decode step of b requests takes ``step_s(b)``, at the loads it met."""
        steps = np.maximum(self._between(1 / step_s(np.maximum(self.in_flight, 1.0))), 1e-12)
        taken: Floats = self.tokens * self.seconds / steps
        return taken

    def _between(self, rates: Floats) -> Floats:
        """Integral of ``rates`` over each life."""
        integral = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(self.times))])
        found: Floats = np.interp(self.ends, self.times, integral) - np.interp(self.begins, self.times, integral)
        return found


def life_times(run: RecordedRun) -> LifeTimes:
    """From the launch and the end of every recorded trajectory; those that were stopped count as load only."""
    lines = [line for line in run.trajectories if line.rollout_s > 0]
    live = {line.policy_version: line.time_s for line in run.steps}
    launched = np.array([line.launched_s for line in lines])
    ends = launched + np.array([line.rollout_s for line in lines])
    went_live = np.array([live.get(line.oldest_version, 0.0) for line in lines])
    presubmitted = (went_live > launched) & (went_live < ends)
    begins = np.where(presubmitted, went_live, launched)
    times = np.concatenate([begins, ends])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([np.ones(len(lines)), -np.ones(len(lines))])[order]
    engines = run.header.engines
    whole = np.array([_whole(line) for line in lines], dtype=bool)
    starts = np.sort(begins)
    arrivals = np.searchsorted(starts, ends, side="right") - np.searchsorted(starts, begins, side="left")
    return LifeTimes(
        begins=begins[whole],
        ends=ends[whole],
        tokens=np.array([line.tokens for line in lines], dtype=float)[whole],
        arrivals=arrivals[whole] / engines,
        presubmitted=presubmitted[whole],
        times=times[order],
        in_flight=np.cumsum(changes) / engines,
    )


def _whole(line: TrajectoryLine) -> bool:
    return bool(line.finish_reason) and line.tokens > 0 and line.oldest_version == line.newest_version


class TrainedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was trained. ``scored_s``: when the last of its rewards was known; ``trained_s``: when the optimizer
    had stepped on it."""

    scored_s: float
    trained_s: float
    tokens: int
    samples: int


def trained_groups(run: RecordedRun) -> list[TrainedGroup]:
    """In the order of the batches that they were trained in."""
    by_group: dict[int, list[TrajectoryLine]] = {}
    for line in run.trajectories:
        if line.outcome == TRAINED:
            by_group.setdefault(line.group, []).append(line)
    groups = [
        TrainedGroup(
            scored_s=max(line.launched_s + line.rollout_s + line.reward_s for line in lines),
            trained_s=max(line.ended_s for line in lines),
            tokens=sum(line.tokens for line in lines),
            samples=len(lines),
        )
        for lines in by_group.values()
    ]
    return sorted(groups, key=lambda group: group.trained_s)
