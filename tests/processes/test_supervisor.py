"""The supervisor with real processes: whatever is killed, the run ends or goes on, says why, and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

import anyio
import msgspec
import pytest

from streamrl.processes import supervisor as supervisor_module
from streamrl.processes.clean_up import remove_killed_life
from streamrl.processes.supervisor import Supervisor
from streamrl.recipe.topology import ProcessPlan, Role
from tests.processes.trials import NAMES, STAND_IN, Trial, death_in, drain, lives, surviving, until


@contextlib.asynccontextmanager
async def running(one: Trial, **options: float) -> AsyncIterator[Supervisor]:
    async with one.supervisor(**options) as supervisor:
        await until(one.all_started)
        yield supervisor


@pytest.mark.parametrize("victim", NAMES)
async def test_killing_any_process_ends_a_run_without_restarts(trial: Callable[..., Trial], victim: str) -> None:
    """The death of any process ends a run without restarts, which names it."""
    one = trial()
    async with running(one) as supervisor:
        os.kill(one.pid(victim), signal.SIGKILL)
        first, *rest = (await death_in(supervisor)).splitlines()
    assert first == f"{victim} was killed by SIGKILL"
    assert f"last lines of {one.directory}/logs/{victim}.log:" in rest
    assert f"  {victim} does serve" in rest
    one.assert_nothing_left()


async def test_a_consequence_never_masks_the_cause(trial: Callable[..., Trial]) -> None:
    one = trial(controller="follow", trainer_0="follow", reward_0="follow")
    (one.directory / "follow").write_text(str(os.getpid()))
    async with running(one) as supervisor:
        partial = one.directory / "follow.partial"
        partial.write_text(str(one.pid("engine-0")))
        partial.rename(one.directory / "follow")
        os.kill(one.pid("engine-0"), signal.SIGKILL)
        # Everyone who follows has ended, and said so, before the supervisor looks for the first time.
        await until(lambda: len(list((one.directory / "exit").glob("*.json"))) == 3)
        first, second, *_ = (await death_in(supervisor)).splitlines()
    assert first == "engine-0 was killed by SIGKILL"
    assert second == "(after it: controller, reward-0, trainer-0)"
    one.assert_nothing_left()


async def test_a_consequence_seen_first_waits_for_its_cause(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "CONSEQUENCE_S", 300.0)
    one = trial(controller="follow", trainer_0="raise")
    (one.directory / "follow").write_text(str(2**22 + 1))  # nobody: the controller ends with StreamBroken at once
    async with one.supervisor() as supervisor, anyio.create_task_group() as tasks:
        await until((one.directory / "exit" / "controller.json").exists)

        async def fail_late() -> None:
            await anyio.sleep(0.5)  # the trainer's failure shows only now
            one.go()

        tasks.start_soon(fail_late)
        text = await death_in(supervisor)
    assert text.startswith("trainer-0 ended with exit code 1: ValueError: the loss is not finite")
    one.assert_nothing_left()


async def test_a_run_that_finishes(trial: Callable[..., Trial]) -> None:
    one = trial(controller="finish")
    async with running(one) as supervisor:
        one.go()
        await supervisor.watch()
        assert all(not lives(pid) for pid in one.pids())  # they ended by themselves
    one.assert_nothing_left()


async def test_sigterm_drains(trial: Callable[..., Trial]) -> None:
    one = trial()
    async with running(one) as supervisor:
        await drain(supervisor)
        assert (one.directory / "end").exists()  # the controller ended the others, not a signal
    assert list((one.directory / "exit").iterdir()) == []
    one.assert_nothing_left()


async def test_a_drain_that_hangs_is_ended_at_its_deadline(trial: Callable[..., Trial]) -> None:
    one = trial(controller="hang", engine_0="hang")
    async with running(one) as supervisor:
        began = time.monotonic()
        await drain(supervisor, deadline_s=0.5)
        assert time.monotonic() - began > 0.5
    one.assert_nothing_left()


async def test_a_drain_that_hangs_can_be_cut_short(trial: Callable[..., Trial]) -> None:
    """What the second Ctrl-C does: ``kill`` while another task watches; the watch ends and blames nobody."""
    one = trial(controller="hang")
    async with running(one) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        supervisor.request_drain()
        await until((one.directory / "ignored-sigterm").exists)  # the order to drain arrived, and changes nothing
        assert lives(one.pid("controller"))
        await supervisor.kill()
    one.assert_nothing_left()


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


async def test_a_part_that_ends_well_while_the_run_goes_on(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="finish", controller="hang", trainer_0="hang", reward_0="hang")
    async with running(one, others_end_s=0.5) as supervisor:
        one.go()
        assert (await death_in(supervisor)).startswith("engine-0 ended with exit code 0")
    one.assert_nothing_left()


async def test_deaths_after_the_controllers_end_are_logged(
    trial: Callable[..., Trial], caplog: pytest.LogCaptureFixture
) -> None:
    """After the last message of the controller a death is only logged."""
    one = trial(trainer_0="raise")
    async with surviving(one, resumes=3) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        supervisor.run_finished()
        one.go()
        await until(lambda: (one.directory / "exit" / "trainer-0.json").exists())
        one.go("end")  # the others end, and the controller with them
    assert "after the run had finished, trainer-0 ended with exit code 1" in caplog.text
    assert not one.started("trainer-0", 1)
    one.assert_nothing_left()


# ---- orphans ---------------------------------------------------------------------------------------


async def test_leftovers_of_a_killed_process_are_removed(trial: Callable[..., Trial]) -> None:
    """Children and shared memory of a killed process are removed."""
    one = trial(engine_0="orphan")
    async with running(one) as supervisor:
        os.kill(one.pid("engine-0"), signal.SIGKILL)
        await until(lambda: not lives(one.pid("engine-0")))
        assert all(lives(pid) for pid in one.grandchildren())  # they do outlive it: there is something to end
        assert (await death_in(supervisor)).startswith("engine-0 was killed by SIGKILL")
    one.assert_nothing_left()


async def test_children_of_the_user_s_program_are_left_alone(trial: Callable[..., Trial]) -> None:
    one = trial(engine_0="orphan")
    own = await anyio.open_process(["sleep", "600"], start_new_session=True)
    async with surviving(one, alone=1) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.watch)
        os.kill(one.pid("engine-0"), signal.SIGKILL)
        await until(lambda: one.started("engine-0", 1))
        await supervisor.kill()
    assert own.returncode is None and lives(own.pid)
    own.kill()
    await own.aclose()
    one.assert_nothing_left()


PARENT = """
import sys
from pathlib import Path
import anyio
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from tests.processes.trials import Trial
one = Trial.__new__(Trial)
one.directory, one.sockets = Path(sys.argv[2]) / "run", Path(sys.argv[2]) / "streamrl-sockets"

