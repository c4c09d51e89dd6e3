"""A process that has imported what others need, and is forked for each of them.

``main`` with the arguments KIND DESCRIPTOR PADDING TESTS...: KIND is one of ``KINDS``; DESCRIPTOR a Unix socket,
SOCK_SEQPACKET, on which orders come, one a packet; PADDING makes room for the arguments that its forks show; TESTS are
the arguments of pytest whose modules the server of its workers imports.

A process with threads cannot be forked safely: a fork hangs in its first operation of torch once its parent has run
one, and nothing arrives over an inherited ZeroMQ context. So the server runs no operation, opens no socket of a
library, and refuses with a sentence when it has other threads than after its imports (``unsafe_to_fork``)."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from forks.process_image import show_process, use_large_pages
from streamrl.base.run_process import PR_SET_PDEATHSIG, set_process_option

MODULES_OF_RUNS = (
    "torch",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
    "streamrl.cli.main",
    "streamrl.cli.train",
    "streamrl.launch.roles",
    "streamrl.launch.run_controller",
    "streamrl.learning.custom_objective.random_batches",
    "streamrl.learning.trainer",
    "streamrl.rewards.calls.worker",
    "streamrl.run.environments.worker",
    "streamrl.weights.publish.torch_tensors",
    "streamrl.weights.pull.shared_replica",
    "streamrl.weights.vllm.simulated_engine",
)
MODULES_OF_ENGINES = (
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "streamrl.engines.vllm.engine",
)
RUNS, ENGINES, WORKERS = KINDS = ("runs", "engines", "workers")
"""Kinds of servers: for processes of runs, for those and real engines, and for pytest's own workers."""

LARGEST_ORDER = 1 << 17
MOST_DESCRIPTORS_SENT = 64
ADOPTION_S = 60.0
_FIRST_FREE_DESCRIPTOR = 3
_MOST_DESCRIPTORS = 4096
_FAILED = 70
_plain_path: list[str] = []
_NOT_FLUSHED = 120


class Threads:
    """The threads that this process had after its imports: those of numpy's linear algebra, which survive a fork."""

    def __init__(self) -> None:
        self._allowed = len(_thread_names())

    def unsafe_to_fork(self) -> str:
        """A sentence on what makes a fork of this process hang; empty: nothing does."""
        names = _thread_names()
        if len(names) > self._allowed:
            return (
                f"the fork server has {len(names)} threads, and had {self._allowed} after its imports: it ran an "
                f"operation of torch or a parallel loop, or opened a socket ({', '.join(sorted(names))})"
            )
        numba = sys.modules.get("numba.np.ufunc.parallel")
        if numba is not None and numba._is_initialized:
            return "the fork server ran a parallel loop of numba: its forks would be ended by OpenMP"
        return ""


def _thread_names() -> list[str]:
    tasks = Path("/proc/self/task")
    return [(tasks / thread / "comm").read_text().strip() for thread in os.listdir(tasks)]


def serve(control: socket.socket, parent: int, threads: Threads) -> NoReturn:
    """Fork for ``parent``, which must be the parent of this process, until it closes ``control``."""
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    show_process(["forkserver", "of", str(parent)], {})
    control.send(json.dumps({"pid": os.getpid()}).encode())
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, LARGEST_ORDER, MOST_DESCRIPTORS_SENT)
        if not packet:
            os._exit(0)
        refusal = threads.unsafe_to_fork()
        if refusal:
            control.send(json.dumps({"refusal": refusal}).encode())
        else:
            _fork_twice(json.loads(packet), descriptors, control, threads)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_twice(order: dict[str, Any], descriptors: Sequence[int], control: socket.socket, threads: Threads) -> None:
    """Fork a process whose parent ends at once, so that the process that asked, a child subreaper, adopts it."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    is_known = False
    try:
        deadline = time.monotonic() + ADOPTION_S
        while os.getppid() != order["parent"]:
            if time.monotonic() > deadline:
                os._exit(_FAILED)
            os.sched_yield()
        _take_identity(order)
        control.send(json.dumps({"pid": os.getpid()}).encode())
        is_known = True
        control.close()
        _run_order(order, descriptors, threads)
    except BaseException as error:  # noqa: BLE001 - a fork that failed must end, and not go on as a second server
        if not is_known:
            control.send(json.dumps({"refusal": f"a fork failed: {error!r}"}).encode())
        traceback.print_exc()
        os._exit(_FAILED)


def _take_identity(order: dict[str, Any]) -> None:
    """Have the session, directory, variables and arguments of ``order``: those that a start has when it returns."""
    if order["session"]:
        os.setsid()
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    show_process(order["argv"], order["environment"])


def _run_order(order: dict[str, Any], descriptors: Sequence[int], threads: Threads) -> NoReturn:
    """Run the program of ``order`` from its first line to its exit."""
    _take_descriptors(descriptors, order["numbers"])
    _reset_signals()
    _reset_interpreter(order)
    _reset_libraries()
    from forks import starts

    if order["forks"]:
        # Fork once more while there are no threads: the processes that this one starts are forks too.
        starts.begin_nested_server(threads)
    else:
        starts.uninstall()
    exit_code = _run(order["form"], order["target"])
    threading._shutdown()  # type: ignore[attr-defined] # as the interpreter does at its end
    import atexit

    atexit._run_exitfuncs()
    os._exit(_flushed(exit_code))


def _flushed(exit_code: int) -> int:
    """Flush the streams; the exit code, which is the interpreter's where one cannot be flushed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except OSError:
            return _NOT_FLUSHED
    return exit_code


