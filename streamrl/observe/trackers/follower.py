"""A follower: sends the lines of the files of a run after its cursor to one tracker. ``follow_run`` is called in the
process of a follower (``__main__``), and by ``streamrl sync``."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from msgspec import Struct, json

from streamrl.base.atomic_files import hold_lock, write_durable
from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.line_file import decoded_lines, read_lines
from streamrl.base.run_events import CompletionSampled
from streamrl.base.types import JsonObject
from streamrl.observe.run_files.followed_lines import Cursor, FollowedLines
from streamrl.observe.run_files.run_reader import RunFiles, changed_s, is_number, metric_lines
from streamrl.observe.trackers.available_trackers import make_tracker, name_and_options
from streamrl.observe.trackers.tracker import RunInfo, Tracker

log = logging.getLogger(__name__)

FOLDER = "trackers"
MOST_ROWS = 64
"""Completions of an evaluation that are sent."""
SAMPLES_EVERY = 10
"""Completions of a batch are sent once in this number of steps."""
_POLL_S = 1.0
_CLOCK_S = 1.0  # the times of files are coarse
_FILE_S = 600.0
"""Seconds after the line of an evaluation for which its completions are expected: a run may be killed between the
two."""


class _Cursors(Struct, frozen=True):
    """Content of ``NAME.cursor``: a cursor for each file. ``moved_s``: time of the last move, in seconds since 1970."""

    metrics: Cursor = Cursor()
    samples: Cursor = Cursor()
    trace: Cursor = Cursor()
    moved_s: float = 0.0


def follow_run(directory: Path, spec: str, has_ended: Callable[[], bool]) -> int:
    """Send the lines of a run after the cursor, and then the new lines, until the run has ended and every line is sent.
    Returns the number of sent lines.

    ``spec``: tracker, an entry of ``metrics.report_to``. ``has_ended``: returns whether the run has ended. Raises
    ``StreamRLError`` while another process sends to this tracker, or where the tracker is not installed; and the errors
    of the tracker."""
    name, options = name_and_options(spec)
    run = RunFiles(directory.resolve())
    folder = directory.resolve() / FOLDER
    folder.mkdir(exist_ok=True)

    def refused(holder: str) -> StreamRLError:
        return StreamRLError(f"process {holder} sends this run to {name} already: it does so until the run ends")

    with hold_lock(folder / f"{name}.lock", refused):
        tracker = make_tracker(name)
        path = folder / f"{name}.cursor"
        recipe = run.redaction().public(run.recipe())
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
        return Follower(run, tracker, path, cursors).run(has_ended)


def _read(path: Path) -> _Cursors:
    try:
        return json.decode(path.read_bytes(), type=_Cursors)
    except (OSError, *UNDECODABLE):  # no file, or of another version: every line is sent
        return _Cursors()


class Follower:
    """Gives the lines of ``run`` after ``cursors`` to ``tracker``. ``path``: file to which the moved cursors are
    written."""

    def __init__(self, run: RunFiles, tracker: Tracker, path: Path, cursors: _Cursors) -> None:
        self._run = run
        self._tracker = tracker
        self._path = path
        self._files = {
            FollowedLines(run.metrics, cursors.metrics): self._take_metrics,
            FollowedLines(run.samples, cursors.samples): self._take_samples,
            FollowedLines(run.trace, cursors.trace): self._take_trace,
        }
        self._trained: list[JsonObject] = []  # lines of trajectories of the next step
        self._evaluation_times: dict[int, float] = {}  # by step, of evaluations whose completions are not sent yet
        self._unstored: deque[_Cursors] = deque()  # of flushed lines, until ``lag_s`` has passed
        self._gaps = 0

    def run(self, has_ended: Callable[[], bool]) -> int:
        """Follow until the run has ended and every line is sent. Returns the number of lines."""
        count = 0
        while True:
            is_last = has_ended()  # before the files are read, so that the last lines of the run are read after it
            new_lines = sum(self._take(file) for file in self._files)
            count += new_lines
            sent_evaluations = self._send_evaluations()
            if new_lines or sent_evaluations:
                self._tracker.flush()
                if not self._evaluation_times:  # else the lines of these evaluations must be read again after a restart
                    self._unstored.append(self._cursors())
            while self._unstored and self._unstored[0].moved_s <= time.time() - self._tracker.lag_s:
                self._tracker.flush()
                self._store(self._unstored.popleft())
            if not (new_lines or sent_evaluations):
                if is_last:
                    break
                time.sleep(_POLL_S)
        self._tracker.close()
        if self._unstored:
            self._store(self._unstored[-1])
        return count

    def _cursors(self) -> _Cursors:
        metrics, samples, trace = (file.cursor for file in self._files)
        return _Cursors(metrics, samples, trace, time.time())

    def _store(self, cursors: _Cursors) -> None:
        write_durable(self._path, json.encode(cursors))

    def _take(self, file: FollowedLines) -> int:
        lines = file.read()
        self._files[file](lines)
        gaps = sum(followed.gaps for followed in self._files)
        if gaps > self._gaps:
            log.warning("lines were rotated away before they were sent: raise metrics.advanced.most_mib")
            self._gaps = gaps
        return len(lines)

    def _take_metrics(self, lines: Sequence[bytes]) -> None:
        for line in metric_lines(lines):
            self._tracker.metrics(line.step, line.time, line.values)
            if line.kind == "evaluation":
                self._evaluation_times[line.step] = line.time

    def _send_evaluations(self) -> bool:
        """Send the completions of evaluations whose file exists. The run writes it after the line of the evaluation.
        Returns whether any were sent."""
        if not self._evaluation_times:
            return False
        files = self._run.evaluations()
        has_sent = False
        for step, time_s in list(self._evaluation_times.items()):
            # An older file is of an earlier evaluation of the step.
            is_written = step in files and changed_s(files[step]) > time_s - _CLOCK_S
            if is_written and (rows := evaluation_samples(files[step])):
                self._tracker.samples(step, "evaluation", rows)
                has_sent = True
            if is_written or time.time() > time_s + _FILE_S:
                del self._evaluation_times[step]
        return has_sent

    def _take_samples(self, lines: Sequence[bytes]) -> None:
        for step, samples in groupby(decoded_lines(lines, CompletionSampled), key=lambda sample: sample.step):
            if step == 1 or step % SAMPLES_EVERY == 0:
                self._tracker.samples(step, "training", list(samples))

    def _take_trace(self, lines: Sequence[bytes]) -> None:
        """Give the tracker lines of the trace. Lines of other versions may lack fields, and are used without them."""
        for line in decoded_lines(lines, JsonObject):
            kind = line.get("type")
            step = line.get("policy_version", line.get("step", 0))
            if kind == "trajectory" and line.get("outcome") == "trained":
                self._trained.append(line)
            elif kind == "step":
                trained = self._trained
                self._trained = []
                columns = {
                    "completion/length": [float(row["tokens"]) for row in trained if "tokens" in row],
                    "reward": [row["reward"] for row in trained if is_number(row.get("reward"))],
                    # The step begins with version ``step - 1`` and makes version ``step``.
                    "async/staleness": [float(max(step - 1 - row.get("oldest_version", 0), 0)) for row in trained],
                }
                if trained:
                    self._tracker.histograms(step, {name: column for name, column in columns.items() if column})
            elif kind == "event":
                self._tracker.event(step, str(line.get("kind", "")), str(line.get("text", "")))


def evaluation_samples(path: Path) -> list[CompletionSampled]:
    """Return up to ``MOST_ROWS`` completions of an evaluation, first one completion of each prompt, then the second."""
    return sorted(read_lines(path, CompletionSampled), key=lambda completion: completion.sample)[:MOST_ROWS]
