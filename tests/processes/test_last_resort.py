"""A controller whose loop hangs with Python's lock held ends; one that was stopped goes on. Real processes, for each a
watch as a controller has it, with short times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

CONTROLLER = """
import ctypes, signal, sys
from pathlib import Path

import anyio

from streamrl.config.recipe import Model, Prompts, Recipe, Run
from streamrl.processes import controller_watch, last_resort
from streamrl.run_events import StallSeen

last_resort.FIRST_S, last_resort.LAST_S, controller_watch._REARM_S = 0.3, 1, 0.1

async def tell(_: StallSeen) -> None: ...

def holds_the_lock() -> None:
    ctypes.PyDLL(None).sleep(600)

async def main() -> None:
    recipe = Recipe(model=Model(path="m"), prompts=Prompts(train="p"), rewards=(), run=Run(stall_s=0.0))
    watch = controller_watch.ControllerWatch(recipe, Path(sys.argv[1]), tell)
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.run)
            await anyio.sleep(0.2)
            print("ready", flush=True)
            async for number in signals:
                if number == signal.SIGHUP:
                    holds_the_lock()
                watch.end()
                break
    await anyio.sleep(1.5)
    print("ended by itself", flush=True)

anyio.run(main)
"""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_controller_that_was_stopped_for_long_goes_on(controller: subprocess.Popen[str]) -> None:
    for _ in range(3):
        os.kill(controller.pid, signal.SIGSTOP)
        time.sleep(1.6)  # longer than both timers together
        assert psutil.Process(controller.pid).status() == psutil.STATUS_STOPPED
        os.kill(controller.pid, signal.SIGCONT)
        time.sleep(0.2)
        assert controller.poll() is None, controller.communicate()
    time.sleep(1.2)  # what the first timer began meanwhile was taken back
    os.kill(controller.pid, signal.SIGTERM)
    assert (*controller.communicate(timeout=20), controller.returncode) == ("ended by itself\n", "", 0)


def test_a_loop_that_keeps_the_lock_for_ever_ends_with_its_stack(controller: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    os.kill(controller.pid, signal.SIGHUP)
    out, stacks = controller.communicate(timeout=20)
    assert (out, controller.returncode) == ("", -signal.SIGALRM)
    assert time.monotonic() - began > 1.0
    assert "in holds_the_lock" in stacks and "loop_watch.py" in stacks, "all threads are there"
