"""For every test: no process of its own and no thread that blocks the exit may outlive it."""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from functools import cache
from pathlib import Path

import psutil
import pytest
from forks.server import ENGINES, RUNS, WORKERS
from forks.starts import install, own_child_pids, own_children, starts
from hypothesis import settings
from tiers import refuse_shared_fixtures, tier_time
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# The suite repeats itself: a change is judged by what it changed. HYPOTHESIS_PROFILE=exploring draws anew each time.
# No deadline: an example may take long on a machine that others use.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("exploring", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_PATIENCE_S = 60.0
# Helpers of a process that later tests use too; torch, numba and multiprocessing end them with the interpreter.
_SHARED = ("resource_tracker", "forkserver")


class FewEnginesAtATime(LoadFileScheduling):
    """A worker has whole files. Those that start vLLM are in half as many chains as there are workers: engines beside
    each other are slow to start and to stop. ``--dist loadgroup`` cannot say it: with pytest 9.2, pytest-xdist 3.8
    loses the groups."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if not starts_vllm(self.config.rootpath / file):
            return file
        chains = max(1, (self.config.getoption("numprocesses") or 1) // 2)
        return f"engines {engine_files().index(self.config.rootpath / file) % chains}"


@cache
def starts_vllm(file: Path) -> bool:
    return "mark.vllm" in file.read_text()


@cache
def engine_files() -> list[Path]:
    return sorted(filter(starts_vllm, Path(__file__).parent.rglob("test_*.py")))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FewEnginesAtATime:
    config.option.loadscopereorder = False  # else the files of most tests come first
    return FewEnginesAtATime(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refuse_shared_fixtures([item for item in items if starts_vllm(item.path)])
    if hasattr(config, "workerinput"):
        # What starts vLLM takes longest, and what comes last leaves the other workers idle.
        items.sort(key=lambda item: not starts_vllm(item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    # Processes that are started for real also import: such tests have no limit.
    with tier_time(item) if starts.kind else nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Have processes be forks (``forks``), the workers of pytest among them: tests are imported once for all."""
    install()
    if session.config.getoption("numprocesses", None):
        starts.tests = session.config.args
        starts.kind = WORKERS


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose how the processes of a test are started: of a server that has vLLM where an engine is real."""
    starts.kind = ENGINES if starts_vllm(item.path) else RUNS
    if item.get_closest_marker("started"):
        starts.kind = ""


def pytest_sessionfinish() -> None:
    starts.close()


@pytest.fixture(autouse=True)
def own_import_path() -> Iterator[None]:
    """User code puts its folder on ``sys.path``; a later test's engine must not import from there."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A test that has an engine in its own process leaves vLLM's variables: the directory of its sockets among them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail the test that leaves a child process or a non-daemon thread behind."""
    processes = set(_children())
    threads = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while (left := _left(processes, threads)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in set(_children()) - processes:
        process.kill()
    assert not left, f"the test left running: {', '.join(left)}"


@pytest.fixture
def abandoned_memory() -> Callable[[], set[str]]:
    """Names of shared memory that was made since the test began and that no process maps: nobody will remove it. What a
    test beside this one uses is mapped."""
    memory = Path("/dev/shm")
    before = set(os.listdir(memory))

    def abandoned() -> set[str]:
        # A simulated world of the fault campaign, which another worker of pytest runs, keeps its files here.
        left = {name for name in set(os.listdir(memory)) - before if not name.startswith("fault-world-")}
        for process in psutil.process_iter() if left else ():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
                left = {name for name in left if f"{memory / name}\n" not in maps}
        return left

    return abandoned


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    """Short: a Unix socket's path has at most 107 characters, and those of a vLLM engine add 37 to its directory's."""
    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], int]:
    """The first of so many free ports in a row on loopback.

    Below those that the kernel hands out to connecting sockets: one of those may be taken before a test binds it."""

    def find(count: int) -> int:
        for first in random.sample(range(20_000, 30_000, count), 100):
            with ExitStack() as sockets:
                try:
                    for port in range(first, first + count):
                        sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
                except OSError:
                    continue
                return first
        raise AssertionError(f"no {count} free ports in a row")

    return find


def _left(processes: set[psutil.Process], threads: set[threading.Thread]) -> list[str]:
    left = [f"process {process.pid} {_command(process)}" for process in _children() if process not in processes]
    fresh = (thread for thread in threading.enumerate() if thread not in threads)
    return left + [f"thread {thread.name}" for thread in fresh if thread.is_alive() and not thread.daemon]


def _children() -> list[psutil.Process]:
    if not own_child_pids():
        return []  # as after most tests: psutil would look at every process of the machine
    children = own_children(recursive=True)
    return [process for process in children if _lives(process) and not any(w in _command(process) for w in _SHARED)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return ""
