"""The supervisor with real processes: whatever is killed, the run ends, says why, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import anyio
import pytest
from trials import NAMES, STAND_IN, Trial, death_in, kill_session, lives, until

from streamrl.base.errors import StreamRLError
from streamrl.plan.topology import ProcessPlan, Role
from streamrl.supervise.supervisor import Supervisor

ENDS_WITHIN_S = 10.0


@contextlib.asynccontextmanager
async def running(one: Trial, more: tuple[ProcessPlan, ...] = (), **options: float) -> AsyncIterator[Supervisor]:
    async with one.supervisor(more, **options) as supervisor:
        await until(one.all_started)
        yield supervisor


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", NAMES)
async def test_killing_any_process_ends_the_run_and_names_it(trial: Callable[..., Trial], victim: str) -> None:
    one = trial()
    async with running(one) as supervisor:
        began = time.monotonic()
        os.kill(one.pid(victim), signal.SIGKILL)
        first, *rest = (await death_in(supervisor)).splitlines()
    assert time.monotonic() - began < ENDS_WITHIN_S
    assert first == f"{victim} was killed by SIGKILL"
    assert f"last lines of {one.directory}/logs/{victim}.log:" in rest
    assert f"  {victim} does serve" in rest
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_guardian_that_is_killed_is_replaced(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with running(one) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        killed = set[int]()
        for _ in range(2):  # the second right after it was started
            (guardian,) = one.guardians()
            guardian.kill()
            killed.add(guardian.pid)
            await until(lambda: any(found.pid not in killed for found in one.guardians()))
        await supervisor.kill()
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_no_run_goes_on_without_a_guardian(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with running(one) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(_kill_guardians, one)
        assert (await death_in(supervisor)).startswith("guardian was killed by SIGKILL")
        tasks.cancel_scope.cancel()
    one.assert_nothing_left()


async def _kill_guardians(one: Trial) -> None:
    while True:
        for guardian in one.guardians():
            guardian.kill()
        await anyio.sleep(0.005)


@pytest.mark.asyncio
async def test_a_consequence_never_masks_the_cause(trial: Callable[..., Trial]) -> None:
    one = trial(controller="follow", trainer_0="follow", reward_0="follow")
    (one.directory / "follow").write_text(str(os.getpid()))
    async with running(one) as supervisor:
        partial = one.directory / "follow.partial"
        partial.write_text(str(one.pid("engine-0")))
        partial.rename(one.directory / "follow")
        os.kill(one.pid("engine-0"), signal.SIGKILL)
        # Everyone who follows has ended, and told so, before the supervisor looks for the first time.
        await until(lambda: len(list((one.directory / "exit").glob("*.json"))) == 3)
        first, second, *_ = (await death_in(supervisor)).splitlines()
    assert first == "engine-0 was killed by SIGKILL"
    assert second == "(after it: controller, reward-0, trainer-0)"
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_consequence_seen_first_waits_for_its_cause(trial: Callable[..., Trial]) -> None:
    one = trial(controller="follow", trainer_0="raise")
    (one.directory / "follow").write_text(str(2**22 + 1))  # nobody: the controller ends with StreamBroken at once
    async with one.supervisor() as supervisor, anyio.create_task_group() as tasks:
        await until((one.directory / "exit" / "controller.json").exists)

        async def fail_late() -> None:
            await anyio.sleep(0.5)  # the trainer's failure shows only now
            (one.directory / "go").touch()

        tasks.start_soon(fail_late)
        text = await death_in(supervisor)
    assert text.startswith("trainer-0 ended with exit code 1: ValueError: the loss is not finite")
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_run_that_finishes(trial: Callable[..., Trial]) -> None:
    one = trial(controller="finish")
    async with running(one) as supervisor:
        (one.directory / "go").touch()
        await supervisor.watch()
        assert all(not lives(pid) for pid in one.pids())  # they ended by themselves
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_sigterm_drains(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with running(one) as supervisor:
        await supervisor.stop(deadline_s=20)
        assert (one.directory / "end").exists()  # the controller ended the others, not a signal
    assert list((one.directory / "exit").iterdir()) == []
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_drain_that_hangs_is_ended_at_its_deadline(trial: Callable[..., Trial]) -> None:
    one = trial(controller="hang", engine_0="hang")
    async with running(one) as supervisor:
        began = time.monotonic()
        await supervisor.stop(deadline_s=0.5)
        assert 0.5 < time.monotonic() - began < ENDS_WITHIN_S
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_reward_worker_is_replaced_until_the_budget_is_spent(trial: Callable[..., Trial]) -> None:
    one = trial(reward_0="restart")
    async with one.supervisor(restarts=2) as supervisor:
        text = await death_in(supervisor)
    assert text.startswith("reward-0 ended with exit code 75 (it asked to be replaced, and no restarts are left)")
    assert one.pid("reward-0", start=2)
    assert not (one.directory / "pids" / "reward-0.3").exists()
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_judge_that_dies_is_started_again_until_its_budget_is_spent(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, with grandchildren that outlive it: they end before its successor begins, and the run goes on."""
    monkeypatch.setattr("streamrl.supervise.restarts.FIRST_PAUSE_S", 0.05)
    one = trial()
    (one.directory / "behaviour" / "judge-0").write_text("orphan")
    plan = ProcessPlan(role=Role.JUDGE, index=0, restarts=2)
    async with one.supervisor((plan,)) as supervisor, anyio.create_task_group() as tasks:

        async def kill_it_each_time() -> None:
            for start in range(3):
                started = one.directory / "pids" / f"judge-0.{start}"
                await until(started.exists)
                grandchildren = [int((one.directory / "pids" / f"grandchild-{i}").read_text()) for i in (0, 1)]
                os.kill(int(started.read_text()), signal.SIGKILL)
                if start < 2:
                    await until((one.directory / "pids" / f"judge-0.{start + 1}").exists)
                    # That which left its session is swept at the end of the run.
                    assert not lives(grandchildren[0])
                    os.kill(grandchildren[1], signal.SIGKILL)

        tasks.start_soon(kill_it_each_time)
        text = await death_in(supervisor)
    assert text.startswith("judge-0 was killed by SIGKILL")
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_only_reward_workers_are_replaced(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="restart")
    async with one.supervisor() as supervisor:
        assert (await death_in(supervisor)).startswith("engine-0 ended with exit code 75")
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_part_that_ends_well_while_the_run_goes_on(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="finish", controller="hang", trainer_0="hang", reward_0="hang")
    async with running(one, others_end_s=0.5) as supervisor:
        (one.directory / "go").touch()
        assert (await death_in(supervisor)).startswith("engine-0 ended with exit code 0")
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_grandchildren_of_a_killed_engine_host_are_swept(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="orphan")
    async with running(one) as supervisor:
        grandchildren = [int((one.directory / "pids" / f"grandchild-{i}").read_text()) for i in (0, 1)]
        os.kill(one.pid("engine-0"), signal.SIGKILL)
        await until(lambda: not lives(one.pid("engine-0")))
        assert all(lives(pid) for pid in grandchildren)  # they do outlive it: the sweep has work to do
        assert (await death_in(supervisor)).startswith("engine-0 was killed by SIGKILL")
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_killing_a_resource_tracker_ends_the_run_and_its_shared_memory(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="orphan")
    async with running(one) as supervisor, anyio.create_task_group() as tasks:

        async def kill_tracker() -> None:
            await until(lambda: bool(supervisor.memory.trackers))
            next(iter(supervisor.memory.trackers)).kill()

        tasks.start_soon(kill_tracker)
        text = await death_in(supervisor)
    assert text.startswith("the multiprocessing resource tracker of engine-0 ")
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_session_killed_whole_leaves_no_shared_memory(trial: Callable[..., Trial]) -> None:
    """As the kernel does to a control group that is out of memory: the resource tracker dies with its users."""
    one = trial(engine_0="orphan")
    async with running(one) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(kill_session, one, supervisor)
        text = await death_in(supervisor)
    assert text.startswith("engine-0 was killed by SIGKILL")
    one.assert_nothing_left()


