"""Events of a run as lines on stdout: start-up, a line for each step, progress within a step, a summary with a curve.

``StdoutReporter`` runs in the process of a command: ``streamrl train``, ``watch``, ``eval``, ``compare``, ``simulate``
and ``what-if``. On a terminal the lines are a table with a live progress line below. Elsewhere each line has its
labels, so that it can be searched, and progress is repeated only when nothing was printed for half a minute."""

from __future__ import annotations

import sys
import time
from functools import partial
from textwrap import TextWrapper
from typing import TYPE_CHECKING, TextIO

from streamrl.base import run_events
from streamrl.base.printable import printable
from streamrl.base.types import Clock, Metrics
from streamrl.observe.terminal.run_history import RunHistory
from streamrl.observe.terminal.step_line import (
    LEGEND,
    duration,
    evaluation_line,
    further_columns,
    resumed_lines,
    round_of,
    sample_line,
    step_line,
    table_header,
    table_row,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SILENCE_S = 30.0
"""Seconds without a line after which a plain screen prints the progress."""
HEADER_EVERY = 20
"""Rows of the table between two heads."""
SHOWN_WAITS = 8
"""Waits that are listed when the run has stalled."""


class PlainScreen:
    """Screen for files, pipes and CI: whole lines, no control characters."""

    is_table = False

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._printed = clock()

    def width(self) -> int | None:
        """Return the characters of a row of the table; None where there is no limit."""
        return None

    def line(self, text: str, *, dim: bool = False) -> None:
        """Print a permanent line."""
        self._stream.write(printable(text) + "\n")
        self._stream.flush()
        self._printed = self._clock()

    def progress(self, text: str, completed: int, total: int) -> None:
        """Show the current activity. ``total``: 0 where it is not known."""
        if self._clock() - self._printed >= SILENCE_S:
            self.line(f"{text} {completed}/{total}" if total else text)

    def close(self) -> None:
        """Remove the progress line, where there is one."""
        self._stream.flush()


class TerminalScreen:
    """Screen of a terminal: rich shows the progress line and prints above it."""

    is_table = True

    def __init__(self, stream: TextIO) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        from streamrl.observe.terminal.console import open_console

        self._console = open_console(stream)
        self._wrapper = partial(TextWrapper, subsequent_indent="    ", break_on_hyphens=False)
        columns = (
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(20),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
        )
        self._progress: Progress = Progress(*columns, console=self._console, transient=True)
        self._task: TaskID | None = None
        self._progress_text = ""

    def width(self) -> int:
        return max(self._console.width - 1, 20)

    def line(self, text: str, *, dim: bool = False) -> None:
        # Long lines break between words. A path that is longer than the terminal is not broken, so it can be copied.
        wrapper = self._wrapper(width=self.width(), break_long_words=dim)
        wrapped = wrapper.fill(printable(text))
        self._console.print(wrapped, soft_wrap=True, style="dim" if dim else None)

    def progress(self, text: str, completed: int, total: int) -> None:
        count = ""
        if total:
            count = f"{completed}/{total}"
        if text != self._progress_text and self._task is not None:
            self._progress.remove_task(self._task)  # the elapsed time counts within one phase
            self._task = None
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(text, total=total or None, count=count)
            self._progress_text = text
        self._progress.update(self._task, completed=completed, total=total or None, count=count)

    def close(self) -> None:
        self._progress.stop()


class StdoutReporter:
    """Shows each ``RunEvent`` that it is called with. Use it as a context manager, which restores the terminal."""

    def __init__(
        self, stream: TextIO | None = None, *, terminal: bool | None = None, clock: Clock = time.monotonic
    ) -> None:
        stream = sys.stdout if stream is None else stream
        wants_table = stream.isatty() if terminal is None else terminal
        self._screen = TerminalScreen(stream) if wants_table else PlainScreen(stream, clock)
        self._history = RunHistory(clock)
        self._rows = 0
        self._first_round: tuple[str, float] | None = None
        self._moving: frozenset[str] = frozenset()  # labels of further columns that the run needs
        self._ready: set[str] = set()

    def __enter__(self) -> StdoutReporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.close()

    def __call__(self, event: run_events.RunEvent) -> None:
        """Show one event."""
        match event:
            case run_events.StartProgress():
                self._show_start_progress(event)
            case run_events.RunStarted():
                self._show_start(event)
            case run_events.RunProgress():
                where = f"step {event.step}/{self._history.steps}" if event.phase != "evaluation" else "eval"
                self._screen.progress(f"{where} {event.phase}", event.finished, event.wanted)
            case run_events.StepFinished():
                self._show_step(event)
            case run_events.EvaluationFinished():
                self._history.evaluated(event.step, event.metrics)
                self._screen.line(evaluation_line(event.step, event.metrics))
                self._print_verdict()
            case run_events.CompletionSampled():
                self._screen.line(sample_line(event), dim=True)
            case run_events.RunWarning():
                self._screen.line(f"warning at step {event.step}: {event.message}")
            case run_events.StallSeen():
                self._show_stall(event)
            case run_events.RunResumed():
                self._history.resumed(event.policy_version)
                for text in resumed_lines(event):
                    self._screen.line(text)
            case run_events.EngineLost():
                self._screen.line(f"{event.engine} is lost with {event.requests} requests ({event.reason})")
            case run_events.EngineBack():
                self._screen.line(f"{event.engine} serves again; it was missed for {event.seconds:.1f} s")
            case run_events.RunDecided():
                self._screen.line(f"{event.subject} from step {event.step} on: {event.reason}")
            case run_events.RunFinished():
                self._show_end(event)

    def line(self, text: str) -> None:
        """Print a line of the caller above the progress."""
        self._screen.line(text)

    def progress(self, text: str, completed: int, total: int) -> None:
        """Show the progress of an activity that is no run. ``total``: 0 where it is not known."""
        self._screen.progress(text, completed, total)

    def _show_start_progress(self, event: run_events.StartProgress) -> None:
        names = event.process.split(", ")
        if event.state == "ready":
            new = [name for name in names if name not in self._ready]
            self._ready.update(new)
            if new:
                self._screen.line(f"{', '.join(new)} ready after {duration(event.seconds)}")
            return
        by_phase: dict[str, list[str]] = {}
        for name in names:
            if name not in self._ready:
                by_phase.setdefault(event.phases.get(name, "starts"), []).append(name)
        if by_phase:
            waits = "; ".join(f"{', '.join(waiting)}: {phase}" for phase, waiting in by_phase.items())
            text = f"waiting for {waits}"
            if not self._screen.is_table:  # the progress line of a terminal has a clock
                text += f" ({duration(event.seconds)})"
            self._screen.progress(text, 0, 0)

    def _show_start(self, event: run_events.RunStarted) -> None:
        if self._history.run_id == event.run_id:
            return  # only the controller was restarted
        self._history.started(event)
        text = f"run {event.run_id}: {event.steps} steps, {event.parameters:,} parameters"
        if event.trained_parameters:
            text += f" ({event.trained_parameters:,} of them trained)"
        if event.policy_version:
            text += f", from step {event.policy_version}"
        self._screen.line(text)
        if event.directory:
            self._screen.line(f"  files    {event.directory}")
        if event.metrics_endpoint:
            self._screen.line(f"  metrics  streamrl watch {event.metrics_endpoint}")
        for text in LEGEND:
            self._screen.line(text)

    def _show_step(self, event: run_events.StepFinished) -> None:
        step_s, remaining_s = self._history.stepped(event)
        moving = self._moving | self._labels_for(event.metrics)
        if moving != self._moving:
            # The table gets another column: its head is printed again.
            self._moving = moving
            self._rows = 0
        steps = self._history.steps
        screen = self._screen
        further = further_columns(moving, steps, screen.width())
        if screen.is_table and self._rows % HEADER_EVERY == 0:
            screen.line(table_header(steps, further))
        self._rows += 1
        write = table_row if screen.is_table else step_line
        screen.line(write(event.step, steps, self._history.line_metrics(event.metrics), step_s, remaining_s, further))
        self._print_verdict()

    def _print_verdict(self) -> None:
        if verdict := self._history.verdict():
            self._screen.line(verdict)

    def _labels_for(self, metrics: Metrics) -> frozenset[str]:
        """Return the labels of the columns that the table shows from this step on: the round where its kind or group
        size differs from those of the first step, the KL where there is a reference, staleness where a sample is
        stale."""
        labels = set()
        step_round = round_of(metrics)
        self._first_round = self._first_round or step_round
        if step_round and self._first_round:
            kind, group_size = step_round
            first_kind, first_group_size = self._first_round
            if (kind, round(group_size)) != (first_kind, round(first_group_size)):
                labels.add("round")
        if "policy/reference_kl" in metrics:
            labels.add("kl")
        if "policy/teacher_kl" in metrics:
            labels.add("teacher-kl")
        if metrics.get("async/staleness_max", 0.0) > 0:
            labels.add("stale")
        return frozenset(labels)

    def _show_stall(self, event: run_events.StallSeen) -> None:
        self._screen.line(f"nothing has moved for {duration(event.seconds)}; the run ends. Waits, the longest first:")
        for text in event.waits[:SHOWN_WAITS]:
            self._screen.line(f"  {text}")
        self._screen.line(f"  all of them, with stacks: {event.file}")

    def _show_end(self, event: run_events.RunFinished) -> None:
        self._screen.close()
        for text in self._history.summary(event.reason):
            self._screen.line(text)
