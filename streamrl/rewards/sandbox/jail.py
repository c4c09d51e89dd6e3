"""One jailed process and the process that watches it: everything between the fork of the zygote and the code.

    zygote --fork into new namespaces--> watcher (pid 1 in there) --fork--> the code (confined, without a privilege)

The watcher waits for the code until its time is over and writes one JSON line about it; when the watcher ends, the
kernel ends whatever else lives in its process namespace. Imports only the standard library: the zygote loads it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from streamrl.rewards.sandbox import files, seccomp
from streamrl.rewards.sandbox import syscalls as sc

_NOBODY = 65534
_KILL_ROUNDS = 1000
AWAITED = {signal.SIGCHLD, signal.SIGTERM}
"""Signals that a watcher has blocked when it is forked: only ``_wait`` takes them. SIGTERM: the zygote wants no more of
this run. The first process of a namespace loses one that comes before it is blocked."""
_MOST_ERROR_CHARACTERS = 500


class Limits(NamedTuple):
    """Limits of one run. ``seconds``: wall time; ``processes``: 1 means that none can be started."""

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
    """Layers that confine the code. ``seccomp``: index of the machine in pairs of call numbers, None without a filter;
    ``filters``: filters that were assembled before, by whether processes can be started."""

    namespaces: bool
    landlock: bool
    seccomp: int | None
    library: str
    filters: tuple[bytes, ...]
    base_bytes: int  # address space of the zygote, which the code has from the start


class Job(NamedTuple):
    """Work of a jailed process, with file descriptors 0, 1, 2 from ``stdio``, and those of ``open_fds`` open as they
    are. ``prepare`` is ours and is called confined; the function that it gives runs the code, and gives the exit
    code."""

    prepare: Callable[[], Callable[[], int]]
    stdio: tuple[int, int, int]
    open_fds: tuple[int, ...]


def watch(layers: Layers, limits: Limits, job: Job, report_fd: int) -> NoReturn:
    """The life of a watcher, from its first instruction to its last. Writes a line to ``report_fd`` before it ends:
    ``{"report": {"status", "seconds", "cpu_seconds", "timed_out"}}``, or ``{"error"}``: no jail could be built."""
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
    except BaseException as error:  # noqa: BLE001 - the zygote must hear of every kind, and this process end
        _report(report_fd, {"error": _described(error)})
    os._exit(0)


def _enter(layers: Layers, limits: Limits, job: Job, report_fd: int) -> None:
    """First steps in the new namespaces."""
    sc.close_all_but({*job.stdio, *job.open_fds, report_fd})
    sc.die_with_parent()
    if layers.namespaces:
        sc.set_dumpable(True)  # else /proc/self belongs to the host's root
        files.map_user(_NOBODY, 0, 0)
        files.enter(limits.scratch_bytes, limits.scratch_files)
    # Nothing that the code starts may look into this process.
    sc.set_dumpable(False)


def _become(layers: Layers, limits: Limits, job: Job, report_fd: int) -> NoReturn:
    """The life of the code's process, as far as it is ours."""
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
    except BaseException as error:  # noqa: BLE001 - every kind is reported and ends this process
        _report(report_fd, {"error": _described(error)})
        os._exit(70)
    os.close(report_fd)
    try:
        os._exit(run())
    finally:  # ``run`` raises nothing; whatever made it do so is not a success
        os._exit(70)


def _confine(layers: Layers, limits: Limits) -> None:
    _set_limits(layers, limits)
    os.setsid()
    sc.drop_capabilities()
    sc.die_with_parent()
    sc.set_no_new_privileges()
    # Without a mount namespace there is no directory that a run has for itself and that is gone after it.
    writable = [files.SCRATCH] if layers.namespaces else []
    if layers.landlock:
        files.restrict(readable=[layers.library], writable=writable, devices=files.DEVICES)
    if layers.seccomp is not None:
        program = layers.filters[limits.processes > 1] if layers.filters else _filter(layers, processes=False)
        sc.set_seccomp_filter(program)


def with_filters(layers: Layers) -> Layers:
    """``layers`` with the filters that are the same for every run."""
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
    # Resident pages are not what is counted, so that what the zygote already has does not matter.
    memory = layers.base_bytes + limits.memory_bytes
    wanted = [
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_STACK, limits.stack_bytes, limits.stack_bytes),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ]
    if layers.namespaces:  # elsewhere it would count every process of the user's
        most = limits.processes + limits.threads + 1
        wanted.append((resource.RLIMIT_NPROC, most, most))
    for which, soft, hard in wanted:
        highest = resource.getrlimit(which)[1]
        if highest != resource.RLIM_INFINITY:
            soft = min(soft, highest)
            hard = min(hard, highest)
        resource.setrlimit(which, (soft, hard))


def _wait(pid: int, seconds: float, *, alone: bool) -> dict[str, Any]:
    """Wait at most ``seconds`` for the end of ``pid``, then kill it. ``alone``: the kernel ends all other processes."""
    started = time.monotonic()
    unwanted = False
    timed_out = False
    while True:
        ended, status, usage = os.wait4(-1, os.WNOHANG)
        if ended == pid:
            break
        if ended:
            continue  # an orphan
        left = started + seconds - time.monotonic()
        if left <= 0 or unwanted:
            timed_out = left <= 0
            os.kill(pid, signal.SIGKILL)
            left = 1.0
        heard = signal.sigtimedwait(AWAITED, left)
        unwanted = unwanted or (heard is not None and heard.si_signo == signal.SIGTERM)
    took = time.monotonic() - started
    if not alone:
        _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    cpu = usage.ru_utime + usage.ru_stime
    return {"status": code, "seconds": took, "cpu_seconds": cpu, "timed_out": timed_out}


def _kill_descendants() -> None:
    """Kill what the code left; orphans become children of this process, so it ends when there are none."""
    children = f"/proc/self/task/{os.getpid()}/children"
    for _ in range(_KILL_ROUNDS):
        try:
            with open(children) as file:
                pids = [int(word) for word in file.read().split()]
        except OSError:  # a kernel without that file
            pids = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.wait4(-1, 0 if pids else os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _report(fd: int, report: dict[str, Any]) -> None:
    # An answer that cannot be written has no reader: the zygote is gone.
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(report).encode() + b"\n")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_ERROR_CHARACTERS]


def read_reports(text: bytes) -> dict[str, Any]:
    """The report among the lines that a watcher and its child wrote: the first error, else the last line."""
    lines: Iterable[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    found: dict[str, Any] = {"error": "the watcher of the code ended without a report"}
    for line in lines:
        if "error" in line:
            return line
        found = line
    return found
