"""The followers of a run: one process for each tracker of ``metrics.report_to`` (``observe/trackers``).

The supervisor starts, polls and ends them. A run does not need them: one that ends too often is not started again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from logging import getLogger
from os import environ, getpid
from pathlib import Path
from time import monotonic

from anyio import move_on_after, sleep

from streamrl.base.run_process import PARENT_PID, end_session, start_session
from streamrl.processes.restart_policy import Restarts

log = getLogger(__name__)

RESTARTS = 8
FINISH_S = 30.0
"""How long followers may take after the end of a run to send its last lines."""
_POLL_S = 0.05


class _Follower:
    """One tracker, in one process at a time. ``due_s``: monotonic time of the next start; 0 before the first start;
    None where no start is planned."""

    def __init__(self, spec: str, run_directory: Path) -> None:
        self.name = spec.partition("?")[0]
        self.log = run_directory / "logs" / f"tracker-{self.name}.log"
        self._command = [sys.executable, "-P", "-m", "streamrl.observe.trackers", spec, str(run_directory)]
        self._restarts = Restarts(RESTARTS)
        self._started_s = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self.due_s: float | None = 0.0

    @property
    def running(self) -> bool:
        """Whether its process has not ended yet."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process in its own session, without the marker of the run: it lives on when the run is resumed."""
        self.due_s = None
        self._started_s = monotonic()
        with self.log.open("ab") as output:
            self.process = start_session(
                self._command, stdin=subprocess.PIPE, stdout=output, env=environ | {PARENT_PID: str(getpid())}
            )

    def poll(self) -> None:
        """Plan the next start of a process that has ended, unless it has ended too often."""
        if self.process is None:
            return
        exit_code = self.process.poll()
        if exit_code is None:
            return
        self.end()
        pause_s = self._restarts.next_pause(monotonic() - self._started_s)
        if pause_s is not None:
            self.due_s = monotonic() + pause_s
            log.info("tracker %s ended with %d; it is started again (see %s)", self.name, exit_code, self.log)
        else:
            log.error(
                "tracker %s ended %d times and is not started again; the run goes on, and streamrl sync sends the rest "
                "(see %s)",
                *(self.name, RESTARTS + 1, self.log),
            )

    def end(self) -> None:
        """Kill the session of the process. Idempotent."""
        process = self.process
        self.process = None
        if process is not None:
            end_session(process)
            if process.stdin is not None:
                process.stdin.close()


class Followers:
    """Followers of ``report_to`` for the run in ``run_directory``."""

    def __init__(self, report_to: Sequence[str], run_directory: Path) -> None:
        self._run_directory = run_directory
        self._followers = [_Follower(spec, run_directory) for spec in report_to]

    def poll(self) -> None:
        """Start the followers that are due. Call it in the thread of the event loop: they die with this thread."""
        for follower in self._followers:
            follower.poll()
            if follower.due_s is not None and follower.due_s <= monotonic():
                self._start(follower)

    def _start(self, follower: _Follower) -> None:
        try:
            follower.start()
        except OSError as error:
            follower.due_s = monotonic() + FINISH_S
            log.warning("tracker %s cannot be started now: %s", follower.name, error)

    async def finish(self, limit_s: float) -> None:
        """Signal the end of the run to all followers (by the end of stdin), and kill those that have not sent all
        after ``limit_s``. A follower that waits for its next start is started now. Idempotent."""
        if limit_s:
            for follower in self._followers:
                follower.poll()
                if follower.due_s:  # 0: neither the follower nor the run was ever started
                    self._start(follower)
        unfinished = [follower for follower in self._followers if follower.process is not None or follower.due_s]
        for follower in unfinished:
            if follower.process is not None and follower.process.stdin is not None:
                follower.process.stdin.close()
        with move_on_after(limit_s):
            while any(follower.running for follower in unfinished):  # noqa: ASYNC110 - ends are polled
                await sleep(_POLL_S)
        for follower in unfinished:
            is_late = follower.process is None or follower.process.poll() != 0
            follower.end()
            if is_late and limit_s:
                log.warning(
                    "tracker %s has not sent all within %g s: streamrl sync %s --to %s sends the rest (see %s)",
                    *(follower.name, limit_s, self._run_directory, follower.name, follower.log),
                )
        self._followers = []