async def run():
    async with one.supervisor() as supervisor:
        await supervisor.watch()

anyio.run(run)
"""


async def test_a_killed_supervisor_leaves_only_resumable_files(trial: Callable[..., Trial]) -> None:
    """Nothing outlives a killed supervisor, except files that a resume removes."""
    one = trial(engine_0="orphan", trainer_0="hang")
    arguments = [sys.executable, "-c", PARENT, str(STAND_IN.parents[2]), str(one.directory.parent)]
    with subprocess.Popen(arguments) as process:  # noqa: ASYNC220
        await until(one.all_started)
        process.kill()
        process.wait()
        await until(lambda: not any(lives(one.pid(name)) for name in NAMES))
        # Programs that a user's code had started know nothing of PR_SET_PDEATHSIG: here they ignore all signals.
        assert all(lives(pid) for pid in one.grandchildren()) and one.sockets.exists()
        assert remove_killed_life(one.directory) == []
        await until(lambda: one.left() == [])


async def test_another_user_s_directory_is_left_alone(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial()
    supervisor = one.supervisor()
    one.sockets.mkdir()
    (one.directory / "topology.json").write_bytes(msgspec.json.encode(supervisor.topology))
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 4711)
        remove_killed_life(one.directory)
    assert one.sockets.exists()
    remove_killed_life(one.directory)
    assert not one.sockets.exists()


async def test_a_run_killed_at_once_ends_by_the_first_cause(trial: Callable[..., Trial]) -> None:
    """A run whose processes are all killed at once ends with the first cause."""
    one = trial(engine_0="orphan")
    other = ProcessPlan(role=Role.ENGINE, index=1)
    async with surviving(one, other) as supervisor:
        for name in (*NAMES, "engine-1"):
            os.kill(one.pid(name), signal.SIGKILL)
        assert "was killed by SIGKILL" in await death_in(supervisor)
    one.assert_nothing_left()
