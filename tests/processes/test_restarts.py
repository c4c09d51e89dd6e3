"""Deaths that a run survives, as real processes under a supervisor: some are started again alone, others resume it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

from streamrl.base.errors import CannotContinue, RecipeError, StreamRLError
from streamrl.base.run_events import KillEngine, StartEngine, StopEngine
from streamrl.processes import engine_orders, restart_policy
from streamrl.processes.engine_orders import EngineOrders
from streamrl.processes.exit_reason import ExitKind, reason_of
from streamrl.processes.local_launcher import LocalLauncher
from streamrl.processes.restart_policy import RENEWED_AFTER_S, SETTLED_AFTER_S, Restarts
from streamrl.processes.supervisor import Supervisor
from streamrl.recipe.topology import RENDEZVOUS_FILE, ProcessPlan, Role
from tests.processes.trials import NAMES, Trial, death_in, drain, lives, surviving, until, watched

ENGINE_1 = ProcessPlan(role=Role.ENGINE, index=1)
RANK_1 = ProcessPlan(role=Role.TRAINER, index=1)
RESTING = ProcessPlan(role=Role.ENGINE, index=1, starts_inactive=True)


# ---- budgets ---------------------------------------------------------------------------------------


def test_a_budget_pauses_longer_and_recovers() -> None:
    """A restart budget pauses longer each time, and is complete again after long service."""
    one = Restarts(4)
    assert [one.next_pause(0.1) for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, None]
    assert one.next_pause(RENEWED_AFTER_S - 1) is None
    assert one.next_pause(RENEWED_AFTER_S) == 0.0 and one.remaining == 3


def test_a_successor_of_a_long_lived_process_starts_at_once() -> None:
    """The successor of a process that lived for a while starts without a pause."""
    one = Restarts(4)
    assert [one.next_pause(uptime_s) for uptime_s in (0.0, SETTLED_AFTER_S, SETTLED_AFTER_S - 1)] == [0.0, 0.0, 1.0]
    assert one.remaining == 1, "the budget is spent as before"


@pytest.mark.parametrize("error", [CannotContinue("too many"), RecipeError("wrong")])
def test_a_controller_that_ends_the_run_on_purpose_says_so(error: Exception) -> None:
    assert reason_of(Role.CONTROLLER, error).kind is ExitKind.VERDICT
    assert reason_of(Role.REWARD, error).kind is ExitKind.CAUSE


# ---- started again alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["engine-0", "reward-0"])
async def test_a_serving_process_restarts_alone(name: str, trial: Callable[..., Trial]) -> None:
    """A serving process is started again alone, and nothing is left of the one before."""
    one = trial(**{name.replace("-", "_"): "orphan"})
    async with surviving(one, alone=2) as supervisor, watched(supervisor):
        (one.directory / "behaviour" / name).write_text("serve")
        os.kill(one.pid(name), signal.SIGKILL)
        await until(lambda: one.started(name, 1))
        assert not any(map(lives, one.grandchildren())), "also the one with a session of its own"
        assert lives(one.pid("controller")) and lives(one.pid("trainer-0"))
        assert not (one.directory / "resumed").exists(), "it is started afresh"
    one.assert_nothing_left()


@pytest.mark.parametrize("name", ["engine-0", "reward-0"])
async def test_who_takes_a_broken_stream_for_the_end_is_replaced(name: str, trial: Callable[..., Trial]) -> None:
    one = trial(**{name.replace("-", "_"): "leave"})
    async with surviving(one, alone=1) as supervisor, watched(supervisor):
        (one.directory / "behaviour" / name).write_text("serve")
        one.go("leave")
        await until(lambda: one.started(name, 1))
    one.assert_nothing_left()


async def test_a_reward_worker_is_replaced_within_its_budget(trial: Callable[..., Trial]) -> None:
    """A reward worker is replaced as often as it asks until its budget is spent."""
    one = trial(reward_0="restart")
    async with one.supervisor(restarts=2) as supervisor:
        text = await death_in(supervisor)
    assert text.startswith("reward-0 ended with exit code 75 (it asked to be replaced, and no restarts are left)")
    assert one.started("reward-0", 2) and not one.started("reward-0", 3)
    one.assert_nothing_left()


async def test_only_reward_workers_may_ask(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="restart")
    async with one.supervisor() as supervisor:
        assert (await death_in(supervisor)).startswith("engine-0 ended with exit code 75")
    one.assert_nothing_left()


@pytest.mark.parametrize("name", ["engine-0", "trainer-0"])
async def test_who_cannot_take_the_model_is_not_started_again(name: str, trial: Callable[..., Trial]) -> None:
    one = trial(**{name.replace("-", "_"): "refuse"})
    async with surviving(one, ENGINE_1, alone=2, resumes=2) as supervisor:
        one.go()
        text = await death_in(supervisor)
    assert text.startswith(f"{name} ended with exit code 1: ModelRefused: the model's attention has heads of 16\n")
    assert not one.started(name, 1)
    one.assert_nothing_left()


async def test_the_last_retired_engine_ends_the_run(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that dies too often is retired, and the last one ends the run with the first cause."""
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.05)
    one = trial()
    async with surviving(one, ENGINE_1, alone=1) as supervisor, anyio.create_task_group() as tasks:

        async def kill_them() -> None:
            os.kill(one.pid("engine-0"), signal.SIGKILL)
            await until(lambda: one.started("engine-0", 1))
            os.kill(one.pid("engine-0", 1), signal.SIGKILL)
            await until(lambda: not lives(one.pid("engine-0", 1)))
            for start in range(2):
                await until(lambda start=start: one.started("engine-1", start))  # type: ignore[misc]
                assert lives(one.pid("controller")), "the other one serves"
                os.kill(one.pid("engine-1", start), signal.SIGKILL)

        tasks.start_soon(kill_them)
        first, second, *_ = (await death_in(supervisor)).splitlines()
        assert first == "engine-0 was killed by SIGKILL" and second == "(after it: engine-1)"
        assert not one.started("engine-0", 2) and not one.started("engine-1", 2)
    one.assert_nothing_left()


