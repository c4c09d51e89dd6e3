"""Ties between a process and its run, set before anything heavy is imported: standard library only. A process of a run
dies with its parent, and shared memory that it makes is named after the run, so that it can be found when everything
that would have removed it was killed."""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import stat
import sys
import tempfile
from contextlib import suppress
from multiprocessing import process, shared_memory
from pathlib import Path

PARENT_PID = "STREAMRL_PARENT_PID"
RUN_MARKER = "STREAMRL_RUN_MARKER"
RUN_EPOCH = "STREAMRL_EPOCH"
"""Number of the start of the run that a process belongs to, on a cluster; 0 or not set: it is not compared."""
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
CUDA_ORDER = "CUDA_DEVICE_ORDER"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

REWARD_RESTART_EXIT_CODE = 75
"""The exit code by which a reward worker asks the supervisor for another one: user code holds the process (or too many
of its threads) and cannot be stopped. EX_TEMPFAIL of sysexits.h."""


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent named in ``STREAMRL_PARENT_PID`` dies. Without the variable: nothing.

    The child does it itself and not ``preexec_fn``, which can deadlock in a parent that has threads. The signal follows
    the parent's *thread* that started this process, so the supervisor starts processes only from the thread of its
    event loop."""
    expected = os.environ.get(PARENT_PID)
    if expected is not None:
        die_with(int(expected))


def die_with(parent: int | None) -> None:
    """End this process when ``parent``, the process that started it, ends or has ended. Nothing but on Linux."""
    if sys.platform != "linux":
        return
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call: then no signal will ever come.
    if os.getppid() != parent:
        os._exit(1)


def set_process_option(option: int, value: int) -> None:
    """``prctl(option, value)``. Raises ``OSError``."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def memory_prefix(marker: str, session: int) -> str:
    """Prefix of the names of shared memory that processes of ``session`` make in the run with this marker."""
    return f"{marker}-{session}-"


def name_shared_memory() -> str:
    """Name the shared memory and semaphores that ``multiprocessing`` makes here after the run and this session. Returns
    the prefix of the names; empty, and nothing is changed, in a process of no run."""
    marker = os.environ.get(RUN_MARKER)
    if not marker:
        return ""
    prefix = memory_prefix(marker, os.getsid(0))
    shared_memory._SHM_NAME_PREFIX = f"/{prefix}"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 9  # type: ignore[attr-defined] # with eight random digits
    process.current_process()._config["semprefix"] = f"/{prefix}mp"  # type: ignore[attr-defined]
    return prefix


def usable_cores() -> int:
    """Cores that this process may run on, or as many as the quota of its control group is worth where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or no quota: "max"
        quota, period = map(int, CPU_QUOTA.read_text().split())
        cores = min(cores, -(-quota // period))
    return cores


def ensure_home() -> None:
    """Set HOME to a private temporary directory, for this process and those that it starts, where nothing can be
    written below the user's (containers run programs under ids that have none), or XDG_CACHE_HOME where that is true of
    the caches alone; and LOGNAME where the id has no name. Without such a directory caches are not kept."""
    user = os.geteuid()
    try:
        pwd.getpwuid(user)
    except KeyError:
        os.environ.setdefault("LOGNAME", f"uid-{user}")
    home = Path(os.path.expanduser("~"))
    usable = home.is_absolute() and os.access(home, os.W_OK | os.X_OK)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    if not (os.access(caches, os.W_OK | os.X_OK) if caches.exists() and home.is_absolute() else usable):
        with suppress(OSError):
            private = _private_directory(Path(tempfile.gettempdir()) / f"streamrl-home-{user}")
            os.environ["XDG_CACHE_HOME" if usable else "HOME"] = str(private)


def _private_directory(wanted: Path) -> Path:
    """``wanted``, or another where that is not this user's alone. Raises ``OSError``."""
    with suppress(FileExistsError):
        wanted.mkdir(mode=0o700)
    found = wanted.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return wanted
    return Path(tempfile.mkdtemp(prefix=f"{wanted.name}-"))
