"""A role for tests of the supervisor: ``stand_in.py <role> --index i --run-directory DIR``.

What it does is in ``DIR/behaviour/<name>``, one word, with the process's own pid reported in ``DIR/pids/<name>``:

serve    wait for SIGTERM, then ask the others to end by the file ``DIR/end`` (controller); or wait for that file
hang     ignore SIGTERM, but for the file ``DIR/ignored-sigterm``
follow   end with StreamBroken as soon as the process named in ``DIR/follow`` is gone
raise    end with a ValueError when ``DIR/go`` appears
verdict  end with a CannotContinue when ``DIR/go`` appears
refuse   end with a ModelRefused when ``DIR/go`` appears
restart  end with exit code 75 at once
orphan   start two grandchildren that ignore everything and have shared memory, one in its own session, then serve
finish   end with 0 when ``DIR/go`` appears
leave    end with 0 when ``DIR/leave`` appears, and on SIGTERM leave the file ``DIR/was-terminated``"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from streamrl.base.errors import CannotContinue, ModelRefused, StreamBroken
from streamrl.base.run_process import die_with_parent
from streamrl.processes.run_role import Terminated, leave, parse_arguments
from streamrl.recipe.topology import ProcessPlan, Role

GRANDCHILD = """
import os, signal, sys, time
from multiprocessing import shared_memory
from streamrl.base.run_process import name_shared_memory
if sys.argv[2] == "named":
    name_shared_memory()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
memory = shared_memory.SharedMemory(create=True, size=4096)
with open(sys.argv[1] + ".partial", "w") as partial:
    partial.write(memory.name)
os.rename(partial.name, sys.argv[1])
time.sleep(7200)
"""


def main() -> None:
    die_with_parent()
    plan, directory, _, resumes = parse_arguments()
    if resumes:
        with (directory / "resumed").open("a") as file:
            file.write(f"{plan.name}\n")
    leave(plan, directory, lambda: behave(plan, directory))


def behave(plan: ProcessPlan, directory: Path) -> None:
    behaviour = (directory / "behaviour" / plan.name).read_text()
    print(f"{plan.name} does {behaviour}")
    descriptor, temporary = tempfile.mkstemp()  # never removed by itself
    os.close(descriptor)
    (directory / "temporary" / plan.name).write_text(temporary)
    terminated: list[int] = []
    ignored = directory / "ignored-sigterm"
    signal.signal(
        signal.SIGTERM, lambda number, _: ignored.touch() if behaviour == "hang" else terminated.append(number)
    )
    if behaviour == "orphan":
        start_grandchild(directory, own_session=False)
        start_grandchild(directory, own_session=True)
    count = len(list((directory / "pids").glob(f"{plan.name}.*")))
    partial = directory / "pids" / f".{plan.name}"
    partial.write_text(str(os.getpid()))
    partial.rename(directory / "pids" / f"{plan.name}.{count}")
    if behaviour == "restart":
        raise SystemExit(75)
    while True:
        time.sleep(0.005)
        if terminated and plan.role is Role.CONTROLLER:
            (directory / "end").touch()
            return
        if terminated:
            (directory / "was-terminated").touch()
            raise Terminated
        if behaviour == "leave" and (directory / "leave").exists():
            return
        if (directory / "end").exists() and behaviour != "hang":
            return
        if behaviour == "follow" and not lives(int((directory / "follow").read_text())):
            raise StreamBroken("engine-0.orders: the peer is gone")
        if behaviour in ("raise", "verdict", "refuse", "finish") and (directory / "go").exists():
            if behaviour == "verdict":
                raise CannotContinue("too many rewards failed")
            if behaviour == "refuse":
                raise ModelRefused("the model's attention has heads of 16")
            if behaviour == "raise":
                raise ValueError("the loss is not finite")
            (directory / "end").touch()
            return


def start_grandchild(directory: Path, *, own_session: bool) -> None:
    path = directory / "pids" / f"grandchild-{int(own_session)}"
    names = "named" if own_session else "as Python names it"
    child = subprocess.Popen([sys.executable, "-c", GRANDCHILD, f"{path}.memory", names], start_new_session=own_session)
    while not Path(f"{path}.memory").exists():
        time.sleep(0.005)
    path.write_text(str(child.pid))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main()
