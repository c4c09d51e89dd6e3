"""The followers of a run (``observe/trackers``), which the run can do without: started, started again, given up."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from streamrl.base.run_process import PARENT_PID
from streamrl.processes.restart_policy import Restarts

log = logging.getLogger(__name__)

RESTARTS = 8
FINISH_S = 30.0
"""For what a run wrote last: from its end to that of its followers."""
_POLL_S = 0.05


class _Follower:
    """One process at a time. ``due_s``: when (monotonic) it is started again; None: not at all."""

    def __init__(self, spec: str, run_directory: Path) -> None:
        self.name = spec.partition("?")[0]
        self.log = run_directory / "logs" / f"tracker-{self.name}.log"
        self._command = [sys.executable, "-P", "-m", "streamrl.observe.trackers", spec, str(run_directory)]
        self._restarts = Restarts(RESTARTS)
        self._started_s = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self.due_s: float | None = 0.0

    def start(self) -> None:
        """Start it, in a session of its own. Without the marker of the run: it outlives a run that is resumed."""
        self.due_s = None
        self._started_s = time.monotonic()
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {PARENT_PID: str(os.getpid())},
            )

    def ended(self) -> None:
        """Plan the next start of one that has ended, or give it up."""
        if self.process is None or (code := self.process.poll()) is None:
            return
        self.end()
        pause_s = self._restarts.next_pause(time.monotonic() - self._started_s)
        if pause_s is not None:
            self.due_s = time.monotonic() + pause_s
            log.info("tracker %s ended with %d; it is started again (see %s)", self.name, code, self.log)
        else:
            log.error(
                "tracker %s ended %d times and is not started again; the run goes on, and streamrl sync sends the rest "
                "(see %s)",
                *(self.name, RESTARTS + 1, self.log),
            )

    def end(self) -> None:
        """Kill its session. Idempotent."""
        process = self.process
        self.process = None
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it is in a call to a disk that does not answer
                process.wait(1.0)
            if process.stdin is not None:
                process.stdin.close()


class Followers:
    """Followers of ``report_to`` for the run in ``run_directory``."""

    def __init__(self, report_to: Sequence[str], run_directory: Path) -> None:
        self._run_directory = run_directory
        self._followers = [_Follower(spec, run_directory) for spec in report_to]

    def poll(self) -> None:
        """Start those that are due. Call it in the thread of the event loop, with which they end."""
        for one in self._followers:
            one.ended()
            if one.due_s is not None and one.due_s <= time.monotonic():
                self._start(one)

    def _start(self, one: _Follower) -> None:
        try:
            one.start()
        except OSError as error:
            one.due_s = time.monotonic() + FINISH_S
            log.warning("tracker %s cannot be started now: %s", one.name, error)

    async def finish(self, limit_s: float) -> None:
        """Tell them that the run has ended, and end what has not sent all after ``limit_s``; those that wait for their
        next start have it now. Idempotent."""
        for one in self._followers if limit_s else ():
            one.ended()
            if one.due_s:  # 0: it was never started, nor was the run
                self._start(one)
        left = [one for one in self._followers if one.process is not None or one.due_s]
        for one in left:
            if one.process is not None and one.process.stdin is not None:
                one.process.stdin.close()
        with anyio.move_on_after(limit_s):
            while any(one.process is not None and one.process.poll() is None for one in left):  # noqa: ASYNC110
                await anyio.sleep(_POLL_S)
        for one in left:
            late = one.process is None or one.process.poll() != 0
            one.end()
            if late and limit_s:
                log.warning(
                    "tracker %s has not sent all within %g s: streamrl sync %s --to %s sends the rest (see %s)",
                    *(one.name, limit_s, self._run_directory, one.name, one.log),
                )
        self._followers = []
