"""One process that the supervisor started: how it is started, and how it ended."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from streamrl.base.run_process import PARENT_PID, RUN_MARKER
from streamrl.launch.supervise.clean_up import RunProcesses
from streamrl.launch.supervise.exit_reason import Death, read_reason, reason_path
from streamrl.recipe.topology import ProcessPlan

POLL_S = 0.05


class ChildProcess:
    """A started process with its log. ``log_start``: bytes that the log had before."""

    def __init__(self, plan: ProcessPlan, process: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        self.name = plan.name
        self.plan = plan
        self.process = process
        self.log = log
        self.log_start = log_start
        self._started_s = time.monotonic()
        self._ended_s: float | None = None

    @property
    def running(self) -> bool:
        """Return whether it has not ended yet."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs; negative: the signal that ended it."""
        code = self.process.poll()
        if code is not None and self._ended_s is None:
            self._ended_s = time.monotonic()
        return code

    @property
    def uptime_s(self) -> float:
        """Seconds since it was started, or from then until its end was noticed."""
        return (self._ended_s if self._ended_s is not None else time.monotonic()) - self._started_s

    @property
    def ended_for_s(self) -> float:
        """Seconds since its end was noticed; 0 while it runs."""
        return 0.0 if self.running or self._ended_s is None else time.monotonic() - self._ended_s

    def not_replaced(self) -> None:
        """Note that no successor could be started: as if one had been, and had died at once."""
        self._started_s = self._ended_s = time.monotonic()

    def death(self, run_directory: Path) -> Death:
        """Return its end, with the reason it left behind."""
        return Death(
            name=self.name,
            exit_code=self.exit_code,
            detected_s=self._ended_s or time.monotonic(),
            reason=read_reason(run_directory, self.name),
        )


def start_child(
    plan: ProcessPlan,
    command: Sequence[str],
    run_directory: Path,
    socket_directory: Path,
    processes: RunProcesses,
    *,
    resumes: bool = False,
) -> ChildProcess:
    """Start one role in a session of its own: a terminal's Ctrl-C reaches the supervisor only. ``resumes``: the run
    goes on where an earlier life of it ended. Raises ``OSError`` where the system has no room for a process."""
    arguments = [*command, plan.role.value, "--index", str(plan.index), "--run-directory", str(run_directory)]
    arguments += ["--resume"] if resumes else []
    environment = os.environ | {
        PARENT_PID: str(os.getpid()),
        RUN_MARKER: processes.marker,
        "TMPDIR": str(socket_directory),  # removed at the end, with what killed processes (vLLM's too) left in it
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves its stack in the log
        # Models and data were resolved before. User code that asks the Hub itself wants HF_HUB_OFFLINE=0 set.
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE") or "1",
    }
    log = run_directory / "logs" / f"{plan.name}.log"
    with log.open("ab") as output:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

        child = ChildProcess(plan, processes.start(start), log, output.tell())
    # Only now: where nobody can be started, the reason of the one before is still the reason.
    reason_path(run_directory, plan.name).unlink(missing_ok=True)
    return child


async def ended_within(seconds: float, *children: ChildProcess, unless: Callable[[], bool] = lambda: False) -> None:
    """Wait until all of them have ended, or for so long, or until ``unless`` holds."""
    with anyio.move_on_after(seconds):
        while any(child.running for child in children) and not unless():  # noqa: ASYNC110 - ends are polled
            await anyio.sleep(POLL_S)