def _take_descriptors(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give ``descriptors`` their ``numbers`` and close all others."""
    high = [os.dup(descriptor) for descriptor in descriptors]
    # A copy may lie at a number that another one is to have.
    top = max([*numbers, *high]) + 1
    high = [_dup_above(descriptor, top) for descriptor in high]
    os.closerange(_FIRST_FREE_DESCRIPTOR, top)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
    os.closerange(top, _MOST_DESCRIPTORS)


def _dup_above(descriptor: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)


def _reset_signals() -> None:
    """Set the handlers that the interpreter sets when it starts."""
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _reset_interpreter(order: dict[str, Any]) -> None:
    """Set arguments, paths of modules, streams and random numbers as in a new interpreter."""
    sys.orig_argv = list(order["argv"])
    sys.argv = list(order["sys_argv"])
    sys.path[:] = [*order["first_path"], *_plain_path]
    unbuffered = order["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = _text_stream(0, "rb", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text_stream(1, "wb", "strict", unbuffered=unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text_stream(2, "wb", "backslashreplace", lines=True)  # type: ignore[misc]
    if os.environ.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable()
    random.seed()
    import multiprocessing.process
    import tempfile

    tempfile.tempdir = None
    tempfile._name_sequence = None  # type: ignore[attr-defined]
    key = multiprocessing.process.AuthenticationString(os.urandom(32))  # type: ignore[attr-defined]
    multiprocessing.process.current_process()._config["authkey"] = key  # type: ignore[attr-defined]


def _text_stream(number: int, mode: str, errors: str, *, lines: bool = False, unbuffered: bool = False) -> TextIO:
    try:
        binary = open(number, mode, buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    except OSError:
        return None  # type: ignore[return-value] # as the interpreter does where the descriptor is closed
    lines = lines or os.isatty(number)
    return io.TextIOWrapper(binary, "utf-8", errors, line_buffering=lines, write_through=unbuffered)


def _reset_libraries() -> None:
    """Set what libraries read from the environment when they are imported."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    _set_variables_of_torch()
    # An engine's host sets the variables for its core, which is a fork of it, before it would import torch.
    os.register_at_fork(after_in_child=_set_variables_of_torch)
    hub = sys.modules.get("huggingface_hub.constants")
    if hub is not None:
        hub.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "yes", "on")


def _set_variables_of_torch() -> None:
    """Set what torch and OpenMP read when they are loaded. Runs no operation."""
    torch = sys.modules.get("torch")
    if torch is not None and os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    compiler = sys.modules.get("torch._dynamo.config")
    if compiler is not None:
        compiler.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"  # type: ignore[attr-defined]


def _run(form: str, target: str) -> int:
    """Run a module or a script as the interpreter does, and return its exit code."""
    try:
        match form:
            case "module":
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            case "script":
                runpy.run_path(target, run_name="__main__")
            case "code":
                sys.modules["__main__"] = main_module = ModuleType("__main__")
                exec(target, main_module.__dict__)
    except SystemExit as error:
        if isinstance(error.code, int):
            return error.code
        if error.code is not None:
            print(error.code, file=sys.stderr)
        return int(error.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        _flushed(0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def main(arguments: Sequence[str], plain_path: Sequence[str]) -> None:
    """Import the modules of a kind, then serve. ``plain_path``: ``sys.path`` behind the entry of the program."""
    kind, descriptor, _, *tests = arguments
    _plain_path[:] = plain_path
    # vLLM names its processes with this, which looks for the memory of the arguments while they are as they were.
    import setproctitle

    setproctitle.getproctitle()
    logging.disable(logging.WARNING)  # warnings of libraries about the machine
    if kind == WORKERS:
        _import_tests(tests)
    if kind != WORKERS or "torch" in sys.modules:
        _import(MODULES_OF_RUNS)
    if kind == ENGINES or "vllm" in sys.modules:
        _import(MODULES_OF_ENGINES)
    logging.disable(logging.NOTSET)
    gc.collect()
    gc.freeze()  # a collection in a fork copies no page of what was imported
    use_large_pages()
    serve(socket.socket(fileno=int(descriptor)), os.getppid(), Threads())


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)


def _import_tests(tests: Sequence[str]) -> None:
    """Import the modules of tests as pytest does. What cannot be imported, the workers will report."""
    import pytest

    plugins = ("terminal", "cacheprovider", "logging", "faulthandler")
    without = [word for plugin in plugins for word in ("-p", f"no:{plugin}")]
    pytest.main(["--collect-only", "--capture=no", *without, *tests])
