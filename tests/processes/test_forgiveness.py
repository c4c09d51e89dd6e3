"""Deaths that a run survives: of engines, of the controller, of trainer ranks, as real processes under a supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import msgspec
import psutil
import pytest
from trials import PLANS, STAND_IN, Trial, death_in, lives, until

from streamrl.base.errors import RecipeError, RewardFailureLimit
from streamrl.plan.topology import RENDEZVOUS_FILE, ProcessPlan, Role, Topology
from streamrl.plan.used_memory import _SCAN_S as SCAN_S
from streamrl.supervise import child_process, restarts
from streamrl.supervise import supervisor as supervisor_module
from streamrl.supervise.exit_reason import ExitKind, reason_of
from streamrl.supervise.restarts import Restarts
from streamrl.supervise.supervisor import Supervisor
from streamrl.supervise.supervisor_orders import KillEngine, StartEngine, StopEngine

RANK_1 = ProcessPlan(role=Role.TRAINER, index=1)


@contextlib.asynccontextmanager
async def forgiving(
    one: Trial, *more: ProcessPlan, engines: int = 0, core: int = 0, rewards: int = 0, min_serving: int = 1
) -> AsyncIterator[Supervisor]:
    """A supervisor of the stand-ins and of ``more`` that is watching; it forgives so many deaths."""
    times = {Role.ENGINE: engines, Role.TRAINER: core, Role.CONTROLLER: core, Role.REWARD: rewards}
    plans = [msgspec.structs.replace(plan, restarts=times.get(plan.role, 0)) for plan in (*PLANS, *more)]
    for plan in more:
        path = one.directory / "behaviour" / plan.name
        path.write_text(path.read_text() if path.exists() else "serve")
    topology = Topology(processes=tuple(plans), endpoints={}, min_serving=min_serving)
    async with Supervisor(topology, one.directory, one.sockets, entry=(str(STAND_IN),)) as supervisor:
        await until(lambda: all(started(one, plan.name, 0) for plan in plans))
        yield supervisor


def started(one: Trial, name: str, start: int) -> bool:
    return (one.directory / "pids" / f"{name}.{start}").exists()


async def end_well(one: Trial, supervisor: Supervisor) -> None:
    await supervisor.stop(deadline_s=20)
    one.assert_nothing_left()


async def kills(supervisor: Supervisor, order: KillEngine) -> bool:
    """Whether ``order`` would end the host that there is now."""
    process, killed = supervisor._children[order.engine].process, []
    kill, process.kill = process.kill, lambda: killed.append(order)  # type: ignore[method-assign]
    await supervisor.obey(order)
    process.kill = kill  # type: ignore[method-assign]
    return bool(killed)


# ---- budgets ---------------------------------------------------------------------------------------


def test_a_budget_pauses_longer_each_time_and_is_whole_again_after_long_service() -> None:
    one, now, pauses = Restarts(4, at_once=True), 0.0, []
    for _ in range(4):
        died = now
        while not one.due(now):
            now += 0.25
        pauses.append(now - died)
    assert pauses == [0.0, 1.0, 2.0, 4.0]
    one.served(restarts.RENEWED_AFTER_S - 1)
    assert not one.forgive and not one.due(now + 1000)
    one.served(restarts.RENEWED_AFTER_S)
    assert one.left == 4 and one.due(now), "and at once again"


def test_who_lived_for_a_while_is_not_made_to_wait_for_its_successor() -> None:
    one = Restarts(4, at_once=True)
    assert one.due(0.0)
    one.served(restarts.SETTLED_AFTER_S)
    assert one.due(10.0), "it lived: at once"
    one.served(restarts.SETTLED_AFTER_S - 1)
    assert not one.due(20.0)
    one.served(3600.0)  # the pause has begun: nobody serves meanwhile
    assert not one.due(20.5) and one.due(21.0)
    assert one.left == 1, "the budget is spent as before"


def test_a_pause_that_was_begun_is_forgotten_when_somebody_else_decides() -> None:
    one = Restarts(1)
    assert not one.due(5.0) and one.forgive
    one.forget()
    assert not one.forgive


@pytest.mark.parametrize("error", [RewardFailureLimit("too many"), RecipeError(["wrong"])])
def test_a_controller_that_ends_the_run_on_purpose_says_so(error: Exception) -> None:
    assert reason_of(Role.CONTROLLER, error).kind is ExitKind.VERDICT
    assert reason_of(Role.TRAINER, error).kind is ExitKind.CAUSE


# ---- engines ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_engine_that_dies_is_started_again_with_nothing_left_of_the_last_one(
    trial: Callable[..., Trial],
) -> None:
    one = trial(engine_0="orphan")
    async with forgiving(one, engines=2) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        grandchild = int((one.directory / "pids" / "grandchild-0").read_text())
        (one.directory / "behaviour" / "engine-0").write_text("serve")
        os.kill(one.pid("engine-0"), signal.SIGKILL)
        await until(lambda: started(one, "engine-0", 1))
        assert not lives(grandchild)
        assert lives(one.pid("controller")) and lives(one.pid("trainer-0"))
        assert not (one.directory / "resumed").exists(), "an engine begins anew"
        await end_well(one, supervisor)


@pytest.mark.asyncio
async def test_an_engine_that_cannot_serve_the_model_is_not_started_again(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="refuse")
    async with forgiving(one, ProcessPlan(role=Role.ENGINE, index=1), engines=2) as supervisor:
        (one.directory / "go").touch()
        text = await death_in(supervisor)
    assert text.startswith("engine-0 ended with exit code 1: ModelRefused: the model's attention has heads of 16\n")
    assert not started(one, "engine-0", 1)
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_an_engine_that_dies_too_often_is_retired_and_the_last_one_ends_the_run_by_the_first_cause(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.05)
    one = trial()
    other = ProcessPlan(role=Role.ENGINE, index=1)
    async with forgiving(one, other, engines=1) as supervisor, anyio.create_task_group() as tasks:

        async def kill_them() -> None:
            os.kill(one.pid("engine-0"), signal.SIGKILL)
            await until(lambda: started(one, "engine-0", 1))
            os.kill(one.pid("engine-0", 1), signal.SIGKILL)
            await until(lambda: not lives(one.pid("engine-0", 1)))
            for start in range(2):
                await until(lambda start=start: started(one, "engine-1", start))  # type: ignore[misc]
                assert lives(one.pid("controller")), "the other one serves"
                os.kill(one.pid("engine-1", start), signal.SIGKILL)

        tasks.start_soon(kill_them)
        first, second, *_ = (await death_in(supervisor)).splitlines()
        assert first == "engine-0 was killed by SIGKILL" and second == "(after it: engine-1)"
        assert not started(one, "engine-0", 2) and not started(one, "engine-1", 2)
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_with_fewer_engines_than_must_serve_the_run_ends(trial: Callable[..., Trial]) -> None:
    one = trial()
    other = ProcessPlan(role=Role.ENGINE, index=1)
    async with forgiving(one, other, engines=1, min_serving=2) as supervisor, anyio.create_task_group() as tasks:

        async def kill_it_twice() -> None:
            os.kill(one.pid("engine-0"), signal.SIGKILL)
            await until(lambda: started(one, "engine-0", 1))
            os.kill(one.pid("engine-0", 1), signal.SIGKILL)

        tasks.start_soon(kill_it_twice)
        assert (await death_in(supervisor)).startswith("engine-0 was killed by SIGKILL")
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_orders_to_kill_mean_one_host_and_its_death_is_one_like_another(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="hang")
    async with forgiving(one, engines=3) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        first = one.pid("engine-0")
        os.kill(first, signal.SIGSTOP)
        for order in (
            KillEngine(engine="engine-0", reason="planted", pid=first + 1),
            KillEngine(engine="engine-0", reason="planted", older_than_s=300),
        ):
            assert not await kills(supervisor, order), "neither was meant for this one"
        await supervisor.obey(KillEngine(engine="engine-0", reason="planted", pid=first))
        await until(lambda: started(one, "engine-0", 1))
        late = KillEngine(engine="engine-0", reason="late", pid=first)
        assert not await kills(supervisor, late), "what came late was about its predecessor"
        await supervisor.obey(StopEngine(engine="engine-0"))
        assert not lives(one.pid("engine-0", 1))
        await supervisor.obey(StartEngine(engine="engine-0"))
        await until(lambda: started(one, "engine-0", 2))
        await supervisor.kill()
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_an_engine_whose_resource_tracker_is_killed_is_replaced(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="orphan")
    async with forgiving(one, engines=1) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        await until(lambda: bool(supervisor.memory.trackers))
        (one.directory / "behaviour" / "engine-0").write_text("serve")
        next(iter(supervisor.memory.trackers)).kill()
        await until(lambda: started(one, "engine-0", 1))
        await end_well(one, supervisor)


# ---- the core --------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("more", [(), (RANK_1,)])
async def test_a_controller_that_is_killed_is_started_again_alone_and_told_to_go_on(
    trial: Callable[..., Trial], more: tuple[ProcessPlan, ...]
) -> None:
    one = trial()
    async with forgiving(one, *more, core=2) as supervisor, anyio.create_task_group() as tasks:
        prepared: list[bool] = []

        async def bind_streams_again() -> None:
            prepared.append(started(one, "controller", 1))

        supervisor.before_controller_start.append(bind_streams_again)
        tasks.start_soon(supervisor.watch)
        os.kill(one.pid("controller"), signal.SIGKILL)
        await until(lambda: started(one, "controller", 1))
        assert prepared == [False], "before it began"
        assert (one.directory / "resumed").read_text().split() == ["controller"]
        assert all(lives(one.pid(name)) for name in ("engine-0", "reward-0", "trainer-0", *(m.name for m in more)))
        await end_well(one, supervisor)


@pytest.mark.asyncio
async def test_a_rank_that_dies_slowly_beside_the_controller_is_waited_for(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the controller would be started for nothing, and started once more with the ranks."""
    one = trial()
    async with forgiving(one, core=2) as supervisor, anyio.create_task_group() as tasks:
        monkeypatch.setattr(child_process, "_is_ending", lambda pid: pid == one.pid("trainer-0"))
        tasks.start_soon(supervisor.watch)
        os.kill(one.pid("controller"), signal.SIGKILL)
        await anyio.sleep(0.4)
        assert not started(one, "controller", 1)
        os.kill(one.pid("trainer-0"), signal.SIGKILL)
        await until(lambda: started(one, "controller", 1) and started(one, "trainer-0", 1))
        assert supervisor._forgiveness.core.left == 1
        await end_well(one, supervisor)


