"""The zygote: a small warm interpreter that forks a jail for every run, so that no run starts an interpreter.

    reward process --starts--> outer process (waits) --fork into namespaces--> zygote --forks--> watchers

``sandbox`` starts it (``_BOOT``) and sends requests over a SEQPACKET socket, as JSON with the files of the run
attached. The zygote sends one answer for each run. It never reads the files, so the content of one run's files is not
in the memory of another run. It ends with the socket, and all processes that it started end with it, because it is pid
1 of its process namespace. Imports only the standard library."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import selectors
import signal
import site
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

from streamrl.rewards.sandbox import files, jail, program, seccomp
from streamrl.rewards.sandbox import syscalls as sc

_NOBODY = 65534
_GRACE_S = 2.0  # from the time limit of a run until its watcher is killed, if it has not ended
_MESSAGE_BYTES = 65536
_MOST_FILES = 8
_NAMESPACES = sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS | sc.CLONE_NEWNET
# Modules that programs import most, and modules that need shared libraries, which the jail's file tree lacks.
_WARM_MODULES = [
    "abc", "array", "ast", "base64", "bisect", "bz2", "calendar", "cmath", "collections", "contextlib", "copy", "csv",
    "ctypes", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect",
    "io", "itertools", "json", "lzma", "math", "numbers", "operator", "pprint", "queue", "random", "re", "secrets",
    "sqlite3", "statistics", "string", "struct", "tempfile", "textwrap", "threading", "time", "typing", "unicodedata",
    "uuid", "zlib",
]  # fmt: skip


def main(control_fd: int) -> None:
    """Serve the requests that come over ``control_fd`` until it is closed."""
    sc.die_with_parent()
    control = socket.socket(fileno=control_fd)
    layer_names = json.loads(control.recv(_MESSAGE_BYTES))["layers"]
    _warm_up()
    missing = {}
    attempts = (True, False) if "namespaces" in layer_names else (False,)
    for namespaces in attempts:
        problem_reader, problem_writer = os.pipe()
        try:
            pid = _fork_inner(namespaces)
        except OSError as error:
            missing["namespaces"] = str(error)
            continue
        if pid == 0:
            os.close(problem_reader)
            _run_zygote(control, layer_names, namespaces, missing, problem_writer)
        os.close(problem_writer)
        with open(problem_reader, "rb") as file:
            problem = file.read()
        if not problem:
            control.close()  # only the zygote may have the socket: otherwise it would not notice that the socket ends
            os.waitpid(pid, 0)
            return
        os.waitpid(pid, 0)
        missing["namespaces"] = problem.decode(errors="replace")


def _fork_inner(namespaces: bool) -> int:
    if not namespaces:
        return os.fork()
    # A process of the host's root makes its user namespace later, as nobody, after it has built the file tree.
    return sc.fork_into(_NAMESPACES | (0 if _may_build_as_root() else sc.CLONE_NEWUSER))


def _may_build_as_root() -> bool:
    """Return whether this process is root and may mount, and may become another user."""
    if os.geteuid() != 0:
        return False
    pid = os.fork()
    if pid == 0:
        try:
            sc.unshare(sc.CLONE_NEWNS)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _run_zygote(
    control: socket.socket, layer_names: list[str], namespaces: bool, missing: dict[str, str], problem_writer: int
) -> None:
    """Run the zygote. An error before it can serve is written to ``problem_writer``, which is closed when it
    serves."""
    try:
        sc.die_with_parent()
        library = os.path.dirname(os.__file__)
        base_bytes = _address_space()
        if namespaces:
            _isolate(library)
        missing = dict(missing)
        landlock = "landlock" in layer_names and _works("landlock", missing, lambda: files.restrict([], [], []))
        machine = None
        if "seccomp" in layer_names and _works("seccomp", missing, _try_filter):
            machine = sc.machine_index()
        layers = jail.Layers(
            namespaces=namespaces,
            landlock=landlock,
            seccomp=machine,
            library=library,
            filters=(),
            base_bytes=base_bytes,
        )
        serving = _Serving(control, jail.with_filters(layers))
        if namespaces:
            serving.try_once()
    except BaseException as error:  # noqa: BLE001 - reported to the outer process, which tries without namespaces
        os.write(problem_writer, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(problem_writer)
    serving.say_hello(missing)
    serving.run()
    os._exit(0)


def _warm_up() -> None:
    os.environ.clear()
    for name in _WARM_MODULES:
        with suppress(ImportError):  # the interpreter was built without the module
            importlib.import_module(name)
    site.setquit()  # exit() and quit(), which programs use
    # Where memory is short, the kernel is to kill the sandbox before the trainer.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # otherwise a collection in a child would copy the pages of all objects


def _isolate(library: str) -> None:
    """Build the file tree of the zygote, and change its user. It keeps the right to make namespaces, in a user
    namespace of the user nobody."""
    if os.geteuid() == 0:
        files.build(library)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        sc.set_dumpable(True)  # the change of the user has reset it; without it the maps cannot be written
        sc.die_with_parent()
        sc.unshare(sc.CLONE_NEWUSER)
        files.map_user(0, _NOBODY, _NOBODY)
    else:
        # geteuid() returns the overflow id until the maps are written, so the outer ids were read before.
        files.map_user(0, *_OUTER_IDS)
        files.build(library)
    sc.set_dumpable(False)


_OUTER_IDS = (os.geteuid(), os.getegid())


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _works(layer: str, missing: dict[str, str], apply: Any) -> bool:
    """Return whether ``apply()`` works, tried in a separate process. Its error is added to ``missing``."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            sc.set_no_new_privileges()
            apply()
        except OSError as error:
            os.write(writable, str(error).encode())
        os._exit(0)
    os.close(writable)
    with open(readable, "rb") as file:
        problem = file.read().decode(errors="replace")
    os.waitpid(pid, 0)
    if problem:
        missing[layer] = problem
    return not problem


