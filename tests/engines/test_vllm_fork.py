"""An engine core that is a fork of its host: it hears its own signals only, dies with it, and spawns its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

HOST = """
import ctypes, multiprocessing, os, signal
import anyio
from streamrl.engines.vllm.processes import fork_engine_core

def core(pipe):
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
    pipe.send((os.environ["VLLM_WORKER_MULTIPROC_METHOD"], death.value))
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    os.kill(os.getpid(), signal.SIGTERM)
    pipe.send(heard)

async def host():
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
        fork_engine_core(spawn_workers=True)
        here, there = multiprocessing.Pipe()
        method = os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        process = multiprocessing.get_context(method).Process(target=core, args=(there,))
        process.start()
        await anyio.to_thread.run_sync(process.join)
        print(method, *here.recv(), *here.recv(), process.exitcode)
        os.kill(os.getpid(), signal.SIGUSR1)  # whatever the core sent came before it
        async for number in signals:
            print("host", int(number))
            if number == signal.SIGUSR1:
                break

anyio.run(host, backend_options={"use_uvloop": True})
"""


def test_a_forked_core_is_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOST],
        env=os.environ | {"STREAMRL_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    expected = f"fork spawn {int(signal.SIGKILL)} {int(signal.SIGTERM)} 0\nhost {int(signal.SIGUSR1)}\n"
    assert done.stdout == expected, done.stderr
