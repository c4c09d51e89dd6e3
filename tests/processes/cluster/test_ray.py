"""One command over two hosts of a laboratory, with a real Ray: three raylets, since the second host has two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from builders.files import SORT as EXAMPLE

from campaigns.hosts.hosts_run import left_on, wait_until
from campaigns.hosts.lab import command_of, end, laboratory, why_not
from campaigns.hosts.ray_nodes import RayNodes

LEASE_S = 3.0

pytest.importorskip("ray", reason="Ray is not installed: `pip install streamrl[ray]`")
if reason := why_not():
    pytest.skip(f"no laboratory of hosts: {reason}", allow_module_level=True)


@pytest.fixture(autouse=True)
def nothing_left_running(ray: RayNodes) -> Iterator[None]:
    """In place of the check of this process's children, which Ray's are: nothing of a run is left on a host."""
    yield
    left = [process for host in ray.lab.hosts for process in left_on(host)]
    lines = [*map(command_of, left)]
    end(left)
    assert not left, lines


@pytest.fixture(scope="module")
def ray() -> Iterator[RayNodes]:
    with laboratory("tests", count=2) as lab:
        nodes = RayNodes(lab, Path(sys.executable))
        nodes.start()
        nodes.start(lab.hosts[1:])
        yield nodes


def begin(ray: RayNodes, folder: Path, *command: object, **variables: str) -> subprocess.Popen[bytes]:
    """A command of streamrl on the first host, from a folder of its own; what it prints is in ``folder/output``."""
    with (folder / "output").open("wb") as output:
        line = ("env", "-C", folder, sys.executable, "-m", "streamrl", *command)
        return ray.lab.hosts[0].popen(line, ray.variables | variables, stdout=output, stderr=subprocess.STDOUT)


def train(ray: RayNodes, folder: Path, *more: str) -> tuple[object, ...]:
    """Arguments of a small run of two engines and two ranks, with a recipe and a directory that are relative paths."""
    (folder / "recipe.toml").write_text(
        f"""run = {{name = "t", steps = 4, directory = "runs"}}
model.path = "{EXAMPLE / "model"}"
prompts.train = "{EXAMPLE / "train.jsonl"}"
rewards = [{{function = "{EXAMPLE / "reward.py"}:sorted_trace"}}]
rollout = {{prompts_per_batch = 4, group_size = 2}}
sampling.max_tokens = 16
training = {{ranks = 2, learning_rate = 1e-4}}
engines = {{kind = "simulated", count = 2, max_model_len = 256}}
checkpoint.every = 2
cluster.advanced = {{trainer_hosts = 2, engine_hosts = 2, lease_s = {LEASE_S}}}"""
    )
    sets = (part for one in more for part in ("--set", one))
    return ("train", "recipe.toml", "--cluster", ray.address, *sets)


def ports_of(process: psutil.Process) -> set[int]:
    """What it listens at over TCP, but for loopback, in the network of its host."""
    own = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return {int(port, 16) for address, port in found if not address.endswith("7F")}


@pytest.mark.long
def test_a_killed_run_over_two_hosts_is_resumed(ray: RayNodes, tmp_path: Path) -> None:
    """A run over two hosts whose command is killed is resumed, and leaves nothing behind."""
    head, other = ray.lab.hosts
    command = begin(ray, tmp_path, *train(ray, tmp_path, "run.steps=100000"))
    steps = tmp_path / "runs" / "latest" / "metrics.jsonl"
    assert wait_until(lambda: steps.exists() and steps.read_text().count('"step"') > 1, 120), said(tmp_path)
    # Two raylets on one host have one daemon, one thread of which has started all, and no GPUs where it asked for none;
    # processes have the niceness of this one, and ports of the range.
    (daemon,) = other.processes("ray::RayDaemon")
    threads = [path for path in Path(f"/proc/{daemon.pid}/task").iterdir() if (path / "children").read_text()]
    assert len(threads) == 1 and daemon.children()[0].environ()["CUDA_VISIBLE_DEVICES"] == ""
    ours = [process for host in (head, other) for process in host.processes("streamrl.launch ")]
    assert sum("streamrl.launch trainer" in command_of(one) for one in other.processes()) == 1
    assert {process.nice() for process in ours} == {os.nice(0)}
    for process in ours:
        outside = ports_of(process) - set(range(5700, 5900))
        assert len(outside) <= ("trainer" in command_of(process)), outside  # a rank of gloo listens at one of its own
    end(head.processes("-m streamrl train"))
    assert wait_until(lambda: not left_on(head) and not left_on(other), LEASE_S + 3), [*map(command_of, left_on(other))]
    assert command.wait() != 0
    last = max(json.loads(line).get("step", 0) for line in steps.read_text().splitlines())
    resumed = begin(ray, tmp_path, "resume", "runs/latest", "--cluster", ray.address, "--set", f"run.steps={last + 4}")
    assert resumed.wait(120) == 0, said(tmp_path)
    assert wait_until(lambda: not left_on(head) and not left_on(other), 3), [*map(command_of, left_on(other))]


@pytest.mark.long
def test_a_directory_that_the_hosts_do_not_share_is_refused(ray: RayNodes, tmp_path: Path) -> None:
    command = begin(ray, tmp_path, *train(ray, tmp_path, f"run.directory={ray.lab.tmp}/runs"))
    assert command.wait(60) == 2
    assert "h1 does not see this run's directory" in said(tmp_path)
    assert not left_on(ray.lab.hosts[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [("RAY_AUTH_MODE", "disabled", "RAY_AUTH_MODE=token"), ("address", "10.81.0.1:1", "nobody answers there")],
)
def test_unreachable_and_open_clusters_are_refused(
    ray: RayNodes, tmp_path: Path, variable: str, value: str, sentence: str
) -> None:
    """A cluster that cannot be reached, or is open to everybody, is refused. Each sentence is of a check before Ray is
    asked to connect, which would try for 20 seconds and more."""
    more = {variable: value} if variable != "address" else {}
    arguments = [value if one == ray.address and not more else one for one in train(ray, tmp_path)]
    assert begin(ray, tmp_path, *arguments, **more).wait(60) == 2
    assert sentence in said(tmp_path)


def said(folder: Path) -> str:
    return (folder / "output").read_text()
