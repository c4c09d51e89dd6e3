"""Stacks of running processes: each writes those of all its threads to its own log when it is asked by a signal."""

from __future__ import annotations

import faulthandler
import os
import signal

import psutil

from streamrl.base.run_process import RUN_MARKER
from streamrl.supervise.signal_masks import in_mask

STACKS_SIGNAL = signal.SIGUSR2


def write_stacks_when_asked() -> None:
    """Called once by each process of a run. It works whatever the process does, also in native code."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)


def ask_for_stacks(parent: int) -> list[int]:
    """Have all children of process ``parent`` that can do so write their stacks. Returns their pids.

    Children of a user's program that are no processes of a run are left alone. A process that has not called
    ``write_stacks_when_asked`` would die of the signal: the kernel is asked who catches it. What a process writes is
    in its log some milliseconds later.
    """
    asked = []
    try:
        children = psutil.Process(parent).children()
    except psutil.Error:
        return []
    for child in children:
        if child.pid != os.getpid() and _is_of_a_run(child) and _catches(child.pid, STACKS_SIGNAL):
            try:
                child.send_signal(STACKS_SIGNAL)
                asked.append(child.pid)
            except psutil.Error:
                continue  # it ended meanwhile
    return asked


def _is_of_a_run(process: psutil.Process) -> bool:
    try:
        return RUN_MARKER in process.environ()
    except psutil.Error:
        return False


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether ``pid`` has a handler of its own for the signal (Linux; elsewhere nobody is asked)."""
    try:
        return in_mask(pid, number, "SigCgt")
    except OSError:
        return False
