"""Ending what is left of a run, with real processes in states that are rare in a whole run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
from trials import Trial, death_in, kill_session

from streamrl.engines.process_watch import ProcessWatch
from streamrl.supervise import sweep as sweeping
from streamrl.supervise.parent_death import RUN_MARKER
from streamrl.supervise.sweep import (
    TRACES_FILE,
    RunTraces,
    end_session,
    keep_traces,
    present_segments,
    seconds_after_boot,
    sweep,
)

MARKER = "the-run"
SLEEP = """
import mmap, os, time
maps = []
for path in filter(None, os.environ.get("SHARED", "").split(",")):
    with open(path, "a+b") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
print("ready", flush=True)
time.sleep(600)
"""
Start = Callable[..., psutil.Process]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def one(**environment: str) -> psutil.Process:
        """A process in a session of its own."""
        command = [sys.executable, "-c", SLEEP]
        started.append(
            subprocess.Popen(command, env=os.environ | environment, start_new_session=True, stdout=subprocess.PIPE)
        )
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == b"ready\n"
        return psutil.Process(started[-1].pid)

    yield one
    for process in started:
        process.kill()
        process.communicate()


def traces(
    tmp_path: Path,
    *,
    since: float | None = None,
    sessions: dict[int, float] | None = None,
    foreign: set[str] | None = None,
) -> RunTraces:
    return RunTraces(
        marker=MARKER,
        since=time.time() if since is None else since,
        socket_directory=str(tmp_path / "sockets"),
        sessions=sessions or {},
        foreign=foreign or set(),
    )


def lives(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def test_sweep_waits_for_a_process_that_is_ending(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes the memory of a killed process first, its environment with it, and the rest when it gets to
    it: until then the process may hold a port, a lock, or an accelerator's memory."""
    process = start(**{RUN_MARKER: MARKER})
    killers: list[threading.Timer] = []
    read_environment = psutil.Process.environ

    def kill_slowly(victim: psutil.Process) -> None:
        if not killers:
            killers.append(threading.Timer(0.3, victim.kill))
            killers[0].start()

    def environment_while_alive(self: psutil.Process) -> dict[str, str]:
        if killers:
            raise psutil.NoSuchProcess(self.pid)  # the kernel says ESRCH
        return dict(read_environment(self))

    monkeypatch.setattr(sweeping, "_kill", kill_slowly)
    monkeypatch.setattr(psutil.Process, "environ", environment_while_alive)
    assert sweep(traces(tmp_path)) == []
    assert not lives(process)


def test_sweep_finds_everything_after_the_clock_was_set(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil tells creation times by today's clock: those of one process change when it is set."""
    of_a_session, marked = start(), start(**{RUN_MARKER: MARKER})
    run = traces(tmp_path, sessions={of_a_session.pid: seconds_after_boot(of_a_session)})
    boot_time = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time - 3600.0)  # it was an hour fast
    assert psutil.Process(marked.pid).create_time() < run.since - 3000
    assert sweep(run) == []
    assert not lives(of_a_session) and not lives(marked)


def test_sweep_spares_a_session_whose_number_was_given_away(start: Start, tmp_path: Path) -> None:
    stranger = start()
    earlier = seconds_after_boot(stranger) - 5.0
    assert sweep(traces(tmp_path, sessions={stranger.pid: earlier})) == []
    assert lives(stranger)


@pytest.fixture
def segments() -> Iterator[list[Path]]:
    """Shared memory as the workers of an engine make it: of two engines, and one that both share with a user."""
    names = ("vllm_dist_one", "vllm_dist_two", "of-a-user")
    paths = [Path(f"/dev/shm/{name}-{os.getpid()}") for name in names]
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def test_the_shared_memory_of_an_engine_goes_with_its_session(
    start: Start, tmp_path: Path, segments: list[Path]
) -> None:
    first, second, users = segments
    stopped, other = start(SHARED=f"{first},{users}"), start(SHARED=f"{second},{users}")
    run = traces(tmp_path, sessions={p.pid: seconds_after_boot(p) for p in (stopped, other)})
    assert end_session(run, stopped.pid) == []
    assert not lives(stopped) and lives(other)
    assert [path.exists() for path in segments] == [False, True, True]
    other.kill()
    other.wait()
    assert sweep(run) == []
    assert [path.exists() for path in segments] == [False, False, True], "it was seen in use, and a user's never goes"


