"""The side that asks: ``subprocess.Popen`` with a fork server behind it."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from execnet.gateway_io import popen_bootstrapline

from forks import server
from streamrl.base.run_process import PR_SET_CHILD_SUBREAPER, set_process_option

TESTS = Path(__file__).parents[1]
SPAWN = "STREAMRL_TESTS_SPAWN"
_PR_GET_CHILD_SUBREAPER = 37
_ROOM_FOR_ARGUMENTS = 1 << 16
_plain_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_SIGNATURE = inspect.signature(_plain_start)
_REQUIRED_DEFAULTS = {  # arguments of that function with which a fork does what a start would do
    "executable": None,
    "preexec_fn": None,
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}

_READ_AT_IMPORT = ("PYTHON", "LC_", "LANG", "HF_", "TRANSFORMERS_", "TORCH", "OPENBLAS_", "MKL_", "NUMBA_", "OMP_")
_READ_AT_IMPORT += ("GOMP_", "KMP_", "LD_", "HOME", "XDG_", "CUDA_", "RAY_")
"""Beginnings of the names of variables that an interpreter or a library reads when it starts or is imported: where
they differ from those of the fork server, a process is started for real."""
_APPLIED_IN_FORKS = {
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "TORCHDYNAMO_DISABLE",
}
_APPLIED_IN_FORKS |= {"TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CACHE_DIR"}  # which an import of vLLM sets
_OF_SERVERS = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
_DRIVER = Path("/dev/nvidiactl")


class Program(NamedTuple):
    """What a command of Python runs: a module, a script or code (``form``), with the arguments behind its name."""

    form: str
    target: str
    arguments: list[str]
    safe_path: bool


def program_of(command: Sequence[str]) -> Program | None:
    """The program of a command that a fork can run: a module of streamrl, ``streamrl`` itself, a script of the tests
    or a worker of pytest. None for any other."""
    if Path(command[0]) == Path(sys.executable).with_name("streamrl"):
        return Program("module", "streamrl", list(command[1:]), True)
    if command[0] != sys.executable:
        return None
    rest = list(command[1:])
    if rest[:1] == ["-u"] and rest[-2:] == ["-c", popen_bootstrapline]:
        return Program("code", rest[-1], [], False)
    safe_path = rest[:1] == ["-P"]
    if safe_path:
        del rest[0]
    if rest[:1] == ["-m"] and len(rest) > 1 and rest[1].partition(".")[0] == "streamrl":
        return Program("module", rest[1], rest[2:], safe_path)
    if rest and TESTS in Path(rest[0]).parents and rest[0].endswith(".py"):
        return Program("script", rest[0], rest[1:], safe_path)
    return None


class ForkServer:
    """A fork server below this process, which has imported when this returns. ``control``: socket to it;
    ``variables``: those with which it imported."""

    def __init__(self, control: socket.socket, variables: Mapping[str, str]) -> None:
        self._control = control
        self._variables = {name: value for name, value in variables.items() if name.startswith(_READ_AT_IMPORT)}
        self._lock = threading.Lock()
        self.pid = self._answer()

    def can_fork(self, order: Mapping[str, Any]) -> bool:
        """Return whether a process of ``order`` would have imported what the server has."""
        variables = order["environment"]
        if len(json.dumps(order)) > server.LARGEST_ORDER // 2:
            return False
        names = {name for name in variables if name.startswith(_READ_AT_IMPORT)} | set(self._variables)
        return all(variables.get(name) == self._variables.get(name) for name in names - _APPLIED_IN_FORKS)

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Have a child made. Returns its pid. Raises ``OSError`` where the server is gone, or would hang it."""
        with self._lock, adopting():
            socket.send_fds(self._control, [json.dumps(order).encode()], list(descriptors))
            return self._answer()

    def _answer(self) -> int:
        """Receive the pid that the server names. Raises ``OSError`` for a refusal, and where the server is gone."""
        answer = json.loads(self._control.recv(1 << 16) or '{"refusal": "the fork server is gone"}')
        if "refusal" in answer:
            raise OSError(f"{answer['refusal']}. {SPAWN}=1 starts processes without it")
        return int(answer["pid"])

    def close(self) -> None:
        """Have the server end."""
        self._control.close()


@contextmanager
def adopting() -> Iterator[None]:
    """Have orphans below this process become its children."""
    adopted = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopted))
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    yield
    set_process_option(PR_SET_CHILD_SUBREAPER, adopted.value)


