"""Ending everything that a run started, and removing what it leaves: also of a run that was killed whole.

The supervisor is a child subreaper: what a process of the run left behind becomes its child, so every process of the
run is below it. Of those it is the run's when it is in the session of a process that the supervisor started (vLLM's
processes stay in their engine host's session), carries the run's marker in its environment, or has such a parent; other
children of a user's program are left alone. Shared memory is named after the run (``name_shared_memory``)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from streamrl.base.errors import StreamRLError
from streamrl.base.run_process import PR_SET_CHILD_SUBREAPER, RUN_MARKER, memory_prefix, set_process_option
from streamrl.recipe.topology import Role, read_topology

SOCKET_PREFIX = "streamrl-"
"""How the directories of sockets begin, in the directory for temporary files."""
_SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.02
_TRACKER_S = 2.0  # for Python's resource trackers to remove what the others left under other names, and to end
# Writers of a run give half-written files and directories these names, and rename them at the end.
_HALF_WRITTEN = re.compile(r"\..+\.partial|.+\.partial|step-\d+\.tmp")
_DEEPEST = 3


def marker_of(socket_directory: Path) -> str:
    """The text that marks the processes and the shared memory of the run with these sockets."""
    return f"{SOCKET_PREFIX}{hashlib.sha256(os.fsencode(socket_directory)).hexdigest()[:12]}"


_adopting = 0


def adopt_orphans(runs: int) -> None:
    """Have orphans below this process become its children while it holds a run (+1: one begins, -1: one has ended).
    Linux only; elsewhere orphans are not found."""
    global _adopting
    _adopting += runs
    if sys.platform == "linux":
        set_process_option(PR_SET_CHILD_SUBREAPER, int(_adopting > 0))


class RunProcesses:
    """The processes of one run below this one. ``sessions``: pids of those that were started, each leads a session."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.sessions: set[int] = set()
        self._starting = threading.Lock()  # one that was just started and is not in ``sessions`` yet is no orphan

    def start(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Start a process that leads a session. Raises as ``start`` does."""
        with self._starting:
            process = start()
            self.sessions.add(process.pid)
        return process

    def living(self) -> list[psutil.Process]:
        """All that live now, parents first; zombies are dead."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.Process().children(recursive=True):  # parents come before their children
            try:
                if process.ppid() in found or self._is_ours(process):
                    found[process.pid] = process
            except (ProcessLookupError, psutil.Error):
                continue  # it ended meanwhile, or belongs to another user
        return [process for process in found.values() if _lives(process)]

    def end_left_behind(self, session: int, *, deadline_s: float = 6.0) -> list[int]:
        """Kill what the leader of ``session``, which has ended, left: its session, and every orphan of the run. Remove
        the shared memory that the session made. Blocking. Returns pids that survived SIGKILL, normally none."""
        own = os.getpid()

        def left_behind(process: psutil.Process) -> bool:
            with suppress(ProcessLookupError, psutil.Error):
                is_orphan = process.ppid() == own and process.pid not in self.sessions
                return is_orphan or os.getsid(process.pid) == session
            return False

        def find() -> list[psutil.Process]:
            with self._starting:
                return [process for process in self.living() if left_behind(process)]

        left = self._kill(find, deadline_s)
        remove_shared_memory(memory_prefix(self.marker, session))
        if not left:
            self.sessions.discard(session)
        return left

    def end_all(self, *, deadline_s: float = 6.0) -> list[int]:
        """Kill every process of the run and remove its shared memory. Blocking. Returns pids that survived."""
        left = self._kill(self.living, deadline_s)
        remove_shared_memory(self.marker)
        return left

    def _kill(self, find: Callable[[], list[psutil.Process]], deadline_s: float) -> list[int]:
        began_s = time.monotonic()
        deadline = began_s + deadline_s
        seen: set[psutil.Process] = set()
        # A process that is ending gives its environment back long before it is gone: remember who was seen.
        while True:
            seen.update(find())
            seen = {process for process in seen if not self._has_ended(process)}
            if not seen or time.monotonic() >= deadline:
                return [process.pid for process in seen]
            for process in seen:
                with suppress(psutil.Error):
                    if time.monotonic() > began_s + _TRACKER_S or not _is_resource_tracker(process):
                        process.kill()
            time.sleep(_POLL_S)

    def _has_ended(self, process: psutil.Process) -> bool:
        if process.pid not in self.sessions:  # an orphan, which nobody else reaps; of others this is an error
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        return not _lives(process)

    def _is_ours(self, process: psutil.Process) -> bool:
        return os.getsid(process.pid) in self.sessions or process.environ().get(RUN_MARKER) == self.marker


def remove_shared_memory(prefix: str) -> None:
    """Remove this user's shared memory and semaphores whose names begin so."""
    for pattern in (f"{prefix}*", f"sem.{prefix}*"):
        for path in _SHARED_MEMORY.glob(pattern):
            with suppress(OSError):
                path.unlink()


def remove_killed_life(run_directory: Path) -> list[str]:
    """Remove what an earlier life of this run left that was killed together with its supervisor: its sockets, its
    shared memory, and processes that were not tied to it (what user code had started). Nobody may run it now.

    Blocking. Returns what could not be removed, and why."""
    try:
        steps = read_topology(run_directory).endpoint(Role.CONTROLLER.value, "steps")
    except (OSError, StreamRLError, KeyError):
        return []
    sockets = Path(steps.removeprefix("ipc://")).parent
    marker = marker_of(sockets)
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(RUN_MARKER) == marker and not _is_resource_tracker(process):  # which ends itself
                process.kill()
                left.append(process)
    _, alive = psutil.wait_procs(left, timeout=5.0)
    remove_shared_memory(marker)
    with suppress(OSError):
        status = sockets.lstat()
        # Another user may put anything into a directory for temporary files.
        if sockets.name.startswith(SOCKET_PREFIX) and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            shutil.rmtree(sockets, ignore_errors=True)
    return [f"processes {[process.pid for process in alive]} survived SIGKILL; look at them with ps"] if alive else []


def remove_half_written(run_directory: Path) -> list[str]:
    """Remove what the processes of this run were writing when they were ended, all of them. Blocking. Returns what
    could not be removed, and why."""
    return [failure for path in list(_half_written_in(run_directory)) if (failure := _remove(path))]


def _half_written_in(run: Path) -> Iterator[Path]:
    """Find half-written files at most ``_DEEPEST`` levels down, and never through a link."""
    waiting = [(run, 0)]
    while waiting:
        folder, depth = waiting.pop()
        with suppress(OSError):
            for entry in list(os.scandir(folder)):
                if _HALF_WRITTEN.fullmatch(entry.name):
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=False) and depth < _DEEPEST:
                    waiting.append((Path(entry.path), depth + 1))


def _remove(path: Path) -> str:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _is_resource_tracker(process: psutil.Process) -> bool:
    return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())


def _lives(process: psutil.Process) -> bool:
    """Return whether a process lives, also if its first thread has ended: the others still hold its memory."""
    try:
        ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) and process.num_threads() <= 1
        return bool(process.is_running() and not ended)
    except psutil.Error:
        return False
