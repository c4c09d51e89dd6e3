"""One process that the supervisor started: how it is started, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec
import psutil

from streamrl.plan.topology import ProcessPlan
from streamrl.supervise.exit_reason import Death, log_of, read_reason, reason_path
from streamrl.supervise.guardian import Line
from streamrl.supervise.parent_death import PARENT_PID, RUN_MARKER
from streamrl.supervise.signal_masks import in_mask
from streamrl.supervise.sweep import RunTraces, as_argument, keep_traces, seconds_after_boot

POLL_S = 0.05
_PF_EXITING = 0x4
FORKLESS_S = 1.0  # after the system refused a process: time for it to have room again


class ChildProcess:
    """A started process with its log. ``plan`` is None for the guardian; ``created``:
    seconds after boot."""

    def __init__(
        self, name: str, plan: ProcessPlan | None, process: subprocess.Popen[bytes], log: Path, log_start: int
    ):
        self.name = name
        self.plan = plan
        self.process = process
        self.log = log
        self.log_start = log_start
        self.created = _created(process.pid)
        self.lacks_successor = False
        self._started_s = time.monotonic()
        self._ended_s: float | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        code = self.process.poll()
        if code is not None and self._ended_s is None:
            self._ended_s = time.monotonic()
        return code

    @property
    def is_ending(self) -> bool:
        """Whether it is about to end: a large process gives its memory back for seconds after SIGKILL."""
        return self.running and _is_ending(self.process.pid)

    @property
    def lived_s(self) -> float:
        """Seconds since it was started, or from then until its end was noticed."""
        return (self._ended_s if self._ended_s is not None else time.monotonic()) - self._started_s

    @property
    def ended_for_s(self) -> float:
        """Seconds since its end was noticed; 0 while it runs."""
        return 0.0 if self.running or self._ended_s is None else time.monotonic() - self._ended_s

    def ended_before(self, moment_s: float) -> bool:
        """Whether its end was noticed before that moment (``time.monotonic``)."""
        return not self.running and self._ended_s is not None and self._ended_s < moment_s

    def has_no_successor(self) -> None:
        """Nobody could be started in its place: as if somebody had been, and had died at once."""
        self._started_s = self._ended_s = time.monotonic()
        self.lacks_successor = True

    def death(self, run_directory: Path) -> Death:
        """Its end, with the reason it left behind."""
        reason = read_reason(run_directory, self.name) if self.plan else None
        code = self.exit_code
        return Death(name=self.name, exit_code=code, detected_s=self._ended_s or time.monotonic(), reason=reason)

    def tell(self, line: Line) -> None:
        """Write one line to its stdin. A reader that died is noticed by the watch, not here."""
        if self.process.stdin is None or not self.running:
            return
        try:
            self.process.stdin.write(msgspec.json.encode(line) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return

    def close(self, wait_s: float = 2.0) -> None:
        """Close its pipe and reap it; it has ended, or is about to. One that the kernel does not let go is left."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # of a line that it did not read any more
                self.process.stdin.close()
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)


def start_child(
    plan: ProcessPlan, command: Sequence[str], run_directory: Path, traces: RunTraces, *, resumes: bool = False
) -> ChildProcess:
    """Start one role in a session of its own: a terminal's Ctrl-C reaches the supervisor only. ``resumes``: it goes on
    where a predecessor was that died."""
    arguments = [*command, plan.role.value, "--index", str(plan.index), "--run-directory", str(run_directory)]
    arguments += ["--resume"] if resumes else []
    child = _start(plan.name, plan, arguments, run_directory, _environment(traces))
    # Only now: where nobody can be started, the reason of the one before is still the reason.
    reason_path(run_directory, plan.name).unlink(missing_ok=True)
    return child


def _environment(traces: RunTraces) -> dict[str, str]:
    return os.environ | {
        PARENT_PID: str(os.getpid()),
        RUN_MARKER: traces.marker,
        "TMPDIR": traces.socket_directory,  # removed at the end, with what killed processes (vLLM's too) left in it
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves its stack in the log
    }


def open_guardian(python: str, run_directory: Path, traces: RunTraces) -> ChildProcess:
    """Start the guardian. It carries no marker, so that it never sweeps itself."""
    traces.run_directory = str(run_directory)
    keep_traces(traces)
    arguments = [python, "-P", "-m", "streamrl.supervise.guardian", as_argument(traces), str(os.getpid())]
    return _start("guardian", None, arguments, run_directory, dict(os.environ))


async def ended_within(seconds: float, *children: ChildProcess, unless: Callable[[], bool] = lambda: False) -> None:
    """Wait until all of them have ended, or for so long, or until ``unless`` holds."""
    with anyio.move_on_after(seconds):
        while any(child.running for child in children) and not unless():  # noqa: ASYNC110 - ends are polled
            await anyio.sleep(POLL_S)


def _start(
    name: str, plan: ProcessPlan | None, arguments: Sequence[str], run_directory: Path, environment: dict[str, str]
) -> ChildProcess:
    path = log_of(run_directory, name)
    with path.open("ab") as output:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL if plan else subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        return ChildProcess(name, plan, process, path, output.tell())


def _created(pid: int) -> float:
    try:
        return seconds_after_boot(psutil.Process(pid))
    except psutil.Error:  # it ended at once; nobody else can have its number before it is reaped
        return time.time() - float(psutil.boot_time())


def _is_ending(pid: int) -> bool:
    """Whether SIGKILL waits for it, or the kernel takes it down (a flag in ``/proc/PID/stat``, see proc(5))."""
    try:
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
        return bool(flags & _PF_EXITING) or in_mask(pid, signal.SIGKILL, "SigPnd", "ShdPnd")
    except OSError:
        return True  # it has gone between two looks