def test_who_was_killed_is_ending_until_it_is_reaped() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not child_process._is_ending(process.pid)
        process.kill()
        assert child_process._is_ending(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert child_process._is_ending(process.pid)
    assert child_process._is_ending(process.pid)


@pytest.mark.asyncio
@pytest.mark.parametrize("sets", [False, True])
async def test_a_controller_that_is_started_again_finds_the_engines_that_a_run_begins_with(
    trial: Callable[..., Trial], sets: bool
) -> None:
    one, second = trial(), ProcessPlan(role=Role.ENGINE, index=1, resting=sets)
    topology = Topology(processes=tuple(as_core(plan) for plan in (*PLANS, second)), endpoints={})
    (one.directory / "behaviour" / "engine-1").write_text("serve")
    hosts = Supervisor(topology, one.directory, one.sockets, entry=(str(STAND_IN),))
    async with hosts as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        await until(lambda: started(one, "controller", 0) and started(one, "engine-0", 0))
        await supervisor.obey(StopEngine(engine="engine-0"))
        if sets:
            await supervisor.obey(StartEngine(engine="engine-1"))
        await until(lambda: started(one, "engine-1", 0))
        os.kill(one.pid("controller"), signal.SIGKILL)
        await until(lambda: started(one, "controller", 1) and started(one, "engine-0", 1))
        assert lives(one.pid("engine-0", 1)) and lives(one.pid("engine-1")) is not sets
        await end_well(one, supervisor)


def as_core(plan: ProcessPlan) -> ProcessPlan:
    return msgspec.structs.replace(plan, restarts=1) if plan.role in (Role.CONTROLLER, Role.TRAINER) else plan


@pytest.mark.asyncio
async def test_ranks_are_started_again_together_and_the_controller_with_them(trial: Callable[..., Trial]) -> None:
    one = trial(controller="hang", trainer_0="hang")
    async with forgiving(one, RANK_1, core=1) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        (one.sockets / RENDEZVOUS_FILE).touch()
        old = [one.pid(name) for name in ("controller", "trainer-0", "trainer-1")]
        os.kill(one.pid("trainer-1"), signal.SIGKILL)
        names = ("controller", "trainer-0", "trainer-1")
        await until(lambda: all(started(one, name, 1) for name in names))
        assert not any(lives(pid) for pid in old)
        assert sorted((one.directory / "resumed").read_text().split()) == sorted(names)
        assert not (one.sockets / RENDEZVOUS_FILE).exists(), "the ranks meet anew"
        assert lives(one.pid("engine-0")) and not started(one, "engine-0", 1)
        await supervisor.kill()
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_the_core_is_forgiven_until_its_budget_is_spent(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with forgiving(one, core=1) as supervisor, anyio.create_task_group() as tasks:

        async def kill_it_twice() -> None:
            for start in range(2):
                await until(lambda start=start: started(one, "controller", start))  # type: ignore[misc]
                os.kill(one.pid("controller", start), signal.SIGKILL)

        tasks.start_soon(kill_it_twice)
        assert (await death_in(supervisor)).startswith("controller was killed by SIGKILL")
        assert not started(one, "controller", 2)
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_verdict_is_not_forgiven_and_neither_is_a_death_in_a_drain(trial: Callable[..., Trial]) -> None:
    one = trial(controller="verdict")
    async with forgiving(one, core=3) as supervisor:
        (one.directory / "go").touch()
        assert "RewardFailureLimit: too many rewards failed" in await death_in(supervisor)
        assert not started(one, "controller", 1)
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_controller_that_dies_while_it_drains_ends_the_run(trial: Callable[..., Trial]) -> None:
    one = trial(controller="hang")
    async with forgiving(one, core=3) as supervisor:
        supervisor.request_drain()
        await until((one.directory / "ignored-sigterm").exists)
        os.kill(one.pid("controller"), signal.SIGKILL)
        assert (await death_in(supervisor)).startswith("controller was killed by SIGKILL")
        assert not started(one, "controller", 1)
    one.assert_nothing_left()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["engine-0", "reward-0"])
async def test_who_takes_a_broken_stream_for_the_end_is_replaced(name: str, trial: Callable[..., Trial]) -> None:
    one = trial(**{name.replace("-", "_"): "leave"})
    async with forgiving(one, engines=1, rewards=1) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        (one.directory / "behaviour" / name).write_text("serve")
        (one.directory / "leave").touch()
        await until(lambda: started(one, name, 1))
        await end_well(one, supervisor)


@pytest.mark.asyncio
async def test_a_rank_that_had_ended_well_is_started_again_with_a_controller_that_dies_after_it(
    trial: Callable[..., Trial],
) -> None:
    one = trial(trainer_0="leave")
    async with forgiving(one, core=3) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        rank = one.pid("trainer-0")
        (one.directory / "behaviour" / "trainer-0").write_text("serve")
        (one.directory / "leave").touch()
        await until(lambda: not lives(rank))
        os.kill(one.pid("controller"), signal.SIGKILL)
        await until(lambda: started(one, "trainer-0", 1) and started(one, "controller", 1))
        await end_well(one, supervisor)


@pytest.mark.asyncio
async def test_after_the_last_word_of_the_controller_a_death_is_only_logged(
    trial: Callable[..., Trial], caplog: pytest.LogCaptureFixture
) -> None:
    one = trial(trainer_0="raise")
    async with forgiving(one, core=3) as supervisor:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.watch)
                supervisor.run_finished()
                (one.directory / "go").touch()
                await until(lambda: (one.directory / "exit" / "trainer-0.json").exists())
                (one.directory / "end").touch()  # the others end, and the controller with them
        await supervisor.kill()
    assert "after the run had finished, trainer-0 ended with exit code 1" in caplog.text
    assert not started(one, "trainer-0", 1)
    one.assert_nothing_left()


