"""trackio: a SQLite database below ``RUN/trackio``, which ``trackio show`` reads."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from streamrl.base.errors import StreamRLError
from streamrl.base.run_events import CompletionSampled
from streamrl.observe.trackers.tracker import RunInfo, Tracker, sample_table


class Trackio(Tracker):
    """Asks its database for what it has, so that nothing is there twice after a kill."""

    lag_s = 10.0  # threads write the database

    def open(self, run: RunInfo) -> None:
        folder = run.directory / "trackio"
        os.environ.setdefault("TRACKIO_DIR", str(folder))  # not the home folder
        os.environ |= {"TRACKIO_SHOW_LOGO": "0", "GRADIO_ANALYTICS_ENABLED": "0"}
        import pandas
        import trackio

        self._trackio: Any = trackio
        self._pandas = pandas
        self._lost = ""
        self._show = warnings.showwarning
        warnings.showwarning = self._note
        self._there = _hashes(Path(os.environ["TRACKIO_DIR"]), run.run_id)
        with redirect_stdout(sys.stderr):
            trackio.init(
                project=run.project,
                name=run.run_id,
                config=run.recipe,
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def metrics(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._log(step, dict(values))

    def samples(self, step: int, kind: str, rows: Sequence[CompletionSampled]) -> None:
        heads, cells = sample_table(step, rows)
        table = self._pandas.DataFrame(cells, columns=heads)
        self._log(step, {f"samples/{kind}": self._trackio.Table(dataframe=table)})

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        made = {f"histogram/{name}": self._trackio.Histogram(list(column)) for name, column in values.items()}
        self._log(step, made)

    def event(self, step: int, kind: str, text: str) -> None:
        self._log(step, {f"event/{kind}": text})

    def flush(self) -> None:
        if self._lost:
            raise StreamRLError(self._lost)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._trackio.finish()
        warnings.showwarning = self._show
        self.flush()

    def _note(self, message: Warning | str, *place: Any, **options: Any) -> None:
        """Its threads drop what they cannot write, to a full disk for example, and warn of it once."""
        self._show(message, *place, **options)
        if str(message).startswith("trackio.log()") or "User code will continue, but" in str(message):
            self._lost = str(message)

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if hash((step, frozenset(values))) not in self._there:
            self._trackio.log(values, step=step)


def _hashes(folder: Path, run_id: str) -> set[int]:
    """Hashes of the step and the names of each row of this run."""
    found: set[int] = set()
    for path in folder.glob("*.db"):
        with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(path)) as database:  # the folder may have others
            rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (run_id,))
            found |= {hash((step, frozenset(json.loads(metrics)))) for step, metrics in rows}
    return found