def _try_filter() -> None:
    machine = sc.machine_index()
    if machine is None:
        raise OSError(38, f"no table of system calls for {os.uname().machine}")
    sc.set_seccomp_filter(seccomp.assemble(machine, paths=True, modes=True, processes=True, only_pid=None))
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError:
        return
    raise OSError(1, "the filter was accepted, and filters nothing")


class _Run(NamedTuple):
    """A run that has not ended. ``watcher``: pid of the process that waits for the code; ``ends_at``: time at which the
    watcher is killed (monotonic clock); ``reported``: bytes of the watcher's report so far."""

    run_id: int
    watcher: int
    ends_at: float
    reported: bytearray


class _Serving:
    """Starts runs and sends their answers, until the control socket ends."""

    def __init__(self, control: socket.socket, layers: jail.Layers) -> None:
        self._control = control
        self._layers = layers
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        self._runs: dict[int, _Run] = {}

    def say_hello(self, missing: dict[str, str]) -> None:
        """Send the names of the active layers, and the reasons why others are missing."""
        layers = self._layers
        works = {"namespaces": layers.namespaces, "landlock": layers.landlock, "seccomp": layers.seccomp is not None}
        active = [name for name, layer_works in works.items() if layer_works]
        self._send({"type": "LayersFound", "active": active, "missing": missing})

    def try_once(self) -> None:
        """Build one jail. Raises ``OSError`` where the kernel does not allow it."""
        limits = jail.Limits(5.0, 1 << 28, 1 << 16, 1 << 16, 16, 1, 4, 16, 1 << 23)
        fd, pid = self._watch(jail.Job(lambda: lambda: 0, (0, 0, 0), ()), limits)
        with open(fd, "rb") as file:
            report = jail.read_reports(file.read())
        os.waitpid(pid, 0)
        if report.get("report", {}).get("status") != 0:
            raise OSError(1, f"a jail cannot be built: {report}")

    def run(self) -> None:
        """Serve until the control socket ends."""
        while True:
            for key, _ in self._selector.select(self._select_timeout()):
                if key.data is None:
                    message, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, _MOST_FILES)
                    if not message:
                        return
                    self._handle(json.loads(message), fds)
                else:
                    self._read_report(key.data, key.fd)
            now = time.monotonic()
            for run in self._runs.values():
                if run.ends_at <= now:
                    os.kill(run.watcher, signal.SIGKILL)  # the pid is reserved until ``_read_report`` waits for it

    def _select_timeout(self) -> float | None:
        if not self._runs:
            return None
        next_end = min(run.ends_at for run in self._runs.values())
        return max(0.01, next_end - time.monotonic())

    def _handle(self, order: dict[str, Any], fds: list[int]) -> None:
        if "cancel" in order:
            if order["cancel"] in self._runs:
                # The watcher kills the code and reports.
                os.kill(self._runs[order["cancel"]].watcher, signal.SIGTERM)
            return
        limits = jail.Limits(*order["limits"])
        if order["kind"] == "program":
            source, stdin, stdout, stderr = fds
            job = jail.Job(lambda: program.as_program(source), (stdin, stdout, stderr), (source,))
        else:
            source, module_order, answer, stderr = fds
            open_fds = (source, module_order, answer)
            job = jail.Job(lambda: program.as_module(source, module_order, answer), (0, 0, stderr), open_fds)
        try:
            report_fd, pid = self._watch(job, limits)
        except OSError as error:
            self._send_end(order["run"], {"error": f"no process could be started: {error}"})
        else:
            run = _Run(order["run"], pid, time.monotonic() + limits.seconds + _GRACE_S, bytearray())
            self._runs[run.run_id] = run
            self._selector.register(report_fd, selectors.EVENT_READ, run)
        for fd in fds:
            os.close(fd)

    def _watch(self, job: jail.Job, limits: jail.Limits) -> tuple[int, int]:
        """Start a watcher. Returns the pipe on which it reports, and its pid. Signals are blocked before the fork, so
        the watcher loses none."""
        readable, writable = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, jail.AWAITED)
        try:
            pid = self._fork()
            if pid == 0:
                jail.watch(self._layers, limits, job, writable)
        except OSError:
            os.close(readable)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, jail.AWAITED)
            os.close(writable)
        return readable, pid

    def _fork(self) -> int:
        if not self._layers.namespaces:
            return os.fork()
        flags = sc.CLONE_NEWUSER | sc.CLONE_NEWNS | sc.CLONE_NEWPID
        # With a filter runs may share the zygote's empty network, IPC and host name: the filter forbids the calls that
        # would use them.
        if self._layers.seccomp is None:
            flags |= sc.CLONE_NEWNET | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS
        return sc.fork_into(flags)

    def _read_report(self, run: _Run, fd: int) -> None:
        content = os.read(fd, _MESSAGE_BYTES)
        run.reported.extend(content)
        if content:
            return
        self._selector.unregister(fd)
        os.close(fd)
        os.waitpid(run.watcher, 0)  # no process that the watcher started is left when this returns
        del self._runs[run.run_id]
        self._send_end(run.run_id, jail.read_reports(bytes(run.reported)))

    def _send_end(self, run_id: int, report: dict[str, Any]) -> None:
        self._send({"type": "RunEnded", "run": run_id} | report)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            sys.exit(0)  # the process of the reward is gone
