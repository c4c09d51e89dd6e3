"""One run as the page shows it, read from its files when the page asks for it. The server of ``streamrl dashboard``
calls ``RunViews`` from several threads; ``report_page`` calls it once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from msgspec import Struct

from streamrl.base.line_file import open_regular, read_lines
from streamrl.base.run_events import WORDS, NamedPrompt
from streamrl.base.types import JsonObject, TextsByName
from streamrl.observe.dashboard.metric_columns import RunMetrics
from streamrl.observe.dashboard.sample_rows import SampleFilter, sample_rows
from streamrl.observe.dashboard.timeline_columns import TimelineColumns
from streamrl.observe.report.trajectory_trace import TRAINED
from streamrl.observe.run_files.run_reader import RunFiles, run_files, runs_in

LATEST_S = 0.25
"""Seconds within which files are not read again."""
BINS = 32
LOG_BYTES = 16_000
"""Bytes of the end of each log that the page shows."""
_ENDS = ("drain", "resumed")
"""Kinds of events that say whether the run is drained: the last of them counts."""


class PromptOfSample(Struct, frozen=True):
    """The fields of a line of ``samples.jsonl`` that name its prompt."""

    prompt_id: str = ""
    prompt: str = ""
    question: str = ""


class RunView:
    """A run on the page, without the secrets of its recipe and of this process, since other people read the page and
    its reports. ``number``: number of the run on the page. Several threads may use it, one at a time."""

    def __init__(self, number: int, files: RunFiles) -> None:
        self.number = number
        self.files = files
        self._redaction = files.redaction()
        self.recipe = self._redaction.public(files.recipe())
        self.metrics = RunMetrics(files)
        self.timeline = TimelineColumns(files)
        self._reading = Lock()
        self._read_at = {"metrics": 0.0, "timeline": 0.0}

    def refresh(self, *, timeline: bool = True) -> None:
        """Read the new lines of the files. ``timeline``: whether the trace is read, or only the metrics."""
        with self._reading:
            names = ("metrics", "timeline") if timeline else ("metrics",)
            for name in names:
                if time.monotonic() - self._read_at[name] > LATEST_S:
                    columns = self.timeline if name == "timeline" else self.metrics
                    columns.refresh()
                    self._read_at[name] = time.monotonic()

    def summary(self) -> JsonObject:
        """Return name, directory and state of the run."""
        last = self.metrics.last_step
        header = self.timeline.header
        engine_kind = header.engine_kind if header else None
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
            "engine_kind": self.recipe.get("engines.kind", engine_kind or ""),
        }

    def lengths(self) -> JsonObject:
        """Return histograms of tokens by step: of the trajectories that returned before its version was live, and of
        the trajectories that it trained."""
        timeline = self.timeline
        with timeline.lock:
            tokens = timeline.column("tokens")
            returned_s = timeline.column("reward_end")
            trained = timeline.column("outcome") == timeline.number_of_outcome(TRAINED)
            ended_s = timeline.column("ended")
            steps = list(timeline.steps)
        longest = max(int(tokens.max(initial=0)), 1)
        edges = np.linspace(0, longest, BINS + 1)
        step_ends = np.array([step.time_s for step in steps])

        def histograms(times: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> list[list[int]]:
            if not steps:
                return []
            step_indices = np.searchsorted(step_ends, times)
            step_edges = np.arange(len(step_ends) + 1) - 0.5
            counts, _, _ = np.histogram2d(step_indices, lengths, bins=(step_edges, edges))
            rows: list[list[int]] = counts.astype(int).tolist()
            return rows

        return {
            "step": [step.policy_version for step in steps],
            "edges": edges.tolist(),
            "sampled": histograms(returned_s, tokens),
            "trained": histograms(ended_s[trained], tokens[trained]),
        }

    def words(self) -> TextsByName:
        """Return the first words of prompts, by id. A run of an older streamrl has those of its samples alone."""
        samples = read_lines(self.files.samples, PromptOfSample)
        texts = {sample.prompt_id: " ".join((sample.question or sample.prompt).split()) for sample in samples}
        texts |= {prompt.prompt_id: prompt.words for prompt in read_lines(self.files.prompts, NamedPrompt)}
        return {prompt_id: self._redaction.text(text)[:WORDS] for prompt_id, text in texts.items()}

    def samples(self, sample_filter: SampleFilter, offset: int, limit: int) -> JsonObject:
        """Return completions, as ``sample_rows`` does."""
        rows: JsonObject = self._redaction.public(sample_rows(self.files, sample_filter, offset, limit))
        return rows

    def details(self) -> JsonObject:
        """Return the recipe, processes and their restarts, alarms, and the end of each log."""
        events = self.timeline.events
        logs = {name: self._redaction.text(_tail(path)) for name, path in self.files.logs().items()}
        state = self.files.state(self.metrics.last_step)
        restarts = Counter(event.text.partition(",")[0] for event in events if event.kind == "engine back")
        drained = next((event.kind == "drain" for event in reversed(events) if event.kind in _ENDS), False)
        alarms = [event for event in events if event.kind == "alarm"]
        notes = []
        if unread := self.timeline.unread:
            notes.append(f"{unread} lines of {self.files.trace} are not of a trace that this streamrl reads")
        if links := self.files.links():
            notes.append(f"links are not read, since they may lead out of the run: {', '.join(links)}")
        return {
            "recipe": self._redaction.text(self.files.recipe_text()),
            "processes": [{"name": name, "restarts": restarts[name], "state": state} for name in logs],
            "drained": drained,
            "alarms": [{"step": alarm.step, "time_s": alarm.time_s, "text": alarm.text} for alarm in alarms],
            "log_tail": logs,
            "notes": notes,
        }


ANSWERS: dict[str, Callable[[RunView], Any]] = {
    "waits": lambda view: view.metrics.waits(),
    "lengths": RunView.lengths,
    "words": RunView.words,
    "details": RunView.details,
}
"""Answers about a run without parameters, by the last part of their path."""


class RunViews:
    """Runs by number. ``places``: directories of single runs, or directories that have several runs. A run that begins
    later gets the next number."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._views: dict[Path, RunView] = {}
        self._lock = Lock()

    def views(self) -> list[RunView]:
        """Return the current runs. Raises ``StreamRLError`` for a place without a run."""
        with self._lock:
            for place in self._places:
                for run in _runs_of(place):
                    directory = run.directory.resolve()
                    if directory not in self._views:
                        self._views[directory] = RunView(len(self._views), RunFiles(directory))
            return list(self._views.values())


def _runs_of(place: Path) -> list[RunFiles]:
    if (place / "recipe.toml").is_file() or not place.is_dir():
        return [run_files(place)]
    return runs_in(place) or [run_files(place)]


def recipe_differences(runs: Sequence[RunView]) -> list[JsonObject]:
    """Return the keys whose values differ between ``runs``, with None for a recipe that does not have the key."""
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    rows = [{"key": key, "values": [run.recipe.get(key) for run in runs]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _tail(path: Path) -> str:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(size - LOG_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if size > LOG_BYTES else text
