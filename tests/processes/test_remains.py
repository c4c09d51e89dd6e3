"""``streamrl clean``: what is left when a run is killed together with everything that cleans up after it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_supervisor import STAND_IN, Trial, lives

import streamrl.cli
from streamrl.processes import remains
from streamrl.processes.parent_death import RUN_MARKER
from streamrl.processes.remains import find_remains
from streamrl.processes.run_lock import LOCK_FILE, RunLock
from streamrl.processes.sweep import TRACES_FILE, RunTraces, keep_traces

PARENT = """
import sys
from pathlib import Path
import anyio
sys.path.insert(0, sys.argv[1])
from test_supervisor import Trial
one = Trial.__new__(Trial)
one.directory, one.sockets = Path(sys.argv[2]) / "run", Path(sys.argv[2]) / "streamrl-abcdefgh"

async def run():
    async with one.supervisor() as supervisor:
        await supervisor.watch()

anyio.run(run)
"""


@pytest.fixture(autouse=True)
def own_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other runs of this machine are none of the test's: only processes that it marked itself are there."""
    everybody = remains.marked_processes

    def ours() -> Iterator[psutil.Process]:
        for one in everybody():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                if one.environ().get(RUN_MARKER, "").startswith("w-test"):
                    yield one

    monkeypatch.setattr(remains, "marked_processes", ours)