PARENT = """
import sys
from pathlib import Path
import anyio
sys.path.insert(0, sys.argv[1])
from test_supervisor import Trial
one = Trial.__new__(Trial)
one.directory, one.sockets = Path(sys.argv[2]) / "run", Path(sys.argv[2]) / "sockets"

async def run():
    async with one.supervisor() as supervisor:
        await supervisor.watch()

anyio.run(run)
"""


@contextlib.asynccontextmanager
async def parent_process(one: Trial) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The supervisor in a process of its own, as a user's command is."""
    arguments = [sys.executable, "-c", PARENT, str(STAND_IN.parent), str(one.directory.parent)]
    with subprocess.Popen(arguments) as process:  # noqa: ASYNC220
        try:
            await until(one.all_started)
            yield process
        finally:
            process.kill()


@pytest.mark.asyncio
async def test_nothing_outlives_a_killed_supervisor(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="orphan", trainer_0="hang")
    async with parent_process(one) as process:
        process.kill()
        process.wait()
        await until(lambda: one.left() == [], within_s=ENDS_WITHIN_S)
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_drain_that_hangs_can_be_cut_short(trial: Callable[..., Trial]) -> None:
    """What the second Ctrl-C does: ``kill`` while another task watches; the watch ends and blames nobody."""
    one = trial(controller="hang")
    async with running(one) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        supervisor.request_drain()
        await until((one.directory / "ignored-sigterm").exists)  # the order to drain arrived, and changes nothing
        assert lives(one.pid("controller"))
        with anyio.fail_after(ENDS_WITHIN_S):
            await supervisor.kill()
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_cancelling_the_run_leaves_nothing(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="orphan")
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            async with one.supervisor() as supervisor:
                await supervisor.watch()

        tasks.start_soon(run)
        await until(one.all_started)
        tasks.cancel_scope.cancel()
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_who_is_killed_by_the_end_while_the_watch_looks_elsewhere_is_no_cause(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    async with running(one) as supervisor:
        monkeypatch.setattr(supervisor, "_start_core_again", supervisor.kill)
        await supervisor.watch()
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_an_engine_may_be_stopped_and_started_while_the_run_goes_on(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="orphan", controller="finish")
    async with running(one) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)  # raises when it takes one of these ends for a death
        grandchild = int((one.directory / "pids" / "grandchild-0").read_text())
        with pytest.raises(StreamRLError, match="engine-0 was not stopped"):
            supervisor.start_engine("engine-0")
        with pytest.raises(StreamRLError, match="trainer-0 is no engine of this host; it has engine-0"):
            await supervisor.stop_engine("trainer-0")
        await supervisor.stop_engine("engine-0")
        assert not lives(one.pid("engine-0")) and not lives(grandchild), "with what it had started"
        assert lives(one.pid("trainer-0"))
        (one.directory / "behaviour" / "engine-0").write_text("serve")
        supervisor.start_engine("engine-0")
        await until(lambda: (one.directory / "pids" / "engine-0.1").exists())
        await supervisor.stop_engine("engine-0")  # and once more
        supervisor.start_engine("engine-0")
        await until(lambda: (one.directory / "pids" / "engine-0.2").exists())
        (one.directory / "go").touch()  # the run ends well, and the watch with it
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_an_engine_of_a_set_that_does_not_serve_is_started_when_it_does(trial: Callable[..., Trial]) -> None:
    one = trial(controller="finish")
    (one.directory / "behaviour" / "engine-1").write_text("serve")
    resting = ProcessPlan(role=Role.ENGINE, index=1, resting=True)
    async with running(one, more=(resting,)) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        started = one.directory / "pids" / "engine-1.0"
        assert not (one.directory / "logs" / "engine-1.log").exists(), "there is one from the moment of its start"
        await supervisor.stop_engine("engine-1")  # there is nothing to be ended
        await supervisor.stop_engine("engine-0")
        assert not started.exists()
        supervisor.start_engine("engine-1")
        await until(started.exists)
        await supervisor.stop_engine("engine-1")
        supervisor.start_engine("engine-0")
        await until(lambda: (one.directory / "pids" / "engine-0.1").exists())
        (one.directory / "go").touch()
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_the_death_of_an_engine_that_was_started_again_is_a_death(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with running(one) as supervisor:
        await supervisor.stop_engine("engine-0")
        supervisor.start_engine("engine-0")
        await until(lambda: (one.directory / "pids" / "engine-0.1").exists())
        os.kill(one.pid("engine-0", start=1), signal.SIGKILL)
        assert (await death_in(supervisor)).startswith("engine-0 was killed by SIGKILL")
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_stopped_engine_has_time_to_end_by_itself(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="leave")
    async with running(one) as supervisor:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(partial(supervisor.stop_engine, "engine-0", patience_s=20))
                await anyio.lowlevel.checkpoint()
                (one.directory / "leave").touch()
        assert not lives(one.pid("engine-0")) and not (one.directory / "was-terminated").exists()
        await supervisor.stop_engine("engine-0")  # told again: nothing is left to end
        supervisor.start_engine("engine-0")
        await until(lambda: (one.directory / "pids" / "engine-0.1").exists())
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_an_engine_that_was_dead_before_it_should_stop_is_a_death(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with running(one) as supervisor:
        os.kill(one.pid("engine-0"), signal.SIGKILL)
        await until(lambda: not lives(one.pid("engine-0")))
        await supervisor.stop_engine("engine-0")
        assert (await death_in(supervisor)).startswith("engine-0 was killed by SIGKILL")
    one.assert_nothing_left()


@pytest.mark.asyncio
async def test_a_run_may_end_while_an_engine_is_stopped_or_starts(trial: Callable[..., Trial]) -> None:
    one = trial(controller="finish")
    async with running(one) as supervisor:
        await supervisor.stop_engine("engine-0")
        supervisor.start_engine("engine-0")
        await supervisor.stop_engine("engine-0")  # at once, before it did anything
        (one.directory / "go").touch()
        with anyio.fail_after(ENDS_WITHIN_S):
            await supervisor.watch()
    await supervisor.stop_engine("engine-0")  # an order that arrives after the end is for nobody
    supervisor.start_engine("engine-0")
    one.assert_nothing_left()
