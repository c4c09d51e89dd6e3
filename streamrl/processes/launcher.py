"""Interfaces between the supervisor and the launchers that start its processes: ``local_launcher`` and ``cluster``. All
are in the process of the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Protocol

from anyio import move_on_after, sleep

from streamrl.recipe.topology import ProcessPlan, Topology

POLL_S = 0.05


class NoHost(OSError):
    """The host of a process is lost, and the run has no other for it until one joins."""


class ProcessHandle(Protocol):
    """A process that was started, with the interface of ``subprocess.Popen``. No method waits."""

    @property
    def pid(self) -> int:
        """Process id on its host."""

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs; negative for a signal that ended it."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless the process is known to have ended."""

    def terminate(self) -> None:
        """Send SIGTERM, unless the process is known to have ended."""

    def kill(self) -> None:
        """Send SIGKILL, unless the process is known to have ended."""


class Launcher(Protocol):
    """Starts processes of one run and ends them with all their descendants. ``on_join``: callback for a host that has
    joined: processes whose host was lost have room again."""

    on_join: Callable[[], None]

    def open(self) -> None:
        """Prepare the launcher, once, before the first process."""

    async def place(self, topology: Topology) -> Topology:
        """Give each process its host: before the run's processes are started, and each time before all are started
        again. Raises ``StreamRLError`` where there is no room for them."""

    def start(self, plan: ProcessPlan, *, resumes: bool = False) -> ChildProcess:
        """Start one process. ``resumes``: whether the run goes on where an earlier life of it ended. Raises ``OSError``
        where the system has no room for a process, ``NoHost`` where its host is lost."""

    async def end_left_behind(self, child: ChildProcess) -> list[int]:
        """Kill the processes that ``child``, which has ended or must end, started, and every orphan of the run. Returns
        pids that survived SIGKILL, normally none."""

    async def end_all(self) -> list[int]:
        """Kill every process of the run and remove its shared memory. Returns pids that survived SIGKILL."""

    def close(self) -> None:
        """Release what ``open`` acquired, once, after the last end."""


class ChildProcess:
    """A started process with its log. ``log_start``: size of the log in bytes before the start."""

    def __init__(self, plan: ProcessPlan, process: ProcessHandle, log: Path, log_start: int) -> None:
        self.name = plan.name
        self.plan = plan
        self.process = process
        self.log = log
        self.log_start = log_start
        self._started_s = monotonic()
        self._ended_s: float | None = None

    @property
    def running(self) -> bool:
        """Return whether the process has not ended yet."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the process runs; negative for a signal that ended it."""
        code = self.process.poll()
        if code is not None and self._ended_s is None:
            self._ended_s = monotonic()
        return code

    @property
    def ended_s(self) -> float:
        """Monotonic time at which its end was noticed; the present time while it runs."""
        return self._ended_s if self._ended_s is not None else monotonic()

    @property
    def uptime_s(self) -> float:
        """Seconds from its start until now, or until its end was noticed."""
        return self.ended_s - self._started_s

    @property
    def ended_for_s(self) -> float:
        """Seconds since its end was noticed; 0 while it runs."""
        return 0.0 if self.running else monotonic() - self.ended_s

    def not_replaced(self) -> None:
        """Note that no successor could be started: this process then counts as a successor that died at once."""
        self._started_s = self._ended_s = monotonic()


async def ended_within(seconds: float, *children: ChildProcess, unless: Callable[[], bool] = lambda: False) -> None:
    """Wait until all ``children`` have ended, or for ``seconds``, or until ``unless`` returns true."""
    with move_on_after(seconds):
        while any(child.running for child in children) and not unless():  # noqa: ASYNC110 - ends are polled
            await sleep(POLL_S)
