"""What the run knows of its processes while it goes on: sessions, trackers of shared memory, ends that take long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
from trials import PLANS, STAND_IN, Trial, lives, until

from streamrl.plan.topology import Topology
from streamrl.plan.used_memory import UsedMemory
from streamrl.supervise.child_process import ChildProcess
from streamrl.supervise.guardian import Ended
from streamrl.supervise.supervisor import Supervisor
from streamrl.supervise.sweep import (
    TRACES_FILE,
    RunTraces,
    as_argument,
    end_session,
    keep_traces,
    members,
    seconds_after_boot,
)

LEADER_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
TRACKED = """
import subprocess, sys
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
print(resource_tracker._resource_tracker._pid, flush=True)
sys.stdin.readline()
"""

MAPPED = """
import mmap, os, time
with open(f"/dev/shm/psm_guarded_{os.getpid()}", "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
time.sleep(600)
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], RunTraces]]]:
    begun: list[subprocess.Popen[str]] = []

    def one(program: str) -> tuple[subprocess.Popen[str], RunTraces]:
        """A process that leads a session of a run."""
        command = [sys.executable, "-c", program]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, start_new_session=True, text=True, stdin=pipe, stdout=pipe)
        begun.append(process)
        created = seconds_after_boot(psutil.Process(process.pid))
        return process, RunTraces(
            marker="of-nobody", since=0.0, socket_directory=str(tmp_path), sessions={process.pid: created}
        )

    yield one
    for process in begun:
        process.kill()
        process.communicate()


def test_a_process_whose_first_thread_has_ended_is_alive(
    begin: Callable[[str], tuple[subprocess.Popen[str], RunTraces]],
) -> None:
    process, run = begin(LEADER_ENDS)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    seen = psutil.Process(process.pid)
    while seen.status() != psutil.STATUS_ZOMBIE:
        pass
    assert [member.pid for member in members(run)] == [process.pid], "its other thread holds all that it has"
    assert end_session(run, process.pid) == []
    assert members(run) == []


def test_a_process_that_the_kernel_does_not_let_go_is_left(tmp_path: Path) -> None:
    class Held(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)

    process = Held([sys.executable, "-c", ""])
    ChildProcess("engine-0", PLANS[2], process, tmp_path / "log", 0).close()
    super(Held, process).wait()


def test_a_tracker_that_ended_with_its_user_is_no_loss_and_one_that_was_killed_is(
    begin: Callable[[str], tuple[subprocess.Popen[str], RunTraces]],
) -> None:
    for killed in (False, True):
        process, run = begin(TRACKED)
        assert process.stdout is not None and process.stdin is not None
        tracker = psutil.Process(int(process.stdout.readline()))
        memory = UsedMemory(run)
        memory.record({process.pid: "reward-0"})
        assert list(memory.trackers) == [tracker] and memory.gone() == []
        if killed:
            tracker.kill()
        else:
            process.stdin.write("end\n")
            process.stdin.flush()
            process.wait()
        while tracker.is_running() and tracker.status() != psutil.STATUS_ZOMBIE:
            pass
        assert [owner for _, owner in memory.gone()] == ["reward-0"] * killed


def test_shared_memory_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    there, gone = f"/dev/shm/psm_there_{os.getpid()}", f"/dev/shm/psm_gone_{os.getpid()}"
    Path(there).touch()
    run = RunTraces(marker="of-nobody", since=0.0, socket_directory=str(tmp_path), segments={there, gone})
    try:
        keep_traces(run)
        UsedMemory(run).record({})
    finally:
        Path(there).unlink()
    assert msgspec.json.decode((tmp_path / TRACES_FILE).read_bytes(), type=RunTraces).segments == {there}


def guarding(run: RunTraces, *, supervisor: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "streamrl.supervise.guardian", as_argument(run), str(supervisor)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


@pytest.mark.parametrize("ended", [False, True])
def test_a_guardian_ends_no_session_whose_number_may_be_somebody_else_s(
    begin: Callable[[str], tuple[subprocess.Popen[str], RunTraces]], ended: bool
) -> None:
    process, run = begin(TRACKED)  # without the marker
    with guarding(run, supervisor=os.getpid()) as guardian:
        assert guardian.stdin is not None
        guardian.stdin.write(msgspec.json.encode(Ended(sid=process.pid)) + b"\n" if ended else b"")
        guardian.stdin.close()
        assert guardian.wait(20) == 0
    assert lives(process.pid) is ended


def test_a_guardian_whose_supervisor_died_before_it_looked_ends_what_is_left(
    begin: Callable[[str], tuple[subprocess.Popen[str], RunTraces]],
) -> None:
    process, run = begin(TRACKED)
    with guarding(run, supervisor=process.pid) as guardian:  # it is not its child
        assert guardian.wait(20) == 0
    assert not lives(process.pid)


@pytest.mark.parametrize("kept", [False, True])
def test_a_guardian_unlinks_what_the_run_used_and_nothing_where_it_cannot_know(
    begin: Callable[[str], tuple[subprocess.Popen[str], RunTraces]], kept: bool
) -> None:
    process, run = begin(MAPPED)
    path = Path(f"/dev/shm/psm_guarded_{process.pid}")
    assert process.stdout is not None and process.stdout.readline() == "mapped\n"
    try:
        if kept:
            keep_traces(run)
        with guarding(run, supervisor=process.pid) as guardian:  # it is not its child
            assert guardian.wait(20) == 0
        assert path.exists() is not kept
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.asyncio
async def test_a_guardian_knows_more_than_fits_into_an_argument_and_ends_it_all(trial: Callable[..., Trial]) -> None:
    one = trial()
    plans = tuple(msgspec.structs.replace(plan, restarts=1) for plan in PLANS)
    topology = Topology(processes=plans, endpoints={})
    supervisor = Supervisor(topology, one.directory, one.sockets, entry=(str(STAND_IN),))
    supervisor._traces.foreign |= {f"/dev/shm/psm_of_somebody_else_{number:08}" for number in range(100_000)}
    async with supervisor:
        await until(one.all_started)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.watch)
            first = one.pid("engine-0")
            os.kill(first, signal.SIGKILL)
            await until(lambda: (one.directory / "pids" / "engine-0.1").exists())
            assert first not in supervisor._traces.sessions, "its number may be somebody else's soon"
            tasks.cancel_scope.cancel()
        guardian = supervisor._guarded.guardian
        assert guardian is not None and guardian.process.stdin is not None
        guardian.process.stdin.close()  # as if the supervisor was gone
        await until(lambda: not guardian.running)
        assert not any(lives(pid) for pid in one.pids())
        await supervisor.kill()
    one.assert_nothing_left()
