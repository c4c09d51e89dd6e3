"""vLLM's own processes below an engine process: the fork of the core, the cause of a death, and the end of all of them.

``engines.vllm.engine`` calls this in the engine process. vLLM forks its core on a machine with a GPU, and spawns it on
a CPU. A spawned core imports all modules again, which is half of an engine's start and 180 MiB, so we have vLLM fork it
there, too. Tensor-parallel workers are still spawned: their OpenMP threads are bound by variables that OpenMP reads
only once. The engine process itself has run no OpenMP region when it forks.

vLLM raises the same ``EngineDeadError`` for the death of a worker and of EngineCore. The pids at the start tell which
process died."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.util import register_after_fork
from os import environ, getpid
from pathlib import Path
from signal import SIGINT, SIGTERM

import psutil
from psutil import Error as PsutilError
from psutil import NoSuchProcess, Process

from streamrl.base.run_process import signal_name
from streamrl.engines.async_llm.worker import die_with_parent
from streamrl.weights import ENGINE_VARIABLE

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
END_SECONDS = 5.0
SHARED_BY_WORKERS = "vllm_dist_"
"""Part of the file name of the memory that the workers of one CPU engine share. vLLM never unlinks it."""


def fork_engine_core(*, spawn_workers: bool) -> None:
    """Let the next engine core of this process be a fork of it. ``spawn_workers``: whether the core spawns its workers.
    Call it after vLLM's configuration is made, which sets the start method, too."""
    environ[_METHOD] = "fork"
    register_after_fork(fork_engine_core, lambda _: _begin_core(spawn_workers))


def core_is_forked() -> bool:
    """Return whether vLLM has forked the core of this process, as requested. vLLM spawns it in WSL, in an actor of Ray,
    and when the process has initialised CUDA; a spawned core lacks the patches of this process."""
    return environ.get(_METHOD) == "fork"


def _begin_core(spawn_workers: bool) -> None:
    """Set up a forked core process. A spawned core runs our plugin, which ties its life to its parent; a forked core
    does not, since its parent has run the plugin."""
    if environ.get(ENGINE_VARIABLE) != "1":
        return
    # The parent's event loop is woken by signals through a socket that the core shares: a SIGTERM to the core, with
    # which vLLM ends it, would end the parent.
    signal.set_wakeup_fd(-1)
    for number in (SIGTERM, SIGINT):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()
    if spawn_workers:
        environ[_METHOD] = "spawn"


class ProcessWatch:
    """The processes below this one at the time of construction, parents first. ``other_children``: pids of children
    that are not the engine's, such as those of rewards in the process of ``streamrl eval``; they and their children are
    ignored."""

    def __init__(self, other_children: Collection[int]) -> None:
        processes: list[Process] = []
        for child in Process(getpid()).children():
            if child.pid not in other_children:
                processes += _with_descendants(child)
        processes = [process for process in processes if "resource_tracker" not in _command_line(process)]
        self._processes = [(_title(process), process, _death_descriptor(process)) for process in processes]
        self._shared = {path for process in processes for path in _shared_memory(process)}

    def first_death(self) -> str | None:
        """Return a sentence about the first dead process, or None. A parent comes before its children, which die after
        it."""
        for title, process, descriptor in self._processes:
            if not _alive(process, descriptor):
                return f"its process {title} (pid {process.pid}) died{_cause_of_death(process)}"
        return None

    def end_all(self) -> None:
        """Kill the processes that are alive, wait for their end, and unlink the memory that they shared. Blocks for
        ``END_SECONDS`` at most."""
        processes = self._processes
        self._processes = [(title, process, None) for title, process, _ in processes]
        alive = [process for _, process, descriptor in processes if _alive(process, descriptor)]
        for process in alive:
            with suppress(NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=END_SECONDS)
        for _, _, descriptor in processes:
            if descriptor is not None:
                os.close(descriptor)
        for path in self._shared:
            path.unlink(missing_ok=True)


def _death_descriptor(process: Process) -> int | None:
    """Return a descriptor that the kernel makes readable when ``process`` is dead; None where psutil must be asked."""
    with suppress(AttributeError, OSError):  # no such system call, no such process any more, or too many descriptors
        descriptor = os.pidfd_open(process.pid)
        if process.is_running():
            return descriptor
        os.close(descriptor)  # the descriptor is of a newer process with the same pid
    return None


def _alive(process: Process, descriptor: int | None) -> bool:
    if descriptor is not None:
        deaths = select.poll()
        deaths.register(descriptor, select.POLLIN)
        return not deaths.poll(0)
    with suppress(NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _shared_memory(process: Process) -> set[Path]:
    try:
        maps = process.memory_maps()
    except PsutilError:
        return set()
    paths = {Path(mapping.path) for mapping in maps}
    # The path of an unlinked file ends with " (deleted)": it does not exist.
    return {path for path in paths if SHARED_BY_WORKERS in path.name and path.exists()}


def _with_descendants(process: Process) -> list[Process]:
    with suppress(NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _command_line(process: Process) -> str:
    with suppress(PsutilError):
        return " ".join(process.cmdline())
    return ""


def _title(process: Process) -> str:
    """Return vLLM's name of a process (``VLLM::EngineCore``, ``VLLM::Worker``), or the name of its program."""
    line = _command_line(process)
    return line.split()[0] if line.startswith("VLLM::") else process.name()


def _cause_of_death(process: Process) -> str:
    """Return the signal or exit code of a zombie, as the end of a sentence; empty once the parent has reaped it."""
    with suppress(OSError, ValueError), open(f"/proc/{process.pid}/stat") as file:
        state, *_, status = file.read().rpartition(")")[2].split()
        if state == "Z":  # otherwise a newer process has the same pid
            exit_code = os.waitstatus_to_exitcode(int(status))
            return f" of signal {signal_name(-exit_code)}" if exit_code < 0 else f" with exit code {exit_code}"
    return ""