async def test_with_fewer_engines_than_must_serve_the_run_ends(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with surviving(one, ENGINE_1, alone=1, min_serving=2) as supervisor, anyio.create_task_group() as tasks:

        async def kill_it_twice() -> None:
            os.kill(one.pid("engine-0"), signal.SIGKILL)
            await until(lambda: one.started("engine-0", 1))
            os.kill(one.pid("engine-0", 1), signal.SIGKILL)

        tasks.start_soon(kill_it_twice)
        assert (await death_in(supervisor)).startswith("engine-0 was killed by SIGKILL")
    one.assert_nothing_left()


# ---- resumed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["controller", "trainer-1"])
async def test_a_dead_controller_or_rank_resumes_the_run(
    victim: str, trial: Callable[..., Trial], caplog: pytest.LogCaptureFixture
) -> None:
    """The death of the controller or a rank resumes the run with new processes only."""
    one = trial(trainer_0="hang", engine_0="orphan")
    names = (*NAMES, "trainer-1")
    async with surviving(one, RANK_1, resumes=2) as supervisor, anyio.create_task_group() as tasks:
        prepared: list[list[int]] = []

        async def bind_streams_again() -> None:
            prepared.append([pid for pid in [*old, *one.grandchildren()] if lives(pid)])

        supervisor.before_resume.append(bind_streams_again)
        old = [one.pid(name) for name in names]
        for left in (RENDEZVOUS_FILE, "engine-0.orders", "control"):
            (one.sockets / left).touch()
        (one.directory / "behaviour" / "engine-0").write_text("serve")
        tasks.start_soon(supervisor.watch)
        os.kill(one.pid(victim), signal.SIGKILL)
        await until(lambda: all(one.started(name, 1) for name in names))
        assert prepared == [[]], "when all had ended, and before others began"
        assert sorted((one.directory / "resumed").read_text().split()) == sorted(names)
        assert not (one.sockets / RENDEZVOUS_FILE).exists(), "the ranks meet anew"
        assert (one.sockets / "control").exists(), "who looks at the run still finds it"
        await supervisor.kill()
    [said] = [record.getMessage() for record in caplog.records if "resumed" in record.getMessage()]
    assert said == f"{victim} was killed by SIGKILL; the run is resumed (1 of its restarts left)"
    one.assert_nothing_left()


async def test_a_run_is_resumed_until_its_budget_is_spent(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with surviving(one, resumes=1) as supervisor, anyio.create_task_group() as tasks:

        async def kill_it_twice() -> None:
            for start in range(2):
                await until(lambda start=start: one.started("controller", start))  # type: ignore[misc]
                os.kill(one.pid("controller", start), signal.SIGKILL)

        tasks.start_soon(kill_it_twice)
        assert (await death_in(supervisor)).startswith("controller was killed by SIGKILL")
        assert not one.started("controller", 2)
    one.assert_nothing_left()


@pytest.mark.long
async def test_the_budget_is_whole_again_after_long_service(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "RENEWED_AFTER_S", 0.5)
    one = trial()
    async with surviving(one, resumes=1, alone=1) as supervisor, watched(supervisor):
        for name in ("reward-0", "controller"):
            for _ in range(2):
                await anyio.sleep(0.7)
                before = supervisor.children[name]
                before.process.kill()
                await until(lambda before=before: supervisor.children[before.name] is not before)  # type: ignore[misc]
                await until(lambda: {child.process.pid for child in supervisor.children.values()} <= {*one.pids()})
    one.assert_nothing_left()


async def test_a_run_that_a_controller_ended_on_purpose_is_not_resumed(trial: Callable[..., Trial]) -> None:
    one = trial(controller="verdict")
    async with surviving(one, resumes=3) as supervisor:
        one.go()
        assert "CannotContinue: too many rewards failed" in await death_in(supervisor)
        assert not one.started("controller", 1)
    one.assert_nothing_left()


async def test_a_controller_that_dies_while_it_drains_ends_the_run(trial: Callable[..., Trial]) -> None:
    one = trial(controller="hang")
    async with surviving(one, resumes=3) as supervisor:
        supervisor.request_drain()
        await until((one.directory / "ignored-sigterm").exists)
        os.kill(one.pid("controller"), signal.SIGKILL)
        assert (await death_in(supervisor)).startswith("controller was killed by SIGKILL")
        assert not one.started("controller", 1)
    one.assert_nothing_left()


async def test_a_drain_without_controller_is_for_its_successor(trial: Callable[..., Trial]) -> None:
    """A drain that finds no controller is kept for its successor."""
    one = trial()
    async with surviving(one, resumes=2) as supervisor:

        async def drain() -> None:
            supervisor.request_drain()

        supervisor.before_resume.append(drain)
        os.kill(one.pid("controller"), signal.SIGKILL)
        await supervisor.watch()
    one.assert_nothing_left()


@pytest.mark.parametrize("victim", ["reward-0", "controller"])
async def test_a_run_can_be_drained_during_recovery(
    victim: str, trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run can be left while it is resumed, or while a dead process is cleaned up."""
    clearing, end = threading.Event(), LocalLauncher._end_left_behind

    def end_slowly(*arguments: Any) -> Any:
        clearing.set()
        time.sleep(1.0)
        return end(*arguments)

    one = trial(engine_0="orphan")
    async with surviving(one, alone=3, resumes=3) as supervisor, anyio.create_task_group() as tasks:
        supervisor.before_resume.append(supervisor.kill)
        tasks.start_soon(supervisor.watch)
        monkeypatch.setattr(LocalLauncher, "_end_left_behind", end_slowly)
        os.kill(one.pid(victim), signal.SIGKILL)
        if victim == "reward-0":
            await until(clearing.is_set)
            await supervisor.kill()
    one.assert_nothing_left()


# ---- engines, as the controller orders -------------------------------------------------------------


async def test_engines_stop_and_start_while_the_run_goes_on(trial: Callable[..., Trial]) -> None:
    """An engine can be stopped and started while the run goes on."""
    one = trial(engine_0="orphan")
    async with surviving(one) as supervisor, watched(supervisor):
        with pytest.raises(StreamRLError, match="engine-0 was not stopped"):
            supervisor.start_engine("engine-0")
        with pytest.raises(StreamRLError, match="trainer-0 is no engine of this run; it has engine-0"):
            await supervisor.stop_engine("trainer-0")
        await supervisor.stop_engine("engine-0")
        assert not any(map(lives, [one.pid("engine-0"), *one.grandchildren()])), "with what it had started"
        assert lives(one.pid("trainer-0"))
        (one.directory / "behaviour" / "engine-0").write_text("serve")
        for start in (1, 2):
            supervisor.start_engine("engine-0")
            await until(lambda start=start: one.started("engine-0", start))  # type: ignore[misc]
            await supervisor.stop_engine("engine-0")
        supervisor.start_engine("engine-0")  # the run may end while it starts
    await supervisor.stop_engine("engine-0")  # an order that arrives after the end is for nobody
    supervisor.start_engine("engine-0")
    one.assert_nothing_left()


async def test_an_idle_sets_engine_starts_with_its_set(trial: Callable[..., Trial]) -> None:
    """An engine of a set that does not serve is started when the set does."""
    one = trial()
    async with surviving(one, RESTING) as supervisor, watched(supervisor):
        assert not (one.directory / "logs" / "engine-1.log").exists(), "there is one from the moment of its start"
        await supervisor.stop_engine("engine-1")  # there is nothing to be ended
        await supervisor.stop_engine("engine-0")
        supervisor.start_engine("engine-1")
        await until(lambda: one.started("engine-1"))
    one.assert_nothing_left()


async def test_deaths_before_a_stop_or_after_a_restart_count(trial: Callable[..., Trial]) -> None:
    """The death of an engine before its stop, or after its restart, counts as a death."""
    one = trial()
    async with surviving(one) as supervisor:
        await supervisor.stop_engine("engine-0")
        supervisor.start_engine("engine-0")
        await until(lambda: one.started("engine-0", 1))
        os.kill(one.pid("engine-0", 1), signal.SIGKILL)
        host = supervisor.engine_process("engine-0")
        # Not ``lives``: the first thread of a killed process is a zombie before the process can be waited for.
        await until(lambda: host is not None and host.exit_code is not None)
        await supervisor.stop_engine("engine-0")
        assert (await death_in(supervisor)).startswith("engine-0 was killed by SIGKILL")
    one.assert_nothing_left()


async def test_a_stopped_engine_has_time_to_end_by_itself(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="leave")
    async with surviving(one) as supervisor:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(supervisor.stop_engine, "engine-0", patience_s=300))
            await anyio.lowlevel.checkpoint()
            one.go("leave")
        assert not lives(one.pid("engine-0")) and not (one.directory / "was-terminated").exists()
    one.assert_nothing_left()


async def is_killed(supervisor: Supervisor, order: KillEngine) -> bool:
    """Whether ``order`` would end the host that there is now."""
    process, killed = supervisor.children[order.engine].process, []
    kill, process.kill = process.kill, lambda: killed.append(order)  # type: ignore[method-assign]
    await EngineOrders(supervisor).handle(order)
    process.kill = kill  # type: ignore[method-assign]
    return bool(killed)


async def test_an_order_to_kill_means_one_host(trial: Callable[..., Trial]) -> None:
    """An order to kill means one engine host, and its death counts like another."""
    one = trial(engine_0="hang")
    async with surviving(one, alone=3) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        orders, first = EngineOrders(supervisor), one.pid("engine-0")
        os.kill(first, signal.SIGSTOP)
        for order in (
            KillEngine(engine="engine-0", reason="planted", pid=first + 1),
            KillEngine(engine="engine-0", reason="planted", older_than_s=300),
        ):
            assert not await is_killed(supervisor, order), "neither was meant for this one"
        await orders.handle(KillEngine(engine="engine-0", reason="planted", pid=first))
        await until(lambda: one.started("engine-0", 1))
        late = KillEngine(engine="engine-0", reason="late", pid=first)
        assert not await is_killed(supervisor, late), "what came late was about its predecessor"
        await orders.handle(StopEngine(engine="engine-0"))
        assert not lives(one.pid("engine-0", 1))
        await orders.handle(StartEngine(engine="engine-0"))
        await until(lambda: one.started("engine-0", 2))
        await supervisor.kill()
    one.assert_nothing_left()


async def test_orders_of_a_dead_controller_expire(trial: Callable[..., Trial]) -> None:
    """Orders of a controller that died mean nothing to the next life."""
    one, patience_s = trial(), 550.0
    async with surviving(one, RESTING, resumes=1) as supervisor, anyio.create_task_group() as tasks:
        orders = EngineOrders(supervisor)
        tasks.start_soon(supervisor.watch)
        began = time.monotonic()
        for order in (StopEngine(engine="engine-0", patience_s=patience_s), StartEngine(engine="engine-1")):
            tasks.start_soon(orders.handle, order)  # the second waits for the first
        await until(lambda: "engine-0" in supervisor._exits.stopped)
        os.kill(one.pid("controller"), signal.SIGKILL)
        await until(lambda: one.started("controller", 1) and one.started("engine-0", 1))
        assert time.monotonic() - began < patience_s / 2
        assert lives(one.pid("engine-0", 1)) and not one.started("engine-1")
        await drain(supervisor)
    one.assert_nothing_left()


# ---- where the system has no room for a process ------------------------------------------------------


class Refusals:
    """In the place of the function that starts processes: so many starts fail, after some that do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._start = LocalLauncher.start
        self.spared = self.left = self.seen = 0
        monkeypatch.setattr(LocalLauncher, "start", lambda *arguments, **named: self(*arguments, **named))
        monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr(engine_orders, "START_PAUSE_S", 0.01)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.spared:
            self.spared -= 1
        elif self.left:
            self.left, self.seen = self.left - 1, self.seen + 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return self._start(*arguments, **named)


@pytest.mark.parametrize(("name", "spared"), [("engine-0", 0), ("reward-0", 0), ("controller", 0), ("trainer-0", 3)])
async def test_who_cannot_be_started_at_once_is_started_later(
    name: str, spared: int, trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with surviving(one, alone=5, resumes=5) as supervisor, watched(supervisor):
        refusals = Refusals(monkeypatch)
        refusals.spared, refusals.left = spared, 2
        os.kill(one.pid(name), signal.SIGKILL)
        await until(lambda: one.started(name, 1))
        await until(lambda: all(lives(child.process.pid) for child in supervisor.children.values()))
        assert refusals.seen == 2
    one.assert_nothing_left()


@pytest.mark.parametrize("name", ["engine-0", "controller"])
async def test_who_can_never_be_started_again_ends_the_run(
    name: str, trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with surviving(one, alone=2, resumes=2) as supervisor:
        refusals = Refusals(monkeypatch)
        refusals.left = 1000
        supervisor.children[name]._started_s -= 10_000  # it had lived so long that its budget is whole
        os.kill(one.pid(name), signal.SIGKILL)
        assert (await death_in(supervisor)).startswith(f"{name} was killed by SIGKILL")
        assert refusals.seen == 2
    one.assert_nothing_left()


async def test_an_engine_that_is_ordered_is_tried_again(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with surviving(one) as supervisor:
        orders, refusals = EngineOrders(supervisor), Refusals(monkeypatch)
        await orders.handle(StopEngine(engine="engine-0"))
        refusals.left = engine_orders.STARTS - 1
        await orders.handle(StartEngine(engine="engine-0"))
        await until(lambda: one.started("engine-0", 1))
        await orders.handle(StopEngine(engine="engine-0"))
        refusals.left = engine_orders.STARTS
        with pytest.raises(BlockingIOError):
            await orders.handle(StartEngine(engine="engine-0"))
    one.assert_nothing_left()


async def test_an_engine_held_by_the_kernel_blocks_nothing(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that the kernel does not release blocks no other process."""
    one = trial()
    async with surviving(one) as supervisor:
        held = supervisor.children["engine-0"].process
        with monkeypatch.context() as patch:  # a process that no signal ends cannot be made here
            patch.setattr(held, "terminate", lambda: None)
            patch.setattr(LocalLauncher, "_end_left_behind", lambda *_: [held.pid])
            await supervisor.stop_engine("engine-0", grace_s=0.0)
        await EngineOrders(supervisor).handle(StartEngine(engine="engine-0"))
        await until(lambda: one.started("engine-0", 1))
        assert lives(held.pid)
        await drain(supervisor)
    held.wait()
    one.assert_nothing_left()
