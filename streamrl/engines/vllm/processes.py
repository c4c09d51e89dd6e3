"""An engine's processes: the core as a fork of its host, which of them died and how, and the end of all of them.

vLLM forks where there is a GPU, and spawns on CPU: there each core imports everything anew, which is half of an
engine's start and 180 MiB. It does so for tensor-parallel workers, whose OpenMP threads are bound by variables that
OpenMP reads once; those are spawned still. A host has run no OpenMP region when it forks.

vLLM says only ``EngineDeadError``, whether a worker or EngineCore died. The pids known at start tell them apart."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.util import register_after_fork
from pathlib import Path

import psutil

from streamrl.base.run_process import signal_name
from streamrl.engines.plain_vllm.worker import die_with_parent
from streamrl.weights import ENGINE_VARIABLE

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
END_SECONDS = 5.0
SHARED_BY_WORKERS = "vllm_dist_"
"""Memory that the workers of one CPU engine share: vLLM makes it when they start and never unlinks it."""


def fork_engine_core(*, spawn_workers: bool) -> None:
    """Let the next engine core of this process be a fork of it; ``spawn_workers``: not so the core's own. Call it after
    vLLM's configuration was made, which sets the method too."""
    os.environ[_METHOD] = "fork"
    register_after_fork(fork_engine_core, lambda _: _begin_core(spawn_workers))


def core_is_forked() -> bool:
    """Return whether vLLM has forked the core of this host, as asked. It spawns in WSL, in an actor of Ray, and where
    the host has initialised CUDA; what the host patched is not in such a core."""
    return os.environ.get(_METHOD) == "fork"


def _begin_core(spawn_workers: bool) -> None:
    """Set up the core process. One that is spawned runs our plugin, which ties it to its host; a forked one ran it as
    the host."""
    if os.environ.get(ENGINE_VARIABLE) != "1":
        return
    # The host's event loop hears of signals through a socket that the core has too: a SIGTERM to the core, which is how
    # vLLM ends it, would end the host.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()
    if spawn_workers:
        os.environ[_METHOD] = "spawn"


class ProcessWatch:
    """The processes below this one at the time of construction, parents first. ``others``: pids of children that belong
    to someone else, such as those of rewards in the process of ``streamrl eval``; they and theirs are left out."""

    def __init__(self, others: Collection[int] = ()) -> None:
        children = [child for child in psutil.Process(os.getpid()).children() if child.pid not in others]
        found = [one for child in children for one in _family(child) if "resource_tracker" not in _line(one)]
        self._processes = [(_title(process), process, _death_descriptor(process)) for process in found]
        self._shared = {path for process in found for path in _shared_memory(process)}

    def first_death(self) -> str | None:
        """A sentence about the first dead one, or None. The parent is named among several: a child follows its
        parent."""
        for title, process, descriptor in self._processes:
            if not _alive(process, descriptor):
                return f"its process {title} (pid {process.pid}) died{_how(process)}"
        return None

    def end_all(self) -> None:
        """Kill those still alive, wait for them, and unlink the memory that they shared. Blocking, ``END_SECONDS`` at
        most."""
        found = self._processes
        self._processes = [(title, process, None) for title, process, _ in self._processes]
        alive = [process for _, process, descriptor in found if _alive(process, descriptor)]
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=END_SECONDS)
        for descriptor in (descriptor for _, _, descriptor in found if descriptor is not None):
            os.close(descriptor)
        for path in self._shared:
            path.unlink(missing_ok=True)


def _death_descriptor(process: psutil.Process) -> int | None:
    """A descriptor that the kernel makes readable when ``process`` is dead; None where psutil has to look."""
    with suppress(AttributeError, OSError):  # a system without the call, a process that is gone, no descriptor left
        descriptor = os.pidfd_open(process.pid)
        if process.is_running():
            return descriptor
        os.close(descriptor)  # of another process, which has the pid by now
    return None


def _alive(process: psutil.Process, descriptor: int | None) -> bool:
    if descriptor is not None:
        deaths = select.poll()
        deaths.register(descriptor, select.POLLIN)
        return not deaths.poll(0)
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _shared_memory(process: psutil.Process) -> set[Path]:
    try:
        maps = process.memory_maps()
    except psutil.Error:
        return set()
    # A mapping whose file was unlinked has " (deleted)" behind its name.
    return {Path(one.path) for one in maps if SHARED_BY_WORKERS in Path(one.path).name and Path(one.path).exists()}


def _family(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _title(process: psutil.Process) -> str:
    """vLLM names its processes (``VLLM::EngineCore``, ``VLLM::Worker``); else the program's name."""
    line = _line(process)
    return line.split()[0] if line.startswith("VLLM::") else process.name()


def _how(process: psutil.Process) -> str:
    """Exit status of a zombie, from its parent's point of view; empty once it is reaped."""
    with suppress(OSError, ValueError), open(f"/proc/{process.pid}/stat") as file:
        state, *_, number = file.read().rpartition(")")[2].split()
        if state == "Z":  # else another process has the pid by now
            code = os.waitstatus_to_exitcode(int(number))
            return f" of signal {signal_name(-code)}" if code < 0 else f" with exit code {code}"
    return ""