# ---- races and budgets -----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["controller", "reward-0"])
async def test_whoever_served_for_long_has_its_budget_again(
    name: str, trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "RENEWED_AFTER_S", 1.0)
    one = trial()
    async with forgiving(one, core=1, rewards=1) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        for start in range(2):
            await anyio.sleep(1.2)
            os.kill(one.pid(name, start), signal.SIGKILL)
            await until(lambda start=start: started(one, name, start + 1))  # type: ignore[misc]
        await end_well(one, supervisor)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["reward-0", "engine-0"])
async def test_who_dies_while_the_controller_is_started_again_is_asked_too_whether_it_is_forgiven(
    name: str, trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its budget is spent, and either whole again by its service or for others to go on without it."""
    monkeypatch.setattr(restarts, "RENEWED_AFTER_S", 0.0 if name == "reward-0" else 600.0)
    one, other = trial(), ProcessPlan(role=Role.ENGINE, index=1)
    async with forgiving(one, other, core=1, rewards=1, engines=1) as supervisor, anyio.create_task_group() as tasks:
        supervisor._forgiveness.each[name].left = 0

        async def kill_it() -> None:
            os.kill(one.pid(name), signal.SIGKILL)
            await until(lambda: not lives(one.pid(name)))

        supervisor.before_controller_start.append(kill_it)
        tasks.start_soon(supervisor.watch)
        os.kill(one.pid("controller"), signal.SIGKILL)
        await until(lambda: started(one, "controller", 1))
        await until(lambda: name in supervisor._forgiveness.retired or started(one, name, 1))
        await end_well(one, supervisor)


@pytest.mark.asyncio
async def test_a_reward_worker_that_asks_for_a_successor_takes_what_it_started_along(
    trial: Callable[..., Trial],
) -> None:
    one = trial(reward_0="share")
    async with forgiving(one) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        await until(lambda: bool(supervisor.memory.trackers))
        first = one.pid("reward-0")
        (one.directory / "go").touch()
        await until(lambda: started(one, "reward-0", 1))
        assert not [p for p in psutil.process_iter() if session_of(p.pid) == first and lives(p.pid)]
        await anyio.sleep(2 * SCAN_S)
        assert lives(one.pid("reward-0", 1)), "it is not to blame for the end of its predecessor's processes"
        await end_well(one, supervisor)


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


@pytest.mark.asyncio
async def test_a_drain_that_finds_no_controller_is_meant_for_its_successor(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with forgiving(one, core=2) as supervisor:

        async def drain() -> None:
            supervisor.request_drain()

        supervisor.before_controller_start.append(drain)
        os.kill(one.pid("controller"), signal.SIGKILL)
        with anyio.fail_after(20):
            await supervisor.watch()
        await supervisor.kill()
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_run_may_be_left_while_a_dead_process_is_cleared_up(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    clearing, end = threading.Event(), supervisor_module.end_session

    def end_slowly(*arguments: Any) -> Any:
        clearing.set()
        time.sleep(1.0)
        return end(*arguments)

    one = trial(engine_0="orphan")
    async with forgiving(one, engines=3, rewards=3) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        await until(lambda: bool(supervisor.memory.trackers))
        monkeypatch.setattr(supervisor_module, "end_session", end_slowly)
        os.kill(one.pid("reward-0"), signal.SIGKILL)
        await until(clearing.is_set)
        await supervisor.kill()
        await anyio.sleep(1.2)  # the watch goes on with what it found, and ends
    one.assert_nothing_left()
