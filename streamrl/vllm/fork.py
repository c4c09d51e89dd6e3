"""The engine core as a fork of its host, which has imported vLLM already.

vLLM forks where there is a GPU, and spawns on CPU: there each core imports everything anew, which is half of an
engine's start and 180 MiB. It does so for tensor-parallel workers, whose OpenMP threads are bound by variables that
OpenMP reads once; those are spawned still. A host has run no OpenMP region when it forks.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.util import register_after_fork

from streamrl.vllm.plugin import die_with_parent
from streamrl.weights import ENGINE_VARIABLE

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def fork_engine_core(*, spawn_workers: bool) -> None:
    """Let the next engine core of this process be a fork of it; ``spawn_workers``: not so the core's own.

    Call it after vLLM's configuration was made, which sets the method too.
    """
    os.environ[_METHOD] = "fork"
    register_after_fork(fork_engine_core, lambda _: _begin_core(spawn_workers))


def _begin_core(spawn_workers: bool) -> None:
    """In the core. One that is spawned runs our plugin, which ties it to its host; this one ran it as the host."""
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
