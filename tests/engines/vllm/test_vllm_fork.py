"""An engine core that is a fork of its host: it hears its own signals only, dies with it, and spawns its workers; and
the watch over an engine's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


SPAWNED = """
import sys
from streamrl.engines.vllm.processes import core_is_forked, fork_engine_core
from vllm.utils.system_utils import get_mp_context
for more in ([], ["--numa-bind"]):  # with which vLLM spawns in any case
    fork_engine_core(spawn_workers=False)
    sys.argv += more
    print(get_mp_context().get_start_method(), core_is_forked())
"""


@pytest.mark.long
@pytest.mark.vllm
def test_a_core_that_vllm_spawns_is_not_taken_for_a_fork() -> None:
    done = subprocess.run([sys.executable, "-c", SPAWNED], capture_output=True, text=True, timeout=900)
    assert done.stdout == "fork True\nspawn False\n", done.stderr


WATCHED = """
import os, subprocess, sys, psutil
from streamrl.engines.vllm.processes import ProcessWatch

PARENT = '''
import ctypes, os, subprocess, threading, time
subprocess.Popen(["sleep", "1000"])
threading.Thread(target=time.sleep, args=(1000,)).start()
print(flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)  # ends the main thread, and no other
'''
if sys.argv[1] == "psutil":
    del os.pidfd_open
parent = psutil.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
parent.stdout.readline()
(child,) = parent.children()
other = psutil.Popen(["sleep", "1000"])
files = len(os.listdir("/proc/self/fd"))
watch = ProcessWatch({other.pid})
other.kill()

def look():
    died = str(watch.first_death()).replace(f"pid {parent.pid}", "parent").replace(f"pid {child.pid}", "child")
    print(len(os.listdir("/proc/self/fd")) - files, died)

for process in (parent, child):
    while process.status() != "zombie":
        pass
    look()
    child.kill()
parent.kill()
os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
look()
watch.end_all()
parent.wait()
look()
"""


@pytest.mark.parametrize(("by", "held"), [("descriptors", 2), ("psutil", 0)])
def test_the_first_death_is_named_and_how_it_came(by: str, held: int) -> None:
    """The parent's main thread ends, then its child, then the parent, which is then reaped. A process lives for as long
    as one of its threads; without descriptors the end of the main one passes for a death."""
    command = [sys.executable, "-c", WATCHED, by]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    parent = f"its process {Path(sys.executable).name} (parent) died"
    early = ["None", "its process sleep (child) died of signal SIGKILL"] if held else [f"{parent} with exit code 0"] * 2
    expected = [f"{held} {died}" for died in (*early, f"{parent} of signal SIGKILL")]
    assert done.stdout.splitlines() == [*expected, f"0 {parent}"], done.stderr
