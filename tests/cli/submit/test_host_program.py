"""The program of one host (``submit.cluster_host``) with a stand-in for Ray: what ends, and what is left, when Ray or
another host fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from streamrl.cli.submit.ray_start import Work
from streamrl.cli.submit.ssh import SshJob, run_over_ssh

RAY = f"""#!{sys.executable}
import pathlib, socket, subprocess, sys, time
here = pathlib.Path(__file__).parent
(here / "left").mkdir(exist_ok=True)
starts = len(list((here / "left").iterdir()))
if any(pathlib.Path("/proc", path.read_text()).exists() for path in (here / "left").iterdir()):
    (here / "two at once").touch()
raylet = subprocess.Popen(["sleep", "600"], start_new_session=True)
(here / "left" / str(raylet.pid)).write_text(str(raylet.pid))
folder = pathlib.Path(sys.argv[sys.argv.index("--temp-dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
folder.chmod(0o777)  # as Ray does
(here / "mode").write_text(oct(folder.parent.stat().st_mode & 0o777))
if "--head" in sys.argv:
    server = socket.create_server(("", int(sys.argv[sys.argv.index("--port") + 1])))
elif starts == 0 or (here / "fails").exists():
    sys.exit("node timed out during startup" if starts == 0 else "no")
print("Ray runtime started.", flush=True)
time.sleep(600)
"""
MODULE = """
init = shutdown = lambda *_, **__: None
nodes = lambda: [{"NodeManagerAddress": "a", "Alive": True}]
"""
DRAINS = """
import signal, sys, time
def drain(*_):
    signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
    print("draining", flush=True)
    time.sleep(1.5)
    sys.exit(0)
signal.signal(signal.SIGINT, drain)
print("running", flush=True)
time.sleep(600)
"""
STAYS = DRAINS.replace('    print("draining", flush=True)\n', "").replace("1.5", "600")
PROGRAM = """from streamrl.cli.submit import cluster_host as host
host.GONE_S = float(host.os.environ.get("GONE_S", "7"))
host.END_S = 7.0
raise SystemExit(host.main(host.sys.argv[1:]))"""
LINE = json.dumps({"token": "t", "head": "127.0.0.1", "variables": {"NOTE": "of the launcher"}}) + "\n"
"""What ``streamrl launch ssh`` sends first."""


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program ``ray`` and a module of that name."""
    (tmp_path / "ray").write_text(RAY)
    (tmp_path / "ray").chmod(0o755)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "ray.py").write_text(MODULE)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 1 127.0.0.1 22")  # as ssh says it on its other side
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}:{Path.cwd()}")
    return tmp_path


def host(
    bin: Path, rank: int, port: int, *command: str, head: str = "127.0.0.1", stdin: str = ""
) -> subprocess.Popen[str]:
    words = ["--rank", str(rank), "--nodes", "1", "--head", head, "--port", str(port), "--token", str(bin / "t")]
    words += ["--lease"] if stdin else []
    line = [sys.executable, "-c", PROGRAM, *words, "--start-s", "60", "--", *command]
    started = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert started.stdin is not None
    started.stdin.write(stdin)
    started.stdin.flush()
    return started


def await_starts(bin: Path, worker: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + 60
    while not (bin / "left").exists() or len(os.listdir(bin / "left")) < count:
        assert worker.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def left(bin: Path) -> list[int]:
    return [pid for pid in map(int, os.listdir(bin / "left")) if psutil.pid_exists(pid)]


def test_leftovers_of_a_failed_ray_start_are_removed(bin: Path) -> None:
    """Processes left by a start of Ray that gave up are gone before the next attempt."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        (bin / "t").touch(0o600)
        with host(bin, 1, head.getsockname()[1]) as worker:
            await_starts(bin, worker, 2)
            assert not (bin / "two at once").exists() and len(left(bin)) == 1
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(30) == 0
    assert not left(bin)


def test_a_host_joins_over_ipv6(bin: Path) -> None:
    (bin / "t").touch(0o600)
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as head,
        host(bin, 1, port := head.getsockname()[1], head="::1") as worker,
    ):
        assert worker.stdout is not None
        assert worker.stdout.readline().endswith(f": starting Ray at ::1, of [::1]:{port}\n")
        worker.send_signal(signal.SIGTERM)


def test_a_host_whose_ray_ends_starts_it_while_the_head_answers(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut, or a head that is another one at its address, ends Ray on a host that had joined. The host waits for the
    head, and ends with the run, whose end removes the token."""
    monkeypatch.setenv("GONE_S", "60")
    with socket.create_server(("127.0.0.1", 0)) as head:
        (bin / "t").touch(0o600)
        with host(bin, 1, port := head.getsockname()[1]) as worker:
            await_starts(bin, worker, 2)
            head.close()
            end_ray(worker)
            time.sleep(2)  # of the time for which it waits
            assert worker.poll() is None and len(os.listdir(bin / "left")) == 2
            with socket.create_server(("127.0.0.1", port)) as again:
                await_starts(bin, worker, 3)
                (bin / "fails").touch()
                end_ray(worker)
                await_starts(bin, worker, 5)  # it has joined once, so that it may again
                assert not (bin / "two at once").exists()
                again.close()
                (bin / "t").unlink()
                began_s = time.monotonic()
                assert worker.wait(30) == 0 and time.monotonic() - began_s < 25
    assert not left(bin)


def end_ray(worker: subprocess.Popen[str]) -> None:
    (ray,) = [one for one in psutil.Process(worker.pid).children() if "ray" in " ".join(one.cmdline())]
    ray.kill()


def test_a_host_that_loses_the_head_has_failed(bin: Path) -> None:
    """A host of a launch by ssh that loses the head node has failed."""
    with socket.create_server(("127.0.0.1", 0)) as head, host(bin, 1, head.getsockname()[1], stdin=LINE) as worker:
        await_starts(bin, worker, 2)
        head.close()
        assert worker.wait(14) == 1  # 15 s after it heard the launcher last its lease ends
        assert worker.stdout is not None and "has not answered for 7 s: is it there," in worker.stdout.read()
    assert not left(bin)


@pytest.mark.parametrize(
    ("end", "code"), [("lambda *_: sys.exit(9)", 9), pytest.param("signal.SIG_IGN", 137, marks=pytest.mark.long)]
)
def test_a_run_ends_where_the_connection_of_its_launcher_is_gone(
    bin: Path, free_ports: Callable[[int], int], end: str, code: int
) -> None:
    script = STAYS.replace("lambda *_: sys.exit(9)", end)
    with host(bin, 0, free_ports(1), sys.executable, "-c", script, stdin=LINE) as head:
        assert head.stdin is not None and head.stdout is not None
        assert "running\n" in iter(head.stdout.readline, "")
        head.stdout.close()
        head.stdin.close()
        assert head.wait(30) == code  # of its second signal: with one it would drain
    assert not left(bin)


def test_variables_of_the_launcher_come_over_its_connection(bin: Path, free_ports: Callable[[int], int]) -> None:
    """A run has the variables of --env; the folder that Ray opens to all users lies in one that they cannot enter."""
    script = "import os; print(os.environ['NOTE'], flush=True)"
    with host(bin, 0, free_ports(1), sys.executable, "-c", script, stdin=LINE) as head:
        assert head.stdout is not None
        assert "of the launcher\n" in iter(head.stdout.readline, "")
    assert (bin / "mode").read_text() == "0o700"


@pytest.mark.parametrize("kind", ["open to all", "a link"])
def test_a_token_that_others_may_have_put_there_is_refused(bin: Path, kind: str) -> None:
    planted = bin / "planted"
    planted.write_text("x")
    planted.chmod(0o600 if kind == "a link" else 0o644)
    (bin / "t").symlink_to(planted) if kind == "a link" else planted.rename(bin / "t")
    with host(bin, 1, 1) as refused:
        assert "is not a file of this user alone" in refused.communicate()[0] and refused.returncode == 1


def test_a_host_that_cannot_begin_says_why(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with host(bin, 0, 1, stdin="e\n") as ended:  # other hosts could not be reached
        assert (ended.communicate()[0], ended.returncode) == ("", 1)
    (bin / "t").touch(0o600)
    with host(bin, 1, 1, head="nobody.invalid") as waiting:  # a pod may begin before the name of the first one is known
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(4)
        waiting.send_signal(signal.SIGTERM)
    (bin / "ray").unlink()
    monkeypatch.setenv("PATH", str(bin))
    with socket.create_server(("127.0.0.1", 0)) as head, host(bin, 1, head.getsockname()[1]) as without:
        assert "ray is not on the PATH" in without.communicate()[0]


def test_a_run_that_is_asked_twice_to_drain_drains(bin: Path, free_ports: Callable[[int], int]) -> None:
    with host(bin, 0, free_ports(1), sys.executable, "-c", DRAINS) as head:
        assert head.stdout is not None
        lines = iter(head.stdout.readline, "")
        for word in ("running\n", "draining\n"):
            assert word in lines
            head.send_signal(signal.SIGUSR1)
        assert head.wait(30) == 0
    assert not left(bin)


async def test_a_host_that_fails_before_the_run_began_ends_the_launch(
    bin: Path, free_ports: Callable[[int], int]
) -> None:
    (bin / "fails").touch()
    setup = [f"export PATH={os.environ['PATH']} PYTHONPATH={os.environ['PYTHONPATH']}"]
    job = SshJob(work=Work(recipe="r.toml"), hosts=["localhost"] * 2, folder=bin, setup=setup, port=free_ports(1))
    began_s = time.monotonic()
    assert await run_over_ssh(job) == 1
    assert time.monotonic() - began_s < 60
    assert not left(bin)
