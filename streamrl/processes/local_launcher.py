"""Processes of a run on this host: how they are started, and how they and their descendants are found and ended.

The supervisor calls ``LocalLauncher`` in the process of the command; on a cluster the daemon of each host calls it.
The calling process is a child subreaper: orphans of the run become its children, and every process of the run is below
it. A process belongs to the run when it is in the session of a process that was started here (vLLM's processes stay in
the session of their engine process), carries the run's marker in its variables, or has such a parent. Other children of
a user's program are not touched. Shared memory is named after the run (``name_shared_memory``)."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from os import environ, getpid
from pathlib import Path
from threading import Lock
from time import monotonic
from types import MappingProxyType

import psutil
from anyio import to_thread
from psutil import Error as PsutilError
from psutil import Process

from streamrl.base.run_process import (
    PARENT_PID,
    PR_SET_CHILD_SUBREAPER,
    RUN_MARKER,
    memory_prefix,
    set_process_option,
    start_session,
)
from streamrl.base.types import TextMapping
from streamrl.processes.launcher import ChildProcess
from streamrl.recipe.topology import ProcessPlan, Topology

ENTRY = ("-P", "-m", "streamrl.launch")
"""Arguments of Python that start a process of a run, before the arguments of its role."""
SOCKET_PREFIX = "streamrl-"
"""Prefix of the names of directories of sockets, in the directory for temporary files."""
_SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.02
_DEADLINE_S = 6.0
_TRACKER_S = 2.0  # time for Python's resource trackers to remove shared memory with other names, and to end


def marker_of(socket_directory: Path) -> str:
    """The marker of the processes and of the shared memory of the run with this directory of sockets."""
    return f"{SOCKET_PREFIX}{sha256(os.fsencode(socket_directory)).hexdigest()[:12]}"


_open_runs = 0


def adopt_orphans(change: int) -> None:
    """Adopt orphans below this process as its children while it has runs. ``change``: +1 when a run begins, -1 when it
    has ended. Linux only: on other systems orphans are not found."""
    global _open_runs
    _open_runs += change
    if sys.platform == "linux":
        set_process_option(PR_SET_CHILD_SUBREAPER, int(_open_runs > 0))


class LocalLauncher:
    """Starts the processes of one run as children of this process: ``command`` with the arguments of a role. Each child
    leads its own session: a terminal's Ctrl-C reaches only the supervisor. ``variables``: variables of the children,
    in addition to the variables of this process; ``sessions``: pids of the children, which lead the sessions.

    Start processes from the thread of the event loop only: they die with the thread that started them."""

    def __init__(
        self,
        command: Sequence[str],
        run_directory: Path,
        socket_directory: Path,
        variables: TextMapping = MappingProxyType({}),
    ) -> None:
        self.marker = marker_of(socket_directory)
        self.sessions: set[int] = set()
        self.on_join: Callable[[], None] = lambda: None
        self._command = command
        self._variables = variables
        self._run_directory = run_directory
        self._socket_directory = socket_directory
        self._starting = Lock()  # a child that was just started and is not in ``sessions`` yet is no orphan

    def open(self) -> None:
        """Adopt orphans of the run from now on, and lock its directory of sockets: systemd-tmpfiles cleans no folder
        that is locked."""
        adopt_orphans(1)
        self._lock = os.open(self._socket_directory, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Stop adopting orphans, unless this process has another run."""
        adopt_orphans(-1)
        os.close(self._lock)

    def start(self, plan: ProcessPlan, *, resumes: bool = False) -> ChildProcess:
        """Start one role. Raises ``OSError`` where the system has no room for a process."""
        arguments = [*self._command, plan.role.value, "--index", str(plan.index)]
        arguments += ["--run-directory", str(self._run_directory)]
        arguments += ["--socket-directory", str(self._socket_directory)]
        if resumes:
            arguments.append("--resume")
        variables = environ | dict(self._variables)
        variables |= {
            PARENT_PID: str(getpid()),
            RUN_MARKER: self.marker,
            "TMPDIR": str(self._socket_directory),  # removed at the end, with the files of killed processes
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves its stack in the log
            # Models and data were resolved before. User code that asks the Hub itself wants HF_HUB_OFFLINE=0 set.
            "HF_HUB_OFFLINE": environ.get("HF_HUB_OFFLINE") or "1",
        }
        log = self._run_directory / "logs" / f"{plan.name}.log"
        with log.open("ab") as output, self._starting:
            process = start_session(arguments, stdout=output, env=variables)
            self.sessions.add(process.pid)
            return ChildProcess(plan, process, log, output.tell())

    async def place(self, topology: Topology) -> Topology:
        """Return ``topology`` unchanged: all processes are on this host."""
        return topology

    async def end_left_behind(self, child: ChildProcess) -> list[int]:
        """Kill the session of ``child`` and every orphan of the run, and remove the shared memory of the session.
        Returns pids that survived SIGKILL."""
        return await to_thread.run_sync(self._end_left_behind, child.process.pid)

    async def end_all(self) -> list[int]:
        """Kill every process of the run and remove its shared memory. Returns pids that survived SIGKILL."""
        return await to_thread.run_sync(self._end_all)

    def _end_left_behind(self, session: int) -> list[int]:
        own_pid = getpid()

        def left_behind(process: Process) -> bool:
            with suppress(ProcessLookupError, PsutilError):
                is_orphan = process.ppid() == own_pid and process.pid not in self.sessions
                return is_orphan or os.getsid(process.pid) == session
            return False

        def find() -> list[Process]:
            with self._starting:
                return [process for process in self._living() if left_behind(process)]

        survivors = self._kill(find)
        remove_shared_memory(memory_prefix(self.marker, session))
        if not survivors:
            self.sessions.discard(session)
        return survivors

    def _end_all(self) -> list[int]:
        survivors = self._kill(self._living)
        remove_shared_memory(self.marker)
        return survivors

    def _living(self) -> list[Process]:
        """All living processes of the run, parents first; zombies are dead."""
        run_processes: dict[int, Process] = {}
        for process in Process().children(recursive=True):  # parents come before their children
            try:
                if process.ppid() in run_processes or self._is_of_run(process):
                    run_processes[process.pid] = process
            except (ProcessLookupError, PsutilError):
                continue  # it ended meanwhile, or belongs to another user
        return [process for process in run_processes.values() if _lives(process)]

    def _kill(self, find: Callable[[], list[Process]]) -> list[int]:
        """Kill the processes that ``find`` returns until none of them lives. Returns pids that survived."""
        began_s = monotonic()
        deadline = began_s + _DEADLINE_S
        living: set[Process] = set()
        # A process that is ending loses its variables long before it is gone: keep the processes of earlier rounds.
        while True:
            living.update(find())
            living = {process for process in living if not self._has_ended(process)}
            if not living or monotonic() >= deadline:
                return [process.pid for process in living]
            for process in living:
                with suppress(PsutilError):
                    if monotonic() > began_s + _TRACKER_S or not is_resource_tracker(process):
                        process.kill()
            time.sleep(_POLL_S)

    def _has_ended(self, process: Process) -> bool:
        if process.pid not in self.sessions:  # an orphan, which this process must reap; grandchildren raise an error
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        return not _lives(process)

    def _is_of_run(self, process: Process) -> bool:
        return os.getsid(process.pid) in self.sessions or process.environ().get(RUN_MARKER) == self.marker