class Starts:
    """How processes are started here: as forks of the server of ``kind``, or for real where that is empty, or ``forks``
    is False.

    A server is started when it is first needed, with the variables that this process had when it began. On a machine
    with CUDA all is started for real: an import that asks the driver spoils it for forks."""

    def __init__(self) -> None:
        self.tests: Sequence[str] = ()
        self._kind = ""
        self._nested: ForkServer | None = None
        self._variables = dict(os.environ)
        self._servers: dict[str, ForkServer] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.forks = sys.platform == "linux" and not _DRIVER.exists() and not os.environ.get(SPAWN)

    @property
    def kind(self) -> str:
        """One of ``server.KINDS``, or empty."""
        return self._kind

    @kind.setter
    def kind(self, kind: str) -> None:
        self._kind = kind if self.forks else ""

    def server(self) -> ForkServer | None:
        """The fork server of ``kind``; None where processes are started for real."""
        if not self._kind or self._nested is not None:
            return self._nested if self._kind else None
        if self._kind not in self._servers:
            self._servers[self._kind] = self._started(self._kind)
        return self._servers[self._kind]

    def _started(self, kind: str) -> ForkServer:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            f"import sys; path = sys.path[1:]; sys.path.insert(0, {str(TESTS)!r}); "
            "from forks.server import main; main(sys.argv[1:], path)"
        )
        self._kind = ""
        with other:
            process = subprocess.Popen(
                [sys.executable, "-c", code, kind, str(other.fileno()), "x" * _ROOM_FOR_ARGUMENTS, *self.tests],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=self._variables | _OF_SERVERS,
            )
        self._kind = kind
        process.args = [f"the fork server of {kind}"]  # without the padding, in messages
        self._processes.append(process)
        return ForkServer(own, self._variables)

    def nest(self, of_this_process: ForkServer) -> None:
        """Use a server that was forked from this process."""
        self._nested = of_this_process
        self._kind = server.RUNS

    @property
    def pids(self) -> set[int]:
        """Pids of the servers of this process."""
        nested = {self._nested.pid} if self._nested is not None else set()
        return nested | {process.pid for process in self._processes}

    def close(self) -> None:
        """End the servers."""
        for running in self._servers.values():
            running.close()
        for process in self._processes:
            process.kill()
            process.wait()


def _start(self: Any, *arguments: Any) -> None:
    """``Popen._execute_child``: by a fork, where that does what a start would do."""
    asked = _SIGNATURE.bind(self, *arguments).arguments
    order = _order_of(asked)
    descriptors = _descriptors_of(asked)
    fork_server = starts.server() if order is not None else None
    if order is None or fork_server is None or not fork_server.can_fork(order):
        _plain_start(self, *arguments)
        return
    try:
        self.pid = fork_server.fork(order | {"numbers": list(descriptors)}, list(descriptors.values()))
        self._child_created = True
    finally:
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[end] for end in ends))


def _order_of(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The order to the fork server; None where a fork cannot do what is asked."""
    if any(asked[name] != usual for name, usual in _REQUIRED_DEFAULTS.items()) or not asked["close_fds"]:
        return None
    words = [asked["args"]] if isinstance(asked["args"], str | bytes | os.PathLike) else asked["args"]
    command = [os.fsdecode(word) for word in words]
    program = program_of(command)
    if program is None or sum(len(os.fsencode(word)) + 1 for word in command) > _ROOM_FOR_ARGUMENTS:
        return None
    directory = os.fsdecode(asked["cwd"] or os.getcwd())
    first_path = {"module": directory, "script": str(Path(program.target).parent), "code": ""}[program.form]
    variables = os.environ if asked["env"] is None else asked["env"]
    return {
        "form": program.form,
        "target": program.target,
        "sys_argv": ["-c" if program.form == "code" else program.target, *program.arguments],
        "argv": command,
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()},
        "directory": directory,
        "first_path": [] if program.safe_path else [first_path],
        "session": bool(asked["start_new_session"]),
        "parent": os.getpid(),
        "unbuffered": program.form == "code",
        "forks": program.form == "code" or program.target in _STARTERS,
    }


_STARTERS = ("streamrl",)
"""Modules whose processes start processes of runs."""


def _descriptors_of(asked: Mapping[str, Any]) -> dict[int, int]:
    """Descriptors of this process by the numbers that the child has them at."""
    ends = {0: asked["p2cread"], 1: asked["c2pwrite"], 2: asked["errwrite"]}
    standard = {number: number if end == -1 else end for number, end in ends.items()}
    return standard | {number: number for number in asked["pass_fds"]}


starts = Starts()
"""The starts of this process."""


def own_child_pids() -> set[int]:
    """Pids of the direct children of this process, zombies too, without fork servers."""
    children: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(
            FileNotFoundError, ProcessLookupError
        ):  # a thread that has ended meanwhile has no children any more
            children.update(map(int, (thread / "children").read_text().split()))
    return children - starts.pids


def own_children(*, recursive: bool = False) -> list[psutil.Process]:
    """Processes below this one that a test has started; fork servers are none."""
    children = psutil.Process().children(recursive=recursive)
    return [child for child in children if child.pid not in starts.pids]


def install() -> None:
    """Have ``subprocess.Popen`` use ``starts``."""
    subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]


def uninstall() -> None:
    """Have ``subprocess.Popen`` start processes again."""
    subprocess.Popen._execute_child = _plain_start  # type: ignore[attr-defined]


def begin_nested_server(threads: server.Threads) -> None:
    """Fork this process, which has no threads yet, into a server for the processes that it will start."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if not os.fork():
        own.close()
        server.serve(other, parent, threads)
    other.close()
    starts.nest(ForkServer(own, os.environ))
    install()
