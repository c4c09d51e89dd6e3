"""Where the system has no room for another process, for a while or for good."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest
from trials import PLANS, STAND_IN, Trial, death_in, lives, until

from streamrl.plan.topology import Topology
from streamrl.processes import engine_orders
from streamrl.supervise import guarded_sessions, supervisor
from streamrl.supervise.supervisor import Supervisor
from streamrl.supervise.supervisor_orders import StartEngine, StopEngine

pytestmark = pytest.mark.asyncio


class Refusals:
    """In the place of a function that starts processes: so many starts fail, after some that do not."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self._start = start
        self.spared = self.left = self.seen = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.spared:
            self.spared -= 1
        elif self.left:
            self.left, self.seen = self.left - 1, self.seen + 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return self._start(*arguments, **named)


def refusing(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Refusals:
    refusals = Refusals(getattr(module, name))
    monkeypatch.setattr(module, name, refusals)
    monkeypatch.setattr(supervisor, "FORKLESS_S", 0.01)
    monkeypatch.setattr(engine_orders, "FORKLESS_S", 0.01)
    return refusals


def hosts(one: Trial, restarts: int) -> Supervisor:
    plans = tuple(msgspec.structs.replace(plan, restarts=restarts) for plan in PLANS)
    return Supervisor(Topology(processes=plans, endpoints={}), one.directory, one.sockets, entry=(str(STAND_IN),))


@pytest.mark.parametrize("name", ["engine-0", "reward-0", "controller", "trainer-0"])
async def test_who_cannot_be_started_at_once_is_started_later(
    name: str, trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with hosts(one, 5) as run, anyio.create_task_group() as tasks:
        await until(one.all_started)
        refusals = refusing(monkeypatch, supervisor, "start_child")
        refusals.left = 2
        tasks.start_soon(run.watch)
        os.kill(one.pid(name), signal.SIGKILL)
        await until(lambda: (one.directory / "pids" / f"{name}.1").exists())
        assert refusals.seen == 2 and lives(one.pid(name, 1))
        await run.stop(deadline_s=20)
    one.assert_nothing_left()


@pytest.mark.parametrize("name", ["engine-0", "controller"])
async def test_who_can_never_be_started_again_ends_the_run_when_that_is_forgiven_no_more(
    name: str, trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with hosts(one, 2) as run:
        await until(one.all_started)
        refusals = refusing(monkeypatch, supervisor, "start_child")
        refusals.left = 1000
        run._children[name]._started_s -= 10_000  # it had lived so long that its budget is whole
        os.kill(one.pid(name), signal.SIGKILL)
        assert (await death_in(run)).startswith(f"{name} was killed by SIGKILL")
        assert refusals.seen == 2
    one.assert_nothing_left()


async def test_an_engine_that_is_ordered_is_tried_again(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with hosts(one, 0) as run:
        await until(one.all_started)
        await run.obey(StopEngine(engine="engine-0"))
        refusals = refusing(monkeypatch, supervisor, "start_child")
        refusals.left = engine_orders._STARTS - 1
        await run.obey(StartEngine(engine="engine-0"))
        await until(lambda: (one.directory / "pids" / "engine-0.1").exists())
        await run.obey(StopEngine(engine="engine-0"))
        refusals.left = engine_orders._STARTS
        with pytest.raises(BlockingIOError):
            await run.obey(StartEngine(engine="engine-0"))
        await run.stop(deadline_s=20)
    one.assert_nothing_left()


async def test_an_engine_that_the_kernel_does_not_let_go_is_in_nobody_s_way(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with hosts(one, 0) as run:
        await until(one.all_started)
        held = run._children["engine-0"].process
        with monkeypatch.context() as patch:  # a process that no signal ends cannot be made here
            patch.setattr(held, "terminate", lambda: None)
            patch.setattr(held, "kill", lambda: None)
            patch.setattr(supervisor, "end_session", lambda *_: [held.pid])
            await run.stop_engine("engine-0", grace_s=0.0)
        await run.obey(StartEngine(engine="engine-0"))
        await until(lambda: (one.directory / "pids" / "engine-0.1").exists())
        assert lives(held.pid)
        await run.stop(deadline_s=20)
    held.wait()
    one.assert_nothing_left()


async def test_a_rank_that_had_ended_well_is_tried_again_with_its_controller(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial(trainer_0="leave")
    async with hosts(one, 5) as run, anyio.create_task_group() as tasks:
        await until(one.all_started)
        (one.directory / "leave").touch()
        await until(lambda: not run._children["trainer-0"].running)
        assert run._children["trainer-0"].exit_code == 0
        (one.directory / "behaviour" / "trainer-0").write_text("serve")
        refusals = refusing(monkeypatch, supervisor, "start_child")
        refusals.spared = refusals.left = 1  # the controller is started first
        os.kill(one.pid("controller"), signal.SIGKILL)
        tasks.start_soon(run.watch)
        await until(lambda: (one.directory / "pids" / "trainer-0.1").exists())
        await run.stop(deadline_s=20)
    one.assert_nothing_left()


async def test_a_worker_that_asks_to_be_replaced_has_not_died_where_that_takes_two_attempts(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial(reward_0="share")
    async with hosts(one, 0) as run, anyio.create_task_group() as tasks:
        await until(one.all_started)
        refusals = refusing(monkeypatch, supervisor, "start_child")
        refusals.left = 2
        (one.directory / "go").touch()
        tasks.start_soon(run.watch)
        await until(lambda: (one.directory / "pids" / "reward-0.1").exists())
        await run.stop(deadline_s=20)
    one.assert_nothing_left()


async def test_a_guardian_that_cannot_be_started_is_tried_again(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with hosts(one, 0) as run, anyio.create_task_group() as tasks:
        await until(one.all_started)
        await anyio.sleep(guarded_sessions._GUARDED_S)
        refusals = refusing(monkeypatch, guarded_sessions, "open_guardian")
        refusals.left = 1
        tasks.start_soon(run.watch)
        (killed,) = one.guardians()
        killed.kill()
        await until(lambda: any(found.pid != killed.pid for found in one.guardians()))
        assert refusals.seen == 1
        await run.stop(deadline_s=20)
    one.assert_nothing_left()
