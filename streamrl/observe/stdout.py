"""The run as its user sees it: start-up, one line a step, progress within a step, a summary with a curve.

On a terminal the lines are a table with a live progress line below; elsewhere each line is complete in itself,
so that it can be searched, and progress is repeated only when nothing was printed for half a minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from streamrl.observe.printable import printable
from streamrl.observe.resumed_lines import resumed_lines
from streamrl.observe.run_history import RunHistory
from streamrl.observe.step_line import duration, evaluation_line, round_of, step_line, table_header, table_row
from streamrl.run_events import (
    EngineBack,
    EngineLost,
    EvaluationFinished,
    RunDecided,
    RunEvent,
    RunFinished,
    RunProgress,
    RunResumed,
    RunStarted,
    RunWarning,
    StallSeen,
    StartProgress,
    StepFinished,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SILENCE_S = 30.0
HEADER_EVERY = 20
SHOWN_WAITS = 8


class Screen(Protocol):
    """Where lines go, and a place for what changes."""

    is_table: bool

    def line(self, text: str) -> None:
        """Print one line that stays."""

    def progress(self, text: str, done: int, total: int) -> None:
        """Show what is going on now. ``total`` 0: not known."""

    def close(self) -> None:
        """Take the progress away."""


class PlainScreen:
    """For files, pipes and CI: whole lines, no control characters."""

    is_table = False

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._printed = clock()

    def line(self, text: str) -> None:
        self._stream.write(printable(text) + "\n")
        self._stream.flush()
        self._printed = self._clock()

    def progress(self, text: str, done: int, total: int) -> None:
        if self._clock() - self._printed >= SILENCE_S:
            self.line(f"{text} {done}/{total}" if total else text)

    def close(self) -> None:
        self._stream.flush()


class TerminalScreen:
    """For a terminal: rich shows the progress line and prints above it."""

    is_table = True

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(file=stream, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(30),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
        )
        self._progress: Progress = Progress(*columns, console=self._console, transient=True)
        self._task: TaskID | None = None
        self._shown = ""

    def line(self, text: str) -> None:
        self._console.print(printable(text), markup=False, soft_wrap=True)

    def progress(self, text: str, done: int, total: int) -> None:
        count = f"{done}/{total}" if total else ""
        if text != self._shown and self._task is not None:
            self._progress.remove_task(self._task)  # the elapsed time counts within one phase
            self._task = None
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task(text, total=total or None, count=count)
            self._shown = text
        self._progress.update(self._task, completed=done, total=total or None, count=count)

    def close(self) -> None:
        self._progress.stop()


class StdoutReporter:
    """Call it with each ``RunEvent``; use it as a context manager, so that the terminal is left as it was."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stdout if stream is None else stream
        wants_table = stream.isatty() if terminal is None else terminal
        self._screen: Screen = TerminalScreen(stream) if wants_table else PlainScreen(stream, clock)
        self._history = RunHistory(clock)
        self._rows = 0
        self._round: tuple[str, float] | None = None
        self._round_varies = False
        self._ready: set[str] = set()

    def __enter__(self) -> StdoutReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.close()

    def __call__(self, event: RunEvent) -> None:
        """Show one event."""
        match event:
            case StartProgress():
                self._starting(event)
            case RunStarted():
                self._started(event)
            case RunProgress():
                where = f"step {event.step}/{self._history.steps}" if event.phase != "evaluation" else "eval"
                self._screen.progress(f"{where} {event.phase}", event.finished, event.wanted)
            case StepFinished():
                self._stepped(event)
            case EvaluationFinished():
                self._history.evaluated(event)
                self._screen.line(evaluation_line(event.step, event.metrics))
            case RunWarning():
                self._screen.line(f"warning at step {event.step}: {event.message}")
            case StallSeen():
                self._stalled(event)
            case RunResumed():
                self._history.resumed(event)
                for text in resumed_lines(event):
                    self._screen.line(text)
            case EngineLost():
                self._screen.line(f"{event.engine} is lost with {event.requests} requests ({event.reason})")
            case EngineBack():
                self._screen.line(f"{event.engine} serves again; it was missed for {event.seconds:.1f} s")
            case RunDecided():
                self._screen.line(f"{event.subject} from step {event.step} on: {event.reason}")
            case RunFinished():
                self._finished(event)

    def line(self, text: str) -> None:
        """Print a line of the caller's, above the progress."""
        self._screen.line(text)

    def _starting(self, event: StartProgress) -> None:
        text = f"{event.process} {event.state}"
        if event.state == "ready" and event.process not in self._ready:
            self._ready.add(event.process)
            self._screen.line(f"{text} after {duration(event.seconds)}")
        elif event.state != "ready":
            plain = text if self._screen.is_table else f"{text} ({duration(event.seconds)})"
            self._screen.progress(plain, 0, 0)

    def _started(self, event: RunStarted) -> None:
        if self._history.run_id == event.run_id:
            return  # its controller was started again
        self._history.started(event)
        resumed = f", from step {event.policy_version}" if event.policy_version else ""
        self._screen.line(f"run {event.run_id}: {event.steps} steps, {event.parameters:,} parameters{resumed}")
        if event.directory:
            self._screen.line(f"  files    {event.directory}")
        if event.metrics_endpoint:
            self._screen.line(f"  metrics  streamrl watch {event.metrics_endpoint}")

    def _stepped(self, event: StepFinished) -> None:
        step_s, remaining_s = self._history.stepped(event)
        if self._notice_round(event):
            self._rows = 0  # another column: the head comes again
        write = table_row if self._screen.is_table else step_line
        varies = self._round_varies
        if self._screen.is_table and self._rows % HEADER_EVERY == 0:
            self._screen.line(table_header(self._history.steps, show_round=varies))
        self._rows += 1
        steps = self._history.steps
        self._screen.line(write(event.step, steps, event.metrics, step_s, remaining_s, show_round=varies))

    def _notice_round(self, event: StepFinished) -> bool:
        """Whether kind of round or group size differ from the first step's for the first time: shown from here on."""
        seen = round_of(event.metrics)
        first = self._round = self._round or seen
        if self._round_varies or seen is None or first is None:
            return False
        if seen[0] == first[0] and round(seen[1]) == round(first[1]):
            return False
        self._round_varies = True
        return True

    def _stalled(self, event: StallSeen) -> None:
        self._screen.line(f"nothing has moved for {duration(event.seconds)}; the run ends. Waits, the longest first:")
        for text in event.waits[:SHOWN_WAITS]:
            self._screen.line(f"  {text}")
        self._screen.line(f"  all of them, with stacks: {event.file}")

    def _finished(self, event: RunFinished) -> None:
        self._screen.close()
        for text in self._history.summary(event.reason):
            self._screen.line(text)
        try:
            curve = self._history.write_curve()
        except OSError as error:
            self._screen.line(f"warning: curve.svg could not be written: {error}")
            return
        if curve is not None:
            self._screen.line(f"  curve  {curve}")
