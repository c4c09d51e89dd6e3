"""The trackio tracker: a SQLite database in ``RUN/trackio``, which ``trackio show`` reads. It runs in the process of
its follower."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from streamrl.base.errors import StreamRLError
from streamrl.base.run_events import CompletionSampled
from streamrl.base.types import JsonMapping
from streamrl.observe.trackers.tracker import RowTracker, RunInfo, sample_table


class Trackio(RowTracker):
    """Reads its database for the rows that an earlier follower wrote, and writes no row twice."""

    lag_s = 10.0  # threads of trackio write the database later

    def open(self, run: RunInfo) -> None:
        folder = run.directory / "trackio"
        os.environ.setdefault("TRACKIO_DIR", str(folder))  # the default is in the home folder
        os.environ |= {"TRACKIO_SHOW_LOGO": "0", "GRADIO_ANALYTICS_ENABLED": "0"}
        import pandas
        import trackio

        self._library = trackio
        self._pandas = pandas
        self._write_error = ""
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._on_warning
        self._earlier_rows = _hashes(Path(os.environ["TRACKIO_DIR"]), run.run_id)
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

    def samples(self, step: int, kind: str, rows: Sequence[CompletionSampled]) -> None:
        heads, cells = sample_table(step, rows)
        table = self._pandas.DataFrame(cells, columns=heads)
        self._log(step, {f"samples/{kind}": self._library.Table(dataframe=table)})

    def flush(self) -> None:
        if self._write_error:
            raise StreamRLError(self._write_error)

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._library.finish()
        warnings.showwarning = self._show_warning
        self.flush()

    def _on_warning(self, message: Warning | str, *place: Any, **options: Any) -> None:
        """Note a failed write: threads of trackio drop rows that they cannot write, and warn once."""
        self._show_warning(message, *place, **options)
        if str(message).startswith("trackio.log()") or "User code will continue, but" in str(message):
            self._write_error = str(message)

    def _add_row(self, step: int, values: JsonMapping) -> None:
        self._library.log(dict(values), step=step)


def _hashes(folder: Path, run_id: str) -> set[int]:
    """Return hashes of the step and the names of each row of this run."""
    hashes = set()
    for path in folder.glob("*.db"):
        with (
            suppress(sqlite3.DatabaseError),
            closing(sqlite3.connect(path)) as database,
        ):  # the folder may have other files
            rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ?", (run_id,))
            hashes |= {hash((step, frozenset(json.loads(metrics)))) for step, metrics in rows}
    return hashes
