"""Runs of stand-ins, real processes under a supervisor, for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import anyio
import msgspec
import pytest
from builders.processes import lives, until

from streamrl.base.errors import ProcessDied
from streamrl.processes.supervisor import Supervisor
from streamrl.recipe.topology import ProcessPlan, Role, Topology

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
        self.sockets = root / "streamrl-sockets"
        for folder in ("behaviour", "pids", "temporary"):
            (self.directory / folder).mkdir(parents=True)
        for name in NAMES:
            (self.directory / "behaviour" / name).write_text(behaviour.get(name, "serve"))

    def supervisor(self, **options: float) -> Supervisor:
        topology = Topology(processes=PLANS, endpoints={"controller.steps": f"ipc://{self.sockets}/controller.steps"})
        entry = (str(STAND_IN),)
        return Supervisor(topology, self.directory, self.sockets, entry=entry, **options)  # type: ignore[arg-type]

    def pid(self, name: str, start: int = 0) -> int:
        return int((self.directory / "pids" / f"{name}.{start}").read_text())

    def all_started(self) -> bool:
        return all(self.started(name) for name in NAMES)

    def pids(self) -> list[int]:
        files = [path for path in (self.directory / "pids").iterdir() if path.suffix not in (".memory", ".partial")]
        return [int(path.read_text()) for path in files if not path.name.startswith(".")]

    def started(self, name: str, start: int = 0) -> bool:
        return (self.directory / "pids" / f"{name}.{start}").exists()

    def grandchildren(self) -> list[int]:
        return [int((self.directory / "pids" / f"grandchild-{i}").read_text()) for i in (0, 1)]

    def go(self, name: str = "go") -> None:
        (self.directory / name).touch()

    def assert_nothing_left(self) -> None:
        assert not (left := self.left()), left

    def left(self) -> list[str]:
        """Processes, shared memory and sockets that outlived the run."""
        left = [f"pid {pid}" for pid in self.pids() if lives(pid)]
        for path in (self.directory / "pids").glob("*.memory"):
            left += [str(segment) for segment in [Path("/dev/shm") / path.read_text()] if segment.exists()]
        temporary = [Path(path.read_text()) for path in (self.directory / "temporary").iterdir()]
        return left + [str(path) for path in [self.sockets, *temporary] if path.exists()]


async def drain(supervisor: Supervisor, deadline_s: float = 300) -> None:
    """Drain, then end everything; ``deadline_s`` later kill."""
    supervisor.request_drain()
    with anyio.move_on_after(deadline_s):
        await supervisor.watch()
    await supervisor.kill()


async def death_in(supervisor: Supervisor) -> str:
    """The message with which the watch ends."""
    with pytest.raises(ProcessDied) as died:
        await supervisor.watch()
    return str(died.value)


@contextlib.asynccontextmanager
async def surviving(
    one: Trial, *more: ProcessPlan, alone: int = 0, resumes: int = 0, min_serving: int = 1, **options: float
) -> AsyncIterator[Supervisor]:
    """A supervisor of the stand-ins and of ``more`` whose run survives so many deaths; all have started."""
    times = {Role.TRAINER: resumes, Role.CONTROLLER: resumes}
    plans = [msgspec.structs.replace(plan, restarts=times.get(plan.role, alone)) for plan in (*PLANS, *more)]
    for plan in more:
        path = one.directory / "behaviour" / plan.name
        path.write_text(path.read_text() if path.exists() else "serve")
    topology = Topology(processes=tuple(plans), endpoints={}, min_serving=min_serving)
    entry = (str(STAND_IN),)
    async with Supervisor(topology, one.directory, one.sockets, entry=entry, **options) as supervisor:  # type: ignore[arg-type]
        await until(lambda: all(one.started(plan.name) for plan in plans if not plan.starts_inactive))
        yield supervisor


@contextlib.asynccontextmanager
async def watched(supervisor: Supervisor) -> AsyncIterator[None]:
    """The watch beside the test, which raises where it takes something for a death; then the run is drained."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        yield
        await drain(supervisor)
