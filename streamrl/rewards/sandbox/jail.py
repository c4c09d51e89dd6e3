"""One jailed process and the process that watches it: all steps between the fork of the zygote and the code.

    zygote --fork into new namespaces--> watcher (pid 1 in them) --fork--> the code (confined, without a privilege)

``zygote`` calls ``watch`` in each watcher. The watcher waits for the end of the code, up to the time limit, and writes
one JSON line about it; when the watcher ends, the kernel ends all other processes in its process namespace. Imports
only the standard library: the zygote loads this file."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from streamrl.rewards.sandbox import files, seccomp
from streamrl.rewards.sandbox import syscalls as sc

_NOBODY = 65534
_KILL_ATTEMPTS = 1000
AWAITED = {signal.SIGCHLD, signal.SIGTERM}
"""Signals that are blocked when a watcher is forked, so that only ``_wait`` receives them: a signal that is not blocked
is lost to the first process of a namespace. SIGTERM is the zygote's request to cancel the run."""
_MOST_ERROR_CHARACTERS = 500


class Limits(NamedTuple):
    """Limits of one run. ``seconds``: wall time; ``processes``: number of processes, 1: the code cannot start any."""

    seconds: float
    memory_bytes: int
    file_bytes: int
    scratch_bytes: int
    scratch_files: int
    processes: int
    threads: int
    open_files: int
    stack_bytes: int


class Layers(NamedTuple):
    """Layers that confine the code. ``seccomp``: index of the machine in pairs of call numbers, None: no filter;
    ``library``: directory of the standard library; ``filters``: filters that were assembled before, the first for runs
    that cannot start processes, the second for runs that can; ``base_bytes``: address space of the zygote, which the
    code has from the start."""

    namespaces: bool
    landlock: bool
    seccomp: int | None
    library: str
    filters: tuple[bytes, ...]
    base_bytes: int


class Job(NamedTuple):
    """Work of a jailed process. ``prepare``: function of ``program`` that is called in the confined process; it returns
    the function that runs the code and returns the exit code. ``stdio``: descriptors that become 0, 1 and 2;
    ``open_fds``: descriptors that stay open."""

    prepare: Callable[[], Callable[[], int]]
    stdio: tuple[int, int, int]
    open_fds: tuple[int, ...]


def watch(layers: Layers, limits: Limits, job: Job, report_fd: int) -> NoReturn:
    """Run a watcher, from its first instruction to its exit. Before it exits it writes a line to ``report_fd``:
    ``{"report": {"status", "seconds", "cpu_seconds", "timed_out"}}``, or ``{"error"}`` where no jail could be built."""
    try:
        _enter(layers, limits, job, report_fd)
        sc.adopt_orphans()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        pid = os.fork()
        if pid == 0:
            _become(layers, limits, job, report_fd)
        for fd in {*job.stdio, *job.open_fds}:
            os.close(fd)
        _report(report_fd, {"report": _wait(pid, limits.seconds, alone=layers.namespaces)})
    except BaseException as error:  # noqa: BLE001 - every error is reported to the zygote, and this process must end
        _report(report_fd, {"error": _error_text(error)})
    os._exit(0)


def _enter(layers: Layers, limits: Limits, job: Job, report_fd: int) -> None:
    """Take the first steps in the new namespaces."""
    sc.close_all_but({*job.stdio, *job.open_fds, report_fd})
    sc.die_with_parent()
    if layers.namespaces:
        sc.set_dumpable(True)  # otherwise /proc/self belongs to the host's root
        files.map_user(_NOBODY, 0, 0)
        files.enter(limits.scratch_bytes, limits.scratch_files)
    # No process that the code starts may read the memory of this process.
    sc.set_dumpable(False)


