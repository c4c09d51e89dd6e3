"""Set-up of a process of a run, before anything heavy is imported (standard library only): death with the parent, names
of shared memory, usable cores, a writable home. Every process that streamrl starts calls it first: processes of a run
(``launch.__main__``), commands, throw-away processes, fork servers, trackers, agents, vLLM's plug-in. Their parents
start them by ``start_session`` and end them by ``end_session``; the supervisor and its launchers use the constants.
Shared memory is named after the run, so that it can be found when every process that would have removed it was
killed."""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import process, shared_memory
from os import environ
from pathlib import Path
from signal import SIGKILL
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

PARENT_PID = "STREAMRL_PARENT_PID"
RUN_MARKER = "STREAMRL_RUN_MARKER"
"""Variable with a text that only processes of one run have: by it processes and memory that are left are found."""
RUN_EPOCH = "STREAMRL_EPOCH"
"""Variable with the number of times that a run on a cluster was started. Streams refuse a peer with another number; 0
or not set: no check."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
CUDA_ORDER = "CUDA_DEVICE_ORDER"
_TAIL_BYTES = 4096
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

REWARD_RESTART_EXIT_CODE = 75
"""Exit code with which a reward worker requests a successor from the supervisor: user code blocks the process (or too
many of its threads) and cannot be stopped. EX_TEMPFAIL of sysexits.h."""


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent named in ``STREAMRL_PARENT_PID`` dies. Does nothing without this
    variable.

    The child calls this itself, because ``preexec_fn`` can deadlock in a parent that has threads. The signal follows
    the parent's *thread* that started this process, so the supervisor starts processes only from the thread of its
    event loop."""
    parent = environ.get(PARENT_PID)
    if parent is not None:
        die_with(int(parent))


def die_with(parent: int | None) -> None:
    """End this process when ``parent``, the process that started it, ends or has ended. Does nothing outside of
    Linux."""
    if sys.platform != "linux":
        return
    set_process_option(PR_SET_PDEATHSIG, SIGKILL)
    # The parent may have died before the call: then no signal will ever come.
    if os.getppid() != parent:
        os._exit(1)


def set_process_option(option: int, value: int) -> None:
    """Call ``prctl(option, value)``. Raises ``OSError``."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def start_session(command: Sequence[str], **options: Any) -> Popen[bytes]:
    """Start a child that leads a session of its own: no signal of a terminal or of this process's group reaches it.
    ``options``: options of ``Popen``; where they do not say otherwise, the child reads nothing, and stderr goes where
    stdout goes. Raises ``OSError``."""
    usual: dict[str, Any] = {"stdin": DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
    return Popen(command, **(usual | options))


def end_session(child: Popen[bytes], patience_s: float = 0.0) -> bool:
    """Give a child of ``start_session`` ``patience_s`` seconds to end by itself, then kill it with all processes of its
    group, also where the wait is interrupted. Returns whether it ended by itself. Blocking; idempotent."""
    try:
        child.wait(patience_s)
        return True
    except TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError, PermissionError):  # nothing of the group is left, or it is another user's
            os.killpg(child.pid, SIGKILL)
        with suppress(TimeoutExpired):  # it may be in a call to a disk that does not answer
            child.wait(1.0)


def last_line(output: int) -> str:
    """The last line of a file that a child wrote, at most 200 characters. ``output``: descriptor of the file."""
    start = max(0, os.fstat(output).st_size - _TAIL_BYTES)
    return os.pread(output, _TAIL_BYTES, start).decode(errors="replace").strip().rpartition("\n")[2][:200]


@contextmanager
def redirected(descriptor: int, target: int) -> Iterator[None]:
    """Redirect a descriptor of stdout or stderr to ``target`` for the block; processes that are started in it keep
    ``target``. vLLM logs to stdout, in several processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved, descriptor)
        os.close(saved)


def signal_name(number: int) -> str:
    """Name of a signal (``SIGKILL`` for 9), or its number where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def memory_prefix(marker: str, session: int) -> str:
    """Prefix of the names of shared memory that the processes of one POSIX session make; each child of the supervisor
    has a session. ``marker``: marker of the run; ``session``: id of the session (``os.getsid``)."""
    return f"{marker}-{session}-"


def name_shared_memory() -> str:
    """Have ``multiprocessing`` name its shared memory and semaphores in this process with the marker of the run and the
    id of the session. Returns the prefix of the names; in a process of no run nothing changes, and it is empty."""
    marker = environ.get(RUN_MARKER)
    if not marker:
        return ""
    prefix = memory_prefix(marker, os.getsid(0))
    shared_memory._SHM_NAME_PREFIX = f"/{prefix}"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 9  # type: ignore[attr-defined] # with eight random digits
    process.current_process()._config["semprefix"] = f"/{prefix}mp"  # type: ignore[attr-defined]
    return prefix


def usable_cores() -> int:
    """Number of cores that this process may use: those of its affinity, or the quota of its control group if it is
    less."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such file, or no quota: "max"
        quota, period = map(int, CPU_QUOTA.read_text().split())
        cores = min(cores, -(-quota // period))
    return cores


def ensure_home() -> None:
    """Give this process and its children a writable home. Containers run programs under user ids without one.

    Sets HOME to a private temporary directory where neither the user's home nor the folder of caches is writable, or
    XDG_CACHE_HOME where only the folder of caches is not; and LOGNAME where the user id has no name. Where no such
    directory can be made, nothing is set."""
    user = os.geteuid()
    try:
        pwd.getpwuid(user)
    except KeyError:
        environ.setdefault("LOGNAME", f"uid-{user}")
    home = Path(os.path.expanduser("~"))
    usable = home.is_absolute() and os.access(home, os.W_OK | os.X_OK)
    caches = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    caches_usable = usable
    if caches.exists() and home.is_absolute():
        caches_usable = os.access(caches, os.W_OK | os.X_OK)
    if not caches_usable:
        with suppress(OSError):
            private = private_directory(Path(tempfile.gettempdir()) / f"streamrl-home-{user}")
            environ["XDG_CACHE_HOME" if usable else "HOME"] = str(private)


def private_directory(directory: Path) -> Path:
    """Make ``directory``, or return a new one where it exists and other users may access it. Raises ``OSError``."""
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return directory
    return Path(tempfile.mkdtemp(prefix=f"{directory.name}-"))
