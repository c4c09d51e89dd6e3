"""``streamrl report`` and ``streamrl trace``: runs as one HTML file, and the timeline of a run for a trace viewer. Both
read files of runs in the command's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from streamrl.base.atomic_files import write_atomic
from streamrl.base.errors import InputError, StreamRLError
from streamrl.base.types import Texts
from streamrl.cli.command import Argument, Command, RunPath, refuse_no_folder
from streamrl.observe.dashboard.chrome_trace import trace_run
from streamrl.observe.dashboard.report_page import report_page
from streamrl.observe.dashboard.timeline_columns import TimelineColumns
from streamrl.observe.run_files.run_reader import run_files

Out = Annotated[Path | None, Argument("write it here", metavar="FILE")]


class Report(Command, frozen=True, kw_only=True):
    """Write the page about runs, as streamrl dashboard shows it, as one HTML file (default: report.html in the first
    run). It needs no server and no network."""

    runs: Annotated[Texts, Argument("runs, such as runs/latest", metavar="RUN", positional=True)]
    out: Out = None

    def run(self) -> int:
        """Write the page. Raises ``StreamRLError`` for a place that is no run."""
        refuse_no_folder("--out", self.out)
        places = [Path(name) for name in self.runs]
        if not places:
            raise InputError("streamrl report needs a run: name one, such as runs/latest")
        page = report_page(places)
        path = self.out or places[0] / "report.html"
        write_atomic(path, page)
        return self.print({"file": str(path), "bytes": len(page)}, f"wrote {path}, {len(page) / 1e6:.1f} MB")


class Trace(Command, frozen=True, kw_only=True):
    """Write the timeline of a run as Chrome trace events (default: timeline.json in the run): open the file in
    https://ui.perfetto.dev."""

    run_directory: RunPath
    out: Out = None

    def run(self) -> int:
        """Write the trace. Raises ``StreamRLError`` for a place that is no run, or a run without a trace."""
        refuse_no_folder("--out", self.out)
        files = run_files(self.run_directory)
        path = self.out or self.run_directory / "timeline.json"
        timeline = TimelineColumns(files)
        timeline.refresh()
        if not timeline.count:
            raise StreamRLError(f"{files.trace} has no trajectory that has ended: there is nothing to draw")
        trace, left_out = trace_run(files.run_id, timeline)
        write_atomic(path, trace.encoded())
        result = f"wrote {path}"
        if left_out:
            result += f", without the first {left_out:,} trajectories: a viewer opens no more"
        return self.print({"file": str(path), "left_out": left_out}, f"{result}; open it in ui.perfetto.dev")