def _become(layers: Layers, limits: Limits, job: Job, report_fd: int) -> NoReturn:
    """Confine the code's process, and run the code in it."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for target, fd in enumerate(job.stdio):
            os.dup2(fd, target)
        sc.close_all_but({0, 1, 2, *job.open_fds, report_fd})
        os.chdir(files.SCRATCH)
        os.umask(0o077)
        _confine(layers, limits)
        run = job.prepare()
    except BaseException as error:  # noqa: BLE001 - every error is reported and ends this process
        _report(report_fd, {"error": _error_text(error)})
        os._exit(70)
    os.close(report_fd)
    try:
        os._exit(run())
    finally:  # ``run`` is not expected to raise; an exception from it must not become a success
        os._exit(70)


def _confine(layers: Layers, limits: Limits) -> None:
    _set_limits(layers, limits)
    os.setsid()
    sc.drop_capabilities()
    sc.die_with_parent()
    sc.set_no_new_privileges()
    # Without a mount namespace no directory belongs to the run alone and is removed after it.
    writable = []
    if layers.namespaces:
        writable.append(files.SCRATCH)
    if layers.landlock:
        files.restrict(readable=[layers.library], writable=writable, devices=files.DEVICES)
    if layers.seccomp is not None:
        program = layers.filters[limits.processes > 1] if layers.filters else _filter(layers, processes=False)
        sc.set_seccomp_filter(program)


def with_filters(layers: Layers) -> Layers:
    """``layers`` with the filters, where they are the same for every run."""
    if layers.seccomp is None or not layers.namespaces:
        return layers
    return layers._replace(filters=tuple(_filter(layers, processes=processes) for processes in (False, True)))


def _filter(layers: Layers, *, processes: bool) -> bytes:
    return seccomp.assemble(
        layers.seccomp or 0,
        paths=layers.namespaces or layers.landlock,
        modes=layers.namespaces,
        processes=processes,
        only_pid=None if layers.namespaces else os.getpid(),
    )


def _set_limits(layers: Layers, limits: Limits) -> None:
    seconds = math.ceil(limits.seconds) + 1
    # RLIMIT_AS counts addresses, so the limit is above the address space that the zygote already has.
    memory = layers.base_bytes + limits.memory_bytes
    resource_limits = [
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_STACK, limits.stack_bytes, limits.stack_bytes),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ]
    if layers.namespaces:  # without a user namespace the limit would count all processes of the user
        tasks = limits.processes + limits.threads + 1
        resource_limits.append((resource.RLIMIT_NPROC, tasks, tasks))
    for which, soft, hard in resource_limits:
        highest = resource.getrlimit(which)[1]
        if highest != resource.RLIM_INFINITY:
            soft = min(soft, highest)
            hard = min(hard, highest)
        resource.setrlimit(which, (soft, hard))


def _wait(pid: int, seconds: float, *, alone: bool) -> dict[str, Any]:
    """Wait at most ``seconds`` for the end of ``pid``, then kill it. Returns the report about it. ``alone``: the kernel
    ends all other processes of the run when this process ends."""
    started = time.monotonic()
    cancelled = False
    timed_out = False
    while True:
        ended_pid, status, usage = os.wait4(-1, os.WNOHANG)
        if ended_pid == pid:
            break
        if ended_pid:
            continue  # an orphan
        wait_s = started + seconds - time.monotonic()
        if wait_s <= 0 or cancelled:
            timed_out = wait_s <= 0
            os.kill(pid, signal.SIGKILL)
            wait_s = 1.0
        signal_info = signal.sigtimedwait(AWAITED, wait_s)
        cancelled = cancelled or (signal_info is not None and signal_info.si_signo == signal.SIGTERM)
    wall_seconds = time.monotonic() - started
    if not alone:
        _kill_descendants()
    exit_code = os.waitstatus_to_exitcode(status)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return {"status": exit_code, "seconds": wall_seconds, "cpu_seconds": cpu_seconds, "timed_out": timed_out}


def _kill_descendants() -> None:
    """Kill processes that the code left. Orphans become children of this process, so the loop ends when it has no
    more children."""
    children = f"/proc/self/task/{os.getpid()}/children"
    for _ in range(_KILL_ATTEMPTS):
        try:
            with open(children) as file:
                pids = [int(word) for word in file.read().split()]
        except OSError:  # a kernel without this file
            pids = []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.wait4(-1, 0 if pids else os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _report(fd: int, report: dict[str, Any]) -> None:
    # A report that cannot be written has no reader: the zygote is gone.
    with suppress(OSError):
        os.write(fd, json.dumps(report).encode() + b"\n")


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_ERROR_CHARACTERS]


def read_reports(text: bytes) -> dict[str, Any]:
    """The report among the lines that a watcher and its child wrote: the first error, otherwise the last line."""
    reports: Iterable[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    last_report: dict[str, Any] = {"error": "the watcher of the code ended without a report"}
    for report in reports:
        if "error" in report:
            return report
        last_report = report
    return last_report
