"""Interfaces between the supervisor and the hosts on which the processes of a run live."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import anyio

from streamrl.recipe.topology import ProcessPlan, Topology

POLL_S = 0.05


class NoHost(OSError):
    """The host of a process is lost, and the run has no other for it until one joins."""


class ProcessHandle(Protocol):
    """A process that was started, as ``subprocess.Popen`` shows one. No method waits."""

    @property
    def pid(self) -> int:
        """Its number on the host that it runs on."""

    def poll(self) -> int | None:
        """Return its exit code; None while it runs; negative: the signal that ended it."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal, unless it is known to have ended."""

    def terminate(self) -> None:
        """Send SIGTERM, unless it is known to have ended."""

    def kill(self) -> None:
        """Send SIGKILL, unless it is known to have ended."""


class Launcher(Protocol):
    """Starts processes of one run and ends them with all that they started. ``on_join``: called when there is room
    again for processes whose host was lost."""

    on_join: Callable[[], None]

    def open(self) -> None:
        """Prepare what starting needs, once, before the first process."""

    async def place(self, topology: Topology) -> Topology:
        """Give each process its host: before the run's processes are started, and each time before they are started
        again. Raises ``StreamRLError`` where there is no room for them."""

    def start(self, plan: ProcessPlan, *, resumes: bool = False) -> ChildProcess:
        """Start one process. ``resumes``: the run goes on where an earlier life of it ended. Raises ``OSError`` where
        the system has no room for a process, ``NoHost`` where its host is lost."""

    async def end_left_behind(self, child: ChildProcess) -> list[int]:
        """Kill what ``child``, which has ended or is to end, left, and every process that belongs to no other child.
        Returns pids that survived SIGKILL, normally none."""

    async def end_all(self) -> list[int]:
        """Kill every process of the run and remove its shared memory. Returns pids that survived SIGKILL."""

    def close(self) -> None:
        """Release what ``open`` acquired, once, after the last end."""


class ChildProcess:
    """A started process with its log. ``log_start``: bytes that the log had before."""

    def __init__(self, plan: ProcessPlan, process: ProcessHandle, log: Path, log_start: int) -> None:
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
    def ended_s(self) -> float:
        """When (monotonic seconds) its end was noticed; now while it runs."""
        return self._ended_s if self._ended_s is not None else time.monotonic()

    @property
    def uptime_s(self) -> float:
        """Seconds since it was started, or from then until its end was noticed."""
        return self.ended_s - self._started_s

    @property
    def ended_for_s(self) -> float:
        """Seconds since its end was noticed; 0 while it runs."""
        return 0.0 if self.running else time.monotonic() - self.ended_s

    def not_replaced(self) -> None:
        """Note that no successor could be started: as if one had been, and had died at once."""
        self._started_s = self._ended_s = time.monotonic()


async def ended_within(seconds: float, *children: ChildProcess, unless: Callable[[], bool] = lambda: False) -> None:
    """Wait until all of them have ended, or for so long, or until ``unless`` holds."""
    with anyio.move_on_after(seconds):
        while any(child.running for child in children) and not unless():  # noqa: ASYNC110 - ends are polled
            await anyio.sleep(POLL_S)