def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def living_run(tmp_path: Path) -> Iterator[tuple[Trial, subprocess.Popen[bytes]]]:
    """A supervisor in a process of its own, with stand-ins, one of which has shared memory and grandchildren that
    outlive it."""
    one = Trial(tmp_path, {"engine-0": "orphan"})
    one.sockets = tmp_path / "streamrl-abcdefgh"
    (one.directory / "recipe.toml").write_text("")
    with subprocess.Popen([sys.executable, "-c", PARENT, str(STAND_IN.parent), str(tmp_path)]) as process:
        try:
            until(one.all_started)
            yield one, process
        finally:
            process.kill()
            for pid in [*one.pids(), *(guardian.pid for guardian in one.guardians())]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_nothing_is_left_of_a_run_whose_supervisor_and_guardian_were_killed_in_one_go(
    living_run: tuple[Trial, subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, supervisor = living_run
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    [guardian] = one.guardians()
    until(lambda: b"psm_" in (one.sockets / TRACES_FILE).read_bytes())  # the supervisor has seen the memory in use
    assert streamrl.cli.main(["clean", str(one.directory)]) == 0
    assert f"left alone: process {supervisor.pid} runs {one.directory}" in capsys.readouterr().out
    assert all(lives(pid) for pid in one.pids()), "a living run is not touched"
    for pid in (supervisor.pid, guardian.pid):
        os.kill(pid, signal.SIGSTOP)
    for pid in (supervisor.pid, guardian.pid):
        os.kill(pid, signal.SIGKILL)
    supervisor.wait()
    until(lambda: not any(lives(one.pid(name)) for name in ("controller", "engine-0", "reward-0", "trainer-0")))
    left = one.left()
    assert len([text for text in left if text.startswith("pid ")]) == 2, "both grandchildren outlive everything"
    assert len([text for text in left if text.startswith("/dev/shm/")]) == 2
    assert streamrl.cli.main(["clean", "--dry-run", str(one.directory)]) == 0
    told = capsys.readouterr().out
    assert "would remove run run:" in told and one.left() == left
    assert streamrl.cli.main(["clean", str(one.directory)]) == 0
    said = capsys.readouterr().out
    grandchildren = [(one.directory / "pids" / f"grandchild-{i}").read_text() for i in (0, 1)]
    assert all(f"process {pid} " in said for pid in grandchildren) and said.count("shared memory /dev/shm/psm_") == 2
    one.assert_nothing_left()
    assert streamrl.cli.main(["clean", str(one.directory)]) == 0
    assert "nothing is left" in capsys.readouterr().out


@pytest.fixture
def marked() -> Iterator[Callable[..., psutil.Process]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> psutil.Process:
        command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return psutil.Process(process.pid)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_marked_process_without_supervisor_is_found_without_traces(
    marked: Callable[..., psutil.Process], tmp_path: Path
) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    orphan = marked(STREAMRL_RUN_MARKER="w-test-orphan", STREAMRL_PARENT_PID=gone.stdout.decode().strip())
    child = marked(STREAMRL_RUN_MARKER="w-test-child", STREAMRL_PARENT_PID=str(os.getpid()))
    found = find_remains(tmp_path, ())
    mine = [one for one in found.left if f"process {orphan.pid} " in one.what]
    assert len(mine) == 1 and not any(f"process {child.pid} " in one.what for one in found.left)
    assert mine[0].remove() == ""
    assert not lives(orphan.pid) and lives(child.pid)


def test_one_member_that_knows_of_a_living_supervisor_saves_all(
    marked: Callable[..., psutil.Process], tmp_path: Path
) -> None:
    """A reward's own processes have the marker and nothing else in their environment."""
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    dead = gone.stdout.decode().strip()
    bare = marked(STREAMRL_RUN_MARKER="w-test-bare")
    assert find_remains(tmp_path, ()).left == [], "it names no supervisor"
    marked(STREAMRL_RUN_MARKER="w-test-bare", STREAMRL_PARENT_PID=dead)
    assert f"process {bare.pid} " in find_remains(tmp_path, ()).left[0].what
    marked(STREAMRL_RUN_MARKER="w-test-bare", STREAMRL_PARENT_PID=str(os.getpid()))
    assert find_remains(tmp_path, ()).left == []
    folder = tmp_path / "elsewhere" / "streamrl-abcdefgh"  # where this test does not look for traces
    folder.mkdir(parents=True)
    marked(STREAMRL_RUN_MARKER="w-test-kept", STREAMRL_PARENT_PID=dead, TMPDIR=str(folder))
    assert len(find_remains(tmp_path, ()).left) == 1
    keep_traces(RunTraces(marker="w-test-kept", since=time.time(), socket_directory=str(folder)))
    assert find_remains(tmp_path, ()).left == [], "its supervisor is this process, whatever the variable says"


def test_a_supervisor_whose_number_another_process_has_is_dead(
    marked: Callable[..., psutil.Process], tmp_path: Path
) -> None:
    orphan = marked(STREAMRL_RUN_MARKER="w-test-reused")
    folder = tmp_path / "streamrl-abcdefgh"
    folder.mkdir()
    traces = RunTraces(marker="w-test-reused", since=time.time(), socket_directory=str(folder))
    keep_traces(traces)
    assert find_remains(tmp_path, ()).left == [], "this process is the supervisor, and lives"
    keep_traces(msgspec.structs.replace(traces, owner_created=traces.owner_created - 100))
    [dead] = find_remains(tmp_path, ()).left
    assert f"process {orphan.pid} " in dead.what
    assert dead.remove() == "" and not lives(orphan.pid) and not folder.exists()


def test_what_cannot_be_judged_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "streamrl-abcdefgh"
    folder.mkdir()
    traces = RunTraces(marker="w-test-elsewhere", since=0.0, socket_directory=str(folder), owner=2**22 + 1)
    keep_traces(msgspec.structs.replace(traces, namespace=traces.namespace + 1))
    found = find_remains(tmp_path, ())
    assert not found.left and "another container" in found.skipped[0]
    keep_traces(msgspec.structs.replace(traces, socket_directory=str(folder)))
    assert len(find_remains(tmp_path, ()).left) == 1
    moved = folder.rename(tmp_path / "streamrl-hgfedcba")  # what it says is about another place
    assert not find_remains(tmp_path, ()).left
    (moved / TRACES_FILE).write_bytes(b"{not json")
    assert not find_remains(tmp_path, ()).left
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert not find_remains(tmp_path, ()).left, "another user's"


def test_socket_directories_without_traces_go_when_nobody_uses_them(tmp_path: Path) -> None:
    folder = tmp_path / "streamrl-abcdefgh"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "controller.steps"))
        assert not find_remains(tmp_path, (), now=time.time() + 100).left, "somebody listens there"
    assert not find_remains(tmp_path, ()).left, "a run may be starting"
    (folder / "notes").write_text("a person's")
    assert not find_remains(tmp_path, (), now=time.time() + 100).left
    (folder / "notes").unlink()
    pictures = tmp_path / "streamrl-simulate-abcdefgh"
    pictures.mkdir()
    [left] = find_remains(tmp_path, (), now=time.time() + 100).left
    assert left.remove() == "" and not folder.exists() and pictures.exists()


def test_half_written_files_of_runs_that_nobody_holds(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "sort-1"
    (run / "logs").mkdir(parents=True)
    (run / "recipe.toml").write_text("")
    (run / "checkpoints" / ".step-000002.partial" / "trainer").mkdir(parents=True)
    (run / "exit").mkdir()
    (run / "exit" / "engine-0.partial").write_text("{")
    (run / "metrics.jsonl").write_text("")
    (tmp_path / "runs" / "latest").symlink_to("sort-1")
    (tmp_path / "runs" / "elsewhere").mkdir()
    (tmp_path / "runs" / "elsewhere" / "mine.partial").write_text("no run")

    def found(now: float) -> list[str]:
        return sorted(one.what.removeprefix(f"half-written {run}/") for one in _left(now))

    def _left(now: float) -> list[remains.Remains]:
        return find_remains(tmp_path, (tmp_path / "runs", run), now=now).left

    later = time.time() + 100
    assert found(time.time()) == [], "it may be written right now"
    assert found(later) == ["checkpoints/.step-000002.partial", "exit/engine-0.partial"]
    lock = RunLock(run)
    assert found(later) == [], "the run lives"
    lock.release()
    with (run / LOCK_FILE).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert found(later) == []
    assert [one.remove() for one in _left(later)] == ["", ""]
    assert sorted(path.name for path in run.rglob("*") if "partial" in path.name) == []
    assert (run / "metrics.jsonl").exists() and (tmp_path / "runs" / "elsewhere" / "mine.partial").exists()


def test_what_a_run_was_writing_when_it_was_ended_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step-000002.partial" / "trainer").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001").mkdir()
    assert remains.remove_half_written(tmp_path) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