def remove_shared_memory(prefix: str) -> None:
    """Remove this user's shared memory and semaphores whose names begin with ``prefix``."""
    for pattern in (f"{prefix}*", f"sem.{prefix}*"):
        for path in _SHARED_MEMORY.glob(pattern):
            with suppress(OSError):
                path.unlink()


def end_marked_processes(sockets: Path, seconds: float) -> list[int]:
    """Kill the processes of the run with these sockets, and remove its shared memory and its sockets: for a run whose
    supervisor, or whose daemon on this host, was killed. Blocking. Returns pids that survived SIGKILL."""
    marker = marker_of(sockets)
    killed = []
    for process in psutil.process_iter():
        with suppress(PsutilError):
            if process.environ().get(RUN_MARKER) == marker and not is_resource_tracker(process):  # which ends itself
                process.kill()
                killed.append(process)
    _, alive = psutil.wait_procs(killed, timeout=seconds)
    remove_shared_memory(marker)
    with suppress(OSError):
        status = sockets.lstat()
        # Another user may put anything into a directory for temporary files.
        if sockets.name.startswith(SOCKET_PREFIX) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            shutil.rmtree(sockets, ignore_errors=True)
    return [process.pid for process in alive]


def is_resource_tracker(process: Process) -> bool:
    """Return whether ``process`` is Python's resource tracker, which ends by itself."""
    return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())


def _lives(process: Process) -> bool:
    """Return whether a process lives, also if its first thread has ended: its other threads still hold its memory."""
    try:
        is_dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) and process.num_threads() <= 1
        return bool(process.is_running() and not is_dead)
    except PsutilError:
        return False
