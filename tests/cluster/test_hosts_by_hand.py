"""Streams, and processes that a person starts, over hosts of a laboratory; without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.hosts.hosts_run import wait_until
from campaigns.hosts.lab import Host, Lab, end, laboratory, why_not
from streamrl.comm.transport_keys import KEY_ROLE, KEYS_DIRECTORY, make_keys

if reason := why_not():
    pytest.skip(f"no laboratory of hosts: {reason}", allow_module_level=True)

EXAMPLE = Path(__file__).parents[2] / "examples" / "sort"
LATE_S = 30.0
"""How late a loaded machine may be."""
END_OF_STREAM = """
import sys, anyio
from streamrl.base.errors import StreamBroken
from streamrl.base.messages import EngineCall, EngineOrder
from streamrl.comm import socket_options
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender

endpoint, number = sys.argv[2], 0

async def send():
    global number
    async with zmq_sender(EngineOrder, endpoint, bind=True, window=8, guard=KeyGuard(KeyRole.ENGINE)) as stream:
        while True:
            await stream.send(EngineCall(order_id=number, method="resume"))
            number += 1
            await anyio.sleep(0.02)

async def receive():
    global number
    async with zmq_receiver(EngineOrder, endpoint, bind=False, window=8, guard=KeyGuard(KeyRole.CONTROLLER)) as stream:
        while True:
            assert (await stream.receive()).order_id == number
            number += 1
            print(number, flush=True)

socket_options.HEARTBEAT_INTERVAL_MS, socket_options.HEARTBEAT_TIMEOUT_MS = (
    socket_options.HEARTBEAT_INTERVAL_MS // 4, socket_options.HEARTBEAT_TIMEOUT_MS // 4
)
try:
    anyio.run(send if sys.argv[1] == "controller" else receive)
except* StreamBroken:
    sys.exit(7)"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with laboratory(f"t{os.getpid() % 10**6}", count=4) as lab:
        yield lab


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.long
def test_a_cut_of_one_direction_breaks_both_ends_and_a_bad_line_neither(lab: Lab, keys: Path, tmp_path: Path) -> None:
    head, *others = lab.hosts
    ends: dict[str, list[subprocess.Popen[bytes]]] = {}
    for host in others:
        endpoint = f"tcp://{head.address}:57{host.number:02}"
        for at, role in ((head, "controller"), (host, "engine")):
            variables = {KEYS_DIRECTORY: str(keys), KEY_ROLE: role, "PYTHONPATH": os.getcwd()}
            with (tmp_path / f"{host.name}.{role}").open("wb") as output:
                line = (sys.executable, "-c", END_OF_STREAM, role, endpoint)
                ends.setdefault(host.name, []).append(at.popen(line, variables, stdout=output))

    def received(host: Host) -> int:
        return (tmp_path / f"{host.name}.engine").read_bytes().count(b"\n")

    assert wait_until(lambda: all(received(host) > 20 for host in others), 120)
    sends_nothing, hears_nothing, bad = others
    bad.impair("loss 0.05")
    bad.impair("delay 0.1")
    sends_nothing.impair("cut 1", "out")
    hears_nothing.impair("cut 1", "in")
    for host in (sends_nothing, hears_nothing):
        assert [process.wait(LATE_S) for process in ends[host.name]] == [7, 7]
    before = received(bad)
    assert wait_until(lambda: received(bad) > before + 20, LATE_S)
    assert [process.poll() for process in ends[bad.name]] == [None, None]
    for host in lab.hosts:
        end(host.processes())
        host.heal()
    assert [process.wait(LATE_S) for process in ends[bad.name]] == [-signal.SIGKILL] * 2


@pytest.mark.long
@pytest.mark.torch
def test_a_rank_started_by_hand_that_is_lost_with_its_host_is_named_and_started_again_elsewhere_goes_on(
    lab: Lab, keys: Path, tmp_path: Path
) -> None:
    """Controller, engine and rank on a host each."""
    pytest.importorskip("torch")
    head, engines, ranks, _ = lab.hosts
    recipe, output = tmp_path / "recipe.toml", tmp_path / "output"
    recipe.write_text(
        f"""run = {{name = "t", steps = 100_000, directory = "{tmp_path}/runs"}}
model.path = "{EXAMPLE / "model"}"
prompts.train = "{EXAMPLE / "train.jsonl"}"
rewards = [{{function = "{EXAMPLE / "reward.py"}:sorted_trace"}}]
rollout = {{prompts_per_batch = 4, group_size = 2}}
sampling.max_tokens = 16
training = {{learning_rate = 1e-4, advanced = {{threads = 1}}}}
engines = {{kind = "simulated", max_model_len = 256}}
[transport]
kind = "tcp"
host = "{head.address}"
keys = "{keys}"
engines = "external"
training = "external"
advanced.training_hosts = ["{ranks.address}"]"""
    )

    begun: list[subprocess.Popen[bytes]] = []

    def begin(host: Host, *words: object) -> None:
        line = (sys.executable, "-m", "streamrl", *words)
        with output.open("ab") as file:
            begun.append(host.popen(line, {"PYTHONPATH": os.getcwd()}, stdout=file, stderr=subprocess.STDOUT))

    begin(head, "train", recipe)
    for host, role in ((engines, "engine"), (ranks, "trainer")):
        begin(host, "serve", role, recipe)
    latest = tmp_path / "runs" / "latest"

    def steps_of(count: int) -> bool:
        return (latest / "metrics.jsonl").exists() and (latest / "metrics.jsonl").read_text().count('"step"') >= count

    assert wait_until(lambda: steps_of(2), 180), output.read_text()
    began = time.monotonic()
    ranks.kill()  # nothing closes its connections
    assert wait_until(lambda: "the run waits for engine-0, trainer-0" in output.read_text(), 12 + LATE_S)
    assert "WARNING controller ended" in output.read_text() and "trainer-0" in output.read_text()
    assert wait_until(lambda: not engines.processes(), LATE_S), time.monotonic() - began
    ranks.boot()
    before = (latest / "metrics.jsonl").read_text().count('"step"')
    for host, role in ((engines, "engine"), (ranks, "trainer")):
        begin(host, "serve", role, latest)
    assert wait_until(lambda: steps_of(before + 2), 180), output.read_text()
    end(head.processes("-m streamrl train"), signal.SIGTERM)
    codes = [process.wait(120) for process in begun]
    assert (codes[0], codes[3:]) == (0, [0, 0]), output.read_text()
    assert not any(host.processes() for host in lab.hosts)
