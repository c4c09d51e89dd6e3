"""One run as the page sees it: what its files say now, read when it is asked for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from streamrl.observe.dashboard.metric_columns import RunMetrics
from streamrl.observe.dashboard.timeline_columns import TimelineColumns
from streamrl.observe.follow.run_files import RunFiles, run_files, runs_in
from streamrl.observe.report.trajectory_trace import TRAINED

LATEST_S = 0.25
"""Files are not read again within so many seconds."""
BINS = 32
LOG_BYTES = 16_000
"""Of the end of each log."""
_ENDS = ("drain", "resumed")


class RunView:
    """The run ``number`` of a dashboard. May be used from several threads, which wait for each other."""

    def __init__(self, number: int, files: RunFiles) -> None:
        self.number = number
        self.files = files
        self.recipe = files.recipe()
        self.metrics = RunMetrics(files)
        self.timeline = TimelineColumns(files)
        self._reading = Lock()
        self._read_at = {"metrics": 0.0, "timeline": 0.0}

    def refresh(self, *, timeline: bool = True) -> None:
        """Read what the run has written since the last time. ``timeline`` False: its metrics alone."""
        with self._reading:
            for name in ("metrics", "timeline") if timeline else ("metrics",):
                if time.monotonic() - self._read_at[name] > LATEST_S:
                    (self.timeline if name == "timeline" else self.metrics).refresh()
                    self._read_at[name] = time.monotonic()

    def summary(self) -> dict[str, Any]:
        """Name, place and state of the run."""
        last = self.metrics.last_step
        header = self.timeline.header
        return {
            "run": self.number,
            "name": self.recipe.get("run.name", self.files.run_id),
            "run_id": self.files.run_id,
            "project": self.recipe.get("run.project", ""),
            "tags": self.recipe.get("run.tags", []),
            "directory": str(self.files.directory),
            "state": self.files.state(last),
            "started": self.files.started(),
            "step": last.step if last else 0,
            "steps": self.files.steps(last),
            "engine_kind": self.recipe.get("engines.kind", header.engine_kind if header else ""),
        }

    def lengths(self) -> dict[str, Any]:
        """Histograms of tokens by step: of all that came back before its version was live, and of what it trained."""
        timeline = self.timeline
        with timeline.lock:
            tokens = timeline.column("tokens")
            came = timeline.column("reward_end")
            trained = timeline.column("outcome") == timeline.number_of_outcome(TRAINED)
            ended = timeline.column("ended")
            steps = list(timeline.steps)
        most = max(int(tokens.max(initial=0)), 1)
        edges = np.linspace(0, most, BINS + 1)
        ends = np.array([step.time_s for step in steps])

        def histograms(times: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> list[list[int]]:
            at = np.searchsorted(ends, times)
            counts, _, _ = np.histogram2d(at, lengths, bins=(np.arange(len(ends) + 1) - 0.5, edges))
            found: list[list[int]] = counts.astype(int).tolist()
            return found

        return {
            "step": [step.policy_version for step in steps],
            "edges": edges.tolist(),
            "sampled": histograms(came, tokens) if steps else [],
            "trained": histograms(ended[trained], tokens[trained]) if steps else [],
        }

    def details(self) -> dict[str, Any]:
        """The recipe, processes and their restarts, alarms, and the end of each log."""
        events = self.timeline.events
        logs = {name: _tail(path) for name, path in self.files.logs().items()}
        state = self.files.state(self.metrics.last_step)
        back = Counter(one.text.partition(",")[0] for one in events if one.kind == "engine back")
        unread = self.timeline.unread
        notes = [f"{unread} lines of {self.files.trace} are not of a trace that this streamrl reads"] if unread else []
        return {
            "recipe": self.files.recipe_text(),
            "processes": [{"name": name, "restarts": back[name], "state": state} for name in logs],
            "drained": next((one.kind == "drain" for one in reversed(events) if one.kind in _ENDS), False),
            "alarms": [
                {"step": one.step, "time_s": one.time_s, "text": one.text} for one in events if one.kind == "alarm"
            ],
            "log_tail": logs,
            "notes": notes,
        }


ANSWERS: dict[str, Callable[[RunView], Any]] = {
    "waits": lambda view: view.metrics.waits(),
    "lengths": RunView.lengths,
    "details": RunView.details,
}
"""Answers about a run that take no parameters, by the last part of their path."""


class RunViews:
    """Runs by number, in ``places``: directories of runs, or runs. Runs that begin later get the numbers behind."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._views: dict[Path, RunView] = {}
        self._lock = Lock()

    def views(self) -> list[RunView]:
        """The runs that are there now. Raises ``StreamRLError`` for a place without one."""
        with self._lock:
            for place in self._places:
                for run in _runs_of(place):
                    directory = run.directory.resolve()
                    if directory not in self._views:
                        self._views[directory] = RunView(len(self._views), RunFiles(directory))
            return list(self._views.values())


def _runs_of(place: Path) -> list[RunFiles]:
    if (place / "recipe.toml").is_file() or not place.is_dir() or not (found := runs_in(place)):
        return [run_files(place)]
    return found


def recipe_differences(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all of ``runs``; null where a recipe does not have one."""
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    rows = [{"key": key, "values": [run.recipe.get(key) for run in runs]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - LOG_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if size > LOG_BYTES else text
