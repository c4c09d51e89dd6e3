"""Processes of a run: which they are, and how much memory they hold together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

MARK = "STREAMRL_BENCHMARK"
"""Environment variable that every descendant of a benchmarked command inherits."""


def process_tree(root_pid: int) -> list[psutil.Process]:
    """``root_pid`` and its living descendants; empty when it is gone."""
    try:
        root = psutil.Process(root_pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def marked_processes(mark: str) -> list[psutil.Process]:
    """Every living process whose environment carries ``MARK=mark``, whichever parent it has by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def describe(process: psutil.Process) -> str:
    """Pid and command line, for messages."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120] or process.name()}"
    except psutil.Error:
        return f"{process.pid} (gone)"


def pss_bytes(processes: list[psutil.Process]) -> int:
    """Proportional set size of ``processes`` together: shared pages are counted once, split among their users."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # ended between listing and reading
            continue
    return total


class MemorySamples:
    """PSS of a process tree over time: ``samples`` holds (seconds since the first sample was due, bytes)."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []

    @property
    def peak_bytes(self) -> int:
        """Largest sample; 0 before the first one."""
        return max((size for _, size in self.samples), default=0)


@contextmanager
def sampled_memory(root_pid: int, *, interval_s: float = 1.0) -> Iterator[MemorySamples]:
    """Sample the tree of ``root_pid`` from a thread until left."""
    memory = MemorySamples()
    stopped = threading.Event()

    def sample() -> None:
        began = time.monotonic()
        while not stopped.wait(interval_s):
            if size := pss_bytes(process_tree(root_pid)):
                memory.samples.append((time.monotonic() - began, size))

    thread = threading.Thread(target=sample, name="memory-sampler", daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        stopped.set()
        thread.join()
