"""Streams over hosts of a laboratory; without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.hosts.hosts_run import wait_until
from campaigns.hosts.lab import Host, Lab, end, laboratory, why_not
from streamrl.comm.transport_keys import KEY_ROLE, KEYS_DIRECTORY, make_keys

if reason := why_not():
    pytest.skip(f"no laboratory of hosts: {reason}", allow_module_level=True)

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
def test_a_cut_of_one_direction_breaks_both_ends(lab: Lab, keys: Path, tmp_path: Path) -> None:
    """A cut of one direction breaks both ends, and a bad line breaks neither."""
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
    # All at once: an end of a stream exits by itself when its peer is killed first.
    end([process for host in lab.hosts for process in host.processes()])
    for host in lab.hosts:
        host.heal()
    assert [process.wait(LATE_S) for process in ends[bad.name]] == [-signal.SIGKILL] * 2
