"""A follower: sends what is new in the files of a run to one tracker, from where its cursor stands."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.atomic_files import hold_lock, write_durable
from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.line_file import decoded_lines, read_lines
from streamrl.base.run_events import CompletionSampled
from streamrl.observe.follow.followed_lines import Cursor, FollowedLines
from streamrl.observe.follow.run_files import RunFiles, changed_s, metric_lines
from streamrl.observe.trackers.installed import make_tracker, name_and_options
from streamrl.observe.trackers.tracker import RunInfo, Tracker

log = logging.getLogger(__name__)

FOLDER = "trackers"
MOST_ROWS = 64
"""Of an evaluation that are sent."""
SAMPLES_EVERY = 10
"""Steps between two that send the completions of their batch."""
_POLL_S = 1.0
_CLOCK_S = 1.0  # the times of files are coarse
_FILE_S = 600.0
"""After the line of an evaluation its completions are no longer waited for: the run was killed between the two."""


class _Cursors(msgspec.Struct, frozen=True):
    """``NAME.cursor``: how far each file was taken. ``moved_s``: when, in seconds since 1970."""

    metrics: Cursor = Cursor()
    samples: Cursor = Cursor()
    trace: Cursor = Cursor()
    moved_s: float = 0.0


def follow_run(directory: Path, spec: str, ended: Callable[[], bool]) -> int:
    """Send what the tracker ``spec`` (an entry of ``metrics.report_to``) has not got yet of the run in ``directory``,
    and what comes, until the run has ``ended`` and all is sent. Returns how many lines were sent. Raises
    ``StreamRLError`` while another process does it, or where the tracker is not installed; and as the tracker does."""
    name, options = name_and_options(spec)
    run = RunFiles(directory.resolve())
    folder = directory.resolve() / FOLDER
    folder.mkdir(exist_ok=True)

    def refused(holder: str) -> StreamRLError:
        return StreamRLError(f"process {holder} sends this run to {name} already: it does so until the run ends")

    with hold_lock(folder / f"{name}.lock", refused):
        tracker = make_tracker(name)
        path = folder / f"{name}.cursor"
        recipe = run.recipe()
        cursors = _read(path)
        tracker.open(
            RunInfo(
                directory=run.directory,
                run_id=run.run_id,
                project=recipe.get("run.project") or "streamrl",
                tags=tuple(recipe.get("run.tags", ())),
                recipe=recipe,
                moved_s=cursors.moved_s,
                options=options,
            )
        )
        return Follower(run, tracker, path, cursors).run(ended)


def _read(path: Path) -> _Cursors:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Cursors)
    except (OSError, *UNDECODABLE):  # none, or of another version: all is sent
        return _Cursors()


class Follower:
    """Hands the lines of ``run`` after ``cursors`` to ``tracker``, and moves the cursor file ``path``."""

    def __init__(self, run: RunFiles, tracker: Tracker, path: Path, cursors: _Cursors) -> None:
        self._run = run
        self._tracker = tracker
        self._path = path
        self._files = {
            FollowedLines(run.metrics, cursors.metrics): self._take_metrics,
            FollowedLines(run.samples, cursors.samples): self._take_samples,
            FollowedLines(run.trace, cursors.trace): self._take_trace,
        }
        self._trained: list[dict[str, Any]] = []  # trajectories of the step whose line has not come yet
        self._evaluated: dict[int, float] = {}  # times of lines whose completions have not come yet, by step
        self._handed: deque[_Cursors] = deque()
        self._gaps = 0

    def run(self, ended: Callable[[], bool]) -> int:
        """Follow until all is sent of a run that has ended. Returns the number of lines."""
        count = 0
        while True:
            last = ended()  # asked first: what was written before its end is read after it
            taken = sum(self._take(file) for file in self._files)
            count += taken
            sent = self._send_evaluations()
            if taken or sent:
                self._tracker.flush()
                if not self._evaluated:  # else their lines are taken again after a restart
                    self._handed.append(self._cursors())
            while self._handed and self._handed[0].moved_s <= time.time() - self._tracker.lag_s:
                self._tracker.flush()
                self._store(self._handed.popleft())
            if not (taken or sent):
                if last:
                    break
                time.sleep(_POLL_S)
        self._tracker.close()
        if self._handed:
            self._store(self._handed[-1])
        return count

    def _cursors(self) -> _Cursors:
        metrics, samples, trace = (file.cursor for file in self._files)
        return _Cursors(metrics, samples, trace, time.time())

    def _store(self, cursors: _Cursors) -> None:
        write_durable(self._path, msgspec.json.encode(cursors))

    def _take(self, file: FollowedLines) -> int:
        lines = file.read()
        self._files[file](lines)
        if (gaps := sum(one.gaps for one in self._files)) > self._gaps:
            log.warning("lines were rotated away before they were sent: raise metrics.advanced.most_mib")
            self._gaps = gaps
        return len(lines)

    def _take_metrics(self, lines: Sequence[bytes]) -> None:
        for line in metric_lines(lines):
            self._tracker.metrics(line.step, line.time, line.values)
            if line.kind == "evaluation":
                self._evaluated[line.step] = line.time

    def _send_evaluations(self) -> bool:
        """Send the completions of evaluations whose file, which the run writes after the line, has come."""
        files = self._run.evaluations() if self._evaluated else {}
        sent = False
        for step, time_s in list(self._evaluated.items()):
            has_come = step in files and changed_s(files[step]) > time_s - _CLOCK_S  # else of an earlier evaluation
            if has_come and (rows := evaluated(files[step])):
                self._tracker.samples(step, "evaluation", rows)
                sent = True
            if has_come or time.time() > time_s + _FILE_S:
                del self._evaluated[step]
        return sent

    def _take_samples(self, lines: Sequence[bytes]) -> None:
        for step, found in groupby(decoded_lines(lines, CompletionSampled), key=lambda one: one.step):
            if step == 1 or step % SAMPLES_EVERY == 0:
                self._tracker.samples(step, "training", list(found))

    def _take_trace(self, lines: Sequence[bytes]) -> None:
        """Take lines of any version: those that say what is asked for here."""
        for line in decoded_lines(lines, dict[str, Any]):
            kind = line.get("type")
            step = line.get("policy_version", line.get("step", 0))
            if kind == "trajectory" and line.get("outcome") == "trained":
                self._trained.append(line)
            elif kind == "step":
                trained = self._trained
                self._trained = []
                columns = {
                    "completion/length": [float(one["tokens"]) for one in trained if "tokens" in one],
                    "reward": [one["reward"] for one in trained if _is_finite(one.get("reward"))],
                    # The version that the step makes is one more than the one that it began with.
                    "async/staleness": [float(max(step - 1 - one.get("oldest_version", 0), 0)) for one in trained],
                }
                if trained:
                    self._tracker.histograms(step, {name: column for name, column in columns.items() if column})
            elif kind == "event":
                self._tracker.event(step, str(line.get("kind", "")), str(line.get("text", "")))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def evaluated(path: Path) -> list[CompletionSampled]:
    """Up to ``MOST_ROWS`` completions of an evaluation, those of one prompt in turn with those of the others."""
    return sorted(read_lines(path, CompletionSampled), key=lambda one: one.sample)[:MOST_ROWS]
