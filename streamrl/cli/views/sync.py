"""``streamrl sync RUN --to TRACKER``: sends the lines of a run that a tracker lacks. Reads files of the run in the
command's own process, with the code that sends during a run."""

from __future__ import annotations

from typing import Annotated

from streamrl.base.errors import InputError
from streamrl.base.types import Texts
from streamrl.cli.command import Argument, Command, RunPath
from streamrl.observe.run_files.run_reader import run_files
from streamrl.observe.trackers.available_trackers import name_and_options, tracker_problems
from streamrl.observe.trackers.follower import follow_run


class Sync(Command, frozen=True):
    """Send to a tracker what it has not got yet of a run: all of one that had no trackers, or the end of one whose
    tracker failed. The same code sends while a run goes on (metrics.report_to)."""

    run_directory: RunPath
    to: Annotated[Texts, Argument("tensorboard, wandb, trackio, or a plug-in; may be repeated", "TRACKER")]

    def run(self) -> int:
        """Send the lines. Raises ``StreamRLError`` where a tracker is not installed, or is sending this run already."""
        run = run_files(self.run_directory)
        problems = list(tracker_problems(self.to))
        if "prometheus" in {name_and_options(spec)[0] for spec in self.to}:
            problems.append("prometheus asks runs that go on: set metrics.report_to")
        if problems or not self.to:
            raise InputError("; ".join(problems) or "name a tracker: --to wandb")
        line_counts = {spec: follow_run(run.directory, spec, lambda: True) for spec in self.to}
        return self.print(line_counts, *(f"{spec}: {count} lines were sent" for spec, count in line_counts.items()))
