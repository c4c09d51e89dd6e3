"""Runs of stand-ins, real processes under a supervisor, for the tests of this folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import psutil
import pytest

from streamrl.base.errors import ProcessDied
from streamrl.plan.topology import ProcessPlan, Role, Topology
from streamrl.supervise.supervisor import Supervisor

STAND_IN = Path(__file__).with_name("stand_in.py")
PLANS = (
    ProcessPlan(role=Role.CONTROLLER, index=0),
    ProcessPlan(role=Role.REWARD, index=0),
    ProcessPlan(role=Role.ENGINE, index=0),
    ProcessPlan(role=Role.TRAINER, index=0),
)
NAMES = tuple(plan.name for plan in PLANS)


class Trial:
    """One run of stand-ins in a directory of its own."""

    def __init__(self, root: Path, behaviour: Mapping[str, str]) -> None:
        self.directory = root / "run"
        self.sockets = root / "sockets"
        for folder in ("behaviour", "pids", "temporary"):
            (self.directory / folder).mkdir(parents=True)
        for name in NAMES:
            (self.directory / "behaviour" / name).write_text(behaviour.get(name, "serve"))

    def supervisor(self, more: tuple[ProcessPlan, ...] = (), **options: float) -> Supervisor:
        topology = Topology(processes=(*PLANS, *more), endpoints={})
        entry = (str(STAND_IN),)
        return Supervisor(topology, self.directory, self.sockets, entry=entry, **options)  # type: ignore[arg-type]

    def pid(self, name: str, start: int = 0) -> int:
        return int((self.directory / "pids" / f"{name}.{start}").read_text())

    def all_started(self) -> bool:
        return all((self.directory / "pids" / f"{name}.0").exists() for name in NAMES)

    def pids(self) -> list[int]:
        files = [path for path in (self.directory / "pids").iterdir() if path.suffix not in (".memory", ".partial")]
        return [int(path.read_text()) for path in files if not path.name.startswith(".")]

    def guardians(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_guardian(process)]

    def _is_guardian(self, process: psutil.Process) -> bool:
        try:
            line = process.cmdline()
        except psutil.Error:
            return False
        return "streamrl.supervise.guardian" in line and any(str(self.sockets) in word for word in line)

    def assert_nothing_left(self) -> None:
        assert self.left() == []

    def left(self) -> list[str]:
        """Processes, shared memory and sockets that outlived the run."""
        left = [f"pid {pid}" for pid in self.pids() if lives(pid)]
        left += [f"guardian {process.pid}" for process in self.guardians()]
        for path in (self.directory / "pids").glob("*.memory"):
            left += [str(segment) for segment in [Path("/dev/shm") / path.read_text()] if segment.exists()]
        temporary = [Path(path.read_text()) for path in (self.directory / "temporary").iterdir()]
        return left + [str(path) for path in [self.sockets, *temporary] if path.exists()]


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    with anyio.fail_after(within_s):
        while not condition():
            await anyio.sleep(0.01)


async def death_in(supervisor: Supervisor) -> str:
    """The message with which the watch ends."""
    with pytest.raises(ProcessDied) as died:
        await supervisor.watch()
    return str(died.value)


async def kill_session(one: Trial, supervisor: Supervisor) -> None:
    """Kill all of ``engine-0`` at once, when what it shares is known."""
    await until(lambda: bool(supervisor.memory.trackers))
    os.killpg(one.pid("engine-0"), signal.SIGKILL)