@pytest.mark.parametrize("how", ["session", "sweep"])
def test_shared_memory_is_seen_after_the_clock_was_set_back(
    start: Start, tmp_path: Path, segments: list[Path], how: str
) -> None:
    """The run began when the clock was an hour fast: what it made since is older than it is."""
    first, _, users = segments
    process = start(SHARED=f"{first},{users}")
    run = traces(tmp_path, since=time.time() + 3600, sessions={process.pid: seconds_after_boot(process)})
    assert (end_session(run, process.pid) if how == "session" else sweep(run)) == []
    assert [first.exists(), users.exists()] == [False, True]


@pytest.mark.parametrize("how", ["session", "sweep"])
def test_shared_memory_that_was_there_before_the_run_stays(
    start: Start, tmp_path: Path, segments: list[Path], how: str
) -> None:
    """A reward may map what another program of this user made, under any name."""
    first, second, users = segments
    first.write_bytes(b"another program's")
    before = present_segments()
    process = start(SHARED=f"{first},{second},{users}")
    run = traces(tmp_path, sessions={process.pid: seconds_after_boot(process)}, foreign=before)
    assert (end_session(run, process.pid) if how == "session" else sweep(run)) == []
    assert [path.exists() for path in segments] == [True, False, True]


def test_an_engine_host_removes_what_its_workers_shared(start: Start, segments: list[Path]) -> None:
    worker = start(SHARED=",".join(map(str, segments)))
    processes = ProcessWatch()
    assert worker.pid in processes.pids.values()
    processes.end_all()
    assert not lives(worker)
    assert [path.exists() for path in segments] == [False, False, True]


@pytest.mark.parametrize("removals", range(4))
def test_a_sweep_that_is_killed_leaves_by_what_the_rest_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    class Killed(BaseException):
        pass

    def one_more(path: Path, *_: object, **__: object) -> None:
        if len(removed) == removals:
            raise Killed
        removed.append(path.name)
        unlink(path)

    removed: list[str] = []
    unlink = Path.unlink
    run = traces(tmp_path)
    Path(run.socket_directory).mkdir(parents=True)
    for name in ("a", TRACES_FILE, "t", "z"):
        (Path(run.socket_directory) / name).touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", one_more)
        with pytest.raises(Killed) if removals < 3 else contextlib.nullcontext():
            sweep(run)
    assert len(removed) == removals and TRACES_FILE not in removed
    assert (Path(run.socket_directory) / TRACES_FILE).exists() is (removals < 3)


# ---- where what is left cannot be recorded ----------------------------------------------------------

PARTIAL = f".{TRACES_FILE}.partial"


@pytest.mark.asyncio
async def test_a_full_disk_ends_neither_a_run_nor_its_end(
    trial: Callable[..., Trial], caplog: pytest.LogCaptureFixture
) -> None:
    one = trial(engine_0="orphan")
    one.sockets.mkdir()
    (one.sockets / PARTIAL).symlink_to("/dev/full")
    async with one.supervisor() as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(kill_session, one, supervisor)
        text = await death_in(supervisor)
    assert text.startswith("engine-0 was killed by SIGKILL")
    one.assert_nothing_left()
    told = [record.getMessage() for record in caplog.records if "No space left on device" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"{one.sockets / TRACES_FILE} cannot be written ([Errno 28] No space left on device): ")


def test_a_record_that_failed_is_made_once_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = traces(tmp_path)
    folder = Path(run.socket_directory)
    folder.mkdir()
    for _ in range(2):
        (folder / PARTIAL).symlink_to("/dev/full")
        for _ in range(3):
            keep_traces(run)
        (folder / PARTIAL).unlink()
        run.segments.add(f"/dev/shm/psm_{len(run.segments)}")
        keep_traces(run)
        assert msgspec.json.decode((folder / TRACES_FILE).read_bytes(), type=RunTraces) == run
        run.segments.add(f"/dev/shm/psm_{len(run.segments)}")
    assert len(caplog.records) == 2, "once each time"


@pytest.mark.parametrize("how", ["session", "sweep"])
def test_nothing_waits_for_a_disk_before_it_is_killed(start: Start, tmp_path: Path, how: str) -> None:
    """A network's disk may hang: here whoever opens the file waits until somebody reads it."""
    process = start(**{RUN_MARKER: MARKER})
    run = traces(tmp_path, sessions={process.pid: seconds_after_boot(process)})
    Path(run.socket_directory).mkdir()
    pipe = Path(run.socket_directory) / PARTIAL
    os.mkfifo(pipe)
    ends = threading.Thread(
        target=lambda: end_session(run, process.pid) if how == "session" else sweep(run), daemon=True
    )
    ends.start()
    deadline = time.monotonic() + 20.0
    while lives(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    killed = not lives(process)
    pipe = pipe.rename(tmp_path / "pipe")  # it is waited for once only
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ends.join(20.0)
    os.close(reader)
    assert killed and not ends.is_alive()
