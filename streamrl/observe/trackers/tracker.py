"""The interface of a tracker, for the trackers of streamrl and for plug-ins (entry point group ``streamrl.trackers``).
A follower calls it in its own process (``follower.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from streamrl.base.run_events import CompletionSampled
from streamrl.base.types import JsonMapping, JsonObject, MetricsMapping, Texts, TextsByName


class RunInfo(Struct, frozen=True, kw_only=True):
    """The run that is followed.

    ``recipe``: values of the recipe by path, such as ``run.steps``. ``moved_s``: time in seconds since 1970 at which
    the cursor was last stored (0: never); lines that were sent after this time are sent again. ``options``: options
    behind the ``?`` of an entry in ``metrics.report_to``."""

    directory: Path
    run_id: str
    project: str
    tags: Texts
    recipe: JsonObject
    moved_s: float = 0.0
    options: TextsByName = {}


def sample_table(step: int, samples: Sequence[CompletionSampled]) -> tuple[list[str], list[list[Any]]]:
    """Return the heads and the rows of a table of ``samples``. It has a column for each reward function of any sample,
    with None for a sample without this function."""
    functions = sorted({name for sample in samples for name in sample.rewards})
    rows = [
        [
            step,
            sample.prompt,
            sample.text,
            sample.reward,
            sample.finish_reason,
            sample.tokens,
            *map(sample.rewards.get, functions),
        ]
        for sample in samples
    ]
    return ["step", "prompt", "completion", "reward", "finish_reason", "tokens", *functions], rows


class Tracker:
    """Gets the reports of a run. A method may block: the run does not wait for it. A method may raise: the process then
    ends, is restarted, and sends again the lines after the stored cursor. The cursor is stored after ``flush``
    returned.

    ``lag_s``: seconds between ``flush`` and the storing, for a tracker whose ``flush`` returns before its data is on
    the disk."""

    lag_s: float = 0.0

    def open(self, run: RunInfo) -> None:
        """Begin this run, or continue it."""

    def metrics(self, step: int, time_s: float, values: MetricsMapping) -> None:
        """Send the finite metrics of a step, or of an evaluation, which may come after later steps. ``time_s``: seconds
        since 1970."""

    def samples(self, step: int, kind: str, rows: Sequence[CompletionSampled]) -> None:
        """Send completions. ``kind``: ``training`` (the best, the worst and one more of a batch, every tenth step) or
        ``evaluation`` (up to 64)."""

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Send the values of each trained trajectory of a step: ``completion/length`` (tokens), ``reward``,
        ``async/staleness`` (versions)."""

    def event(self, step: int, kind: str, text: str) -> None:
        """Send an event of the run, such as a checkpoint or an alarm."""

    def flush(self) -> None:
        """Return when everything that was sent is on the disk, or is being written."""

    def close(self) -> None:
        """End the tracker. Returns when everything that was sent is on the disk."""


class RowTracker(Tracker):
    """Base of trackers that log rows of named values by step, and no row twice. ``open`` of a subclass sets the two
    attributes.

    ``_library``: module of the tracker. ``_earlier_rows``: hashes of the rows that an earlier follower logged, each of
    its step and its names."""

    _library: Any
    _earlier_rows: set[int]

    def metrics(self, step: int, time_s: float, values: MetricsMapping) -> None:
        self._log(step, values)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        histograms = {f"histogram/{name}": self._library.Histogram(list(column)) for name, column in values.items()}
        self._log(step, histograms)

    def event(self, step: int, kind: str, text: str) -> None:
        self._log(step, {f"event/{kind}": text})

    def _log(self, step: int, values: JsonMapping) -> None:
        if hash((step, frozenset(values))) not in self._earlier_rows:
            self._add_row(step, values)

    def _add_row(self, step: int, values: JsonMapping) -> None:
        """Log a row that no earlier follower logged."""
