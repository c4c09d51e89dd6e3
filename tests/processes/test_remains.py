"""What is left when a run is killed together with everything that cleans up after it, and goes at its resume."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_supervisor import STAND_IN, Trial, lives

from streamrl.supervise import remains
from streamrl.supervise.remains import remove_remains_of
from streamrl.supervise.sweep import TRACES_FILE, RunTraces, keep_traces

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
    living_run: tuple[Trial, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    one, supervisor = living_run
    [guardian] = one.guardians()
    until(lambda: b"psm_" in (one.sockets / TRACES_FILE).read_bytes())  # the supervisor has seen the memory in use
    assert remove_remains_of(one.directory, tmp_path) == []
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
    assert remove_remains_of(tmp_path / "another", tmp_path) == [] and one.left() == left
    assert remove_remains_of(one.directory, tmp_path) == []
    one.assert_nothing_left()


def test_what_cannot_be_judged_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = tmp_path / "streamrl-abcdefgh", tmp_path / "run"
    folder.mkdir()
    traces = RunTraces(
        marker="w-test-elsewhere",
        since=time.time(),
        socket_directory=str(folder),
        owner=2**22 + 1,
        run_directory=str(run),
    )
    keep_traces(msgspec.structs.replace(traces, namespace=traces.namespace + 1))
    remove_remains_of(run, tmp_path)
    assert folder.exists(), "another container"
    keep_traces(traces)
    moved = folder.rename(tmp_path / "streamrl-hgfedcba")
    remove_remains_of(run, tmp_path)
    assert moved.exists(), "what it says is about another place"
    moved.rename(folder)
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 4711)
        remove_remains_of(run, tmp_path)
    assert folder.exists(), "another user's"
    remove_remains_of(run, tmp_path)
    assert not folder.exists()


def test_what_a_run_was_writing_when_it_was_ended_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step-000002.partial" / "trainer").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001").mkdir()
    assert remains.remove_half_written(tmp_path) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
