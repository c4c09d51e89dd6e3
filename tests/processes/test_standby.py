"""Processes that stand by for the dead, as real processes under a supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from trials import PLANS, STAND_IN, Trial, lives, until

from streamrl.config.load import load_recipe
from streamrl.config.topology import ProcessPlan, Role, Topology, plan_topology
from streamrl.processes import standbys
from streamrl.processes import supervisor as supervisor_module
from streamrl.processes.supervisor import Supervisor

pytestmark = pytest.mark.asyncio
DEMO = Path(__file__).parents[2] / "examples" / "sort" / "recipe.toml"


@asynccontextmanager
async def run_with_standbys(
    one: Trial,
    monkeypatch: pytest.MonkeyPatch,
    *roles: Role,
    after_s: float = 0.01,
    more: tuple[ProcessPlan, ...] = (),
) -> AsyncIterator[Supervisor]:
    monkeypatch.setattr(standbys, "QUIET_S", 0.01)
    monkeypatch.setattr(standbys, "IMPORTING_S", {})
    plans = [msgspec.structs.replace(plan, restarts=20) for plan in (*PLANS, *more)]
    topology = Topology(processes=tuple(plans), endpoints={}, standby=roles, standby_after_s=after_s)
    async with (
        Supervisor(topology, one.directory, one.sockets, entry=(str(STAND_IN),)) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        await until(one.all_started)
        tasks.start_soon(supervisor.watch)
        yield supervisor
        await supervisor.stop(deadline_s=20)
    one.assert_nothing_left()


async def waiting(one: Trial, role: Role, than: int = 0) -> int:
    """The pid of the one that stands by for ``role``: another one ``than`` that."""
    path = one.directory / "pids" / f"standby-{role.value}"
    await until(lambda: path.exists() and int(path.read_text()) != than)
    return int(path.read_text())


async def replaced(one: Trial, name: str) -> int:
    """``name`` is killed. The pid of its next start."""
    os.kill(one.pid(name), signal.SIGKILL)
    await until(lambda: (one.directory / "pids" / f"{name}.1").exists())
    return one.pid(name, 1)


async def test_who_stands_by_takes_the_place_and_the_log_and_another_one_stands_by(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with run_with_standbys(one, monkeypatch, Role.ENGINE):
        standby = await waiting(one, Role.ENGINE)
        assert await replaced(one, "engine-0") == standby
        logs = one.directory / "logs"
        await until(lambda: (logs / "engine-0.log").read_text().count("engine-0 does serve") == 2)
        assert "serve" not in (logs / "standby-engine.log").read_text()
        assert await waiting(one, Role.ENGINE, than=standby) != standby
        assert not (one.directory / "resumed").exists(), "an engine begins anew"


async def test_a_rank_that_stood_by_goes_on_where_its_predecessor_was(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with run_with_standbys(one, monkeypatch, Role.TRAINER):
        standby = await waiting(one, Role.TRAINER)
        assert await replaced(one, "trainer-0") == standby
        await until(lambda: (one.directory / "pids" / "controller.1").exists())
        assert set((one.directory / "resumed").read_text().split()) == {"trainer-0", "controller"}


async def test_all_ranks_are_replaced_by_who_stands_by_at_once(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    (one.directory / "behaviour" / "trainer-1").write_text("serve")
    rank_1 = ProcessPlan(role=Role.TRAINER, index=1)
    async with run_with_standbys(one, monkeypatch, Role.TRAINER, Role.TRAINER, more=(rank_1,)) as supervisor:
        await until(lambda: len(supervisor._standbys.children) == 2)
        standing = {child.process.pid for child in supervisor._standbys.children}
        os.kill(one.pid("trainer-1"), signal.SIGKILL)
        await until(lambda: all((one.directory / "pids" / f"trainer-{rank}.1").exists() for rank in (0, 1)))
        assert {one.pid("trainer-0", 1), one.pid("trainer-1", 1)} == standing


async def test_one_that_dies_waiting_is_replaced_three_times_and_ends_no_run(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, last = trial(), 0
    async with run_with_standbys(one, monkeypatch, Role.ENGINE) as supervisor:
        for _ in range(3):
            last = await waiting(one, Role.ENGINE, than=last)
            os.kill(last, signal.SIGKILL)
        await until(lambda: not supervisor._standbys.children)
        await anyio.sleep(0.3)
        assert await waiting(one, Role.ENGINE) == last, "a fourth one"
        assert await replaced(one, "engine-0") != last, "as without those that stand by"
        assert lives(one.pid("controller"))


async def test_a_killed_one_that_was_not_missed_yet_takes_nobody_s_place(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with run_with_standbys(one, monkeypatch, Role.ENGINE) as supervisor:
        standby = await waiting(one, Role.ENGINE)
        os.kill(standby, signal.SIGKILL)
        assert await replaced(one, "engine-0") != standby
        assert supervisor._forgiveness.each["engine-0"].left == 19, "the dead one took its place, and died of it"


async def test_one_that_cannot_be_started_ends_no_run(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    one = trial()
    monkeypatch.setattr(supervisor_module, "open_standby", refuse)
    async with run_with_standbys(one, monkeypatch, Role.ENGINE):
        await until(lambda: caplog.text.count("no process can stand by for the role engine") == 3)
        await anyio.sleep(0.3)
        assert lives(one.pid("controller"))
    assert caplog.text.count("no process can stand by for the role engine") == 3


async def test_what_it_cannot_import_is_met_again_by_the_role_whose_place_it_takes(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told whose place it takes while it still imports, and then the import fails."""
    one = trial()
    (one.directory / "fail-to-prepare").touch()
    async with run_with_standbys(one, monkeypatch, Role.ENGINE) as supervisor:
        standby = await waiting(one, Role.ENGINE)
        os.kill(one.pid("engine-0"), signal.SIGKILL)
        await until(lambda: standby not in [child.process.pid for child in supervisor._standbys.children])
        (one.directory / "fail-to-prepare").unlink()
        await until(lambda: (one.directory / "pids" / "engine-0.1").exists())
        assert one.pid("engine-0", 1) == standby
        assert "could not be imported" in (one.directory / "logs" / "standby-engine.log").read_text()


async def test_nobody_stands_by_before_it_is_time(trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    one = trial()
    async with run_with_standbys(one, monkeypatch, Role.ENGINE, after_s=60.0) as supervisor:
        await anyio.sleep(0.3)
        assert not supervisor._standbys.children


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ([], [Role.ENGINE, Role.CONTROLLER, Role.TRAINER]),
        (["run.standby_after_s=0"], []),
        (["run.restarts=0"], [Role.ENGINE]),
        (["engines.restarts=0", "training.ranks=2"], [Role.CONTROLLER, Role.TRAINER, Role.TRAINER]),
        (['engines.cores=["0"]'], [Role.CONTROLLER, Role.TRAINER]),
        (['engines.kind="simulated"'], [Role.CONTROLLER, Role.TRAINER]),
        (["engines.count=2", 'engines.release="stop"'], [Role.ENGINE, Role.CONTROLLER, Role.TRAINER]),
    ],
)
async def test_those_stand_by_whose_start_is_long_and_who_can_be_anybody(
    overrides: list[str], roles: list[Role], tmp_path: Path
) -> None:
    topology = plan_topology(load_recipe(DEMO, overrides), tmp_path)
    assert list(topology.standby) == roles
