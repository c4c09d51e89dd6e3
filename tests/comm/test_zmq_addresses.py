"""Addresses that are taken, wrong or left behind, and closing within bounds."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest

from streamrl.base.errors import StreamEnded, StreamRLError
from streamrl.comm import zmq_stream
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.transport_keys import OPEN_TO_ALL, KeyRole

NewEndpoint = Callable[[str], str]
# Who may connect over tcp: everybody on this host, since no test here has keys.
zmq_sender = partial(zmq_stream.zmq_sender, guard=KeyGuard(KeyRole.CONTROLLER))
zmq_receiver = partial(zmq_stream.zmq_receiver, guard=KeyGuard(KeyRole.CONTROLLER))


async def test_a_taken_port_is_named_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(StreamRLError, match=f"cannot bind {endpoint}: Address already in use; .*choose another"):
            await zmq_receiver(int, endpoint, bind=True).__aenter__()


async def test_a_live_ipc_path_is_not_taken_over_and_a_dead_one_is(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/socket"
    async with zmq_receiver(int, endpoint, bind=True):
        with pytest.raises(StreamRLError, match="another process or stream holds it"):
            await zmq_receiver(int, endpoint, bind=True).__aenter__()
        assert (tmp_path / "socket").exists(), "the refused end has removed the path of the other"
    assert not (tmp_path / "socket").exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "socket"))
    async with zmq_receiver(int, endpoint, bind=True):
        pass
    assert os.listdir(tmp_path) == []


async def test_a_path_that_is_no_socket_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("hours of work")
    (tmp_path / "link").symlink_to("results.jsonl")
    for name in ("results.jsonl", "link"):
        with pytest.raises(StreamRLError, match=f"{name} is a file or directory, not a socket: choose a path"):
            await zmq_receiver(int, f"ipc://{tmp_path}/{name}", bind=True).__aenter__()
    assert (tmp_path / "link").read_text() == "hours of work"


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("ipc:///tmp/" + "x" * 120, "the path has 125 bytes .* 107; use a shorter run or socket directory"),
        ("ipc:///no/such/directory/socket", "its directory does not exist"),
        ("tcp://127.0.0.1", "has no port"),
        ("tcp://::1:5555", r"brackets, as in tcp://\[::1\]:5555"),
        ("tcp://203.0.113.7:5555", "can be reached from other hosts, and this process has no keys"),
        ("udp://127.0.0.1:1", "is not one of ipc"),
        ("orders", "is not one of ipc"),
    ],
)
async def test_bad_endpoints_are_refused_with_a_remedy(endpoint: str, message: str) -> None:
    with pytest.raises(StreamRLError, match=message):
        await zmq_sender(int, endpoint, bind=True).__aenter__()


async def test_an_address_of_another_host_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPEN_TO_ALL, "none")
    with pytest.raises(StreamRLError, match="this host has no such address"):
        await zmq_sender(int, "tcp://203.0.113.7:5555", bind=True).__aenter__()


async def test_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with (
        zmq_receiver(int, "tcp://[::1]:*", bind=True) as receives,
        zmq_sender(int, receives.endpoint, bind=False) as sends,
    ):
        await sends.send(1)
        assert await receives.receive() == 1


async def test_closing_without_a_peer_is_bounded(new_endpoint: NewEndpoint) -> None:
    async with zmq_sender(int, new_endpoint("tcp"), bind=True, close_seconds=0.2):
        pass
    async with zmq_receiver(int, new_endpoint("tcp"), bind=True):
        pass


async def test_every_end_can_be_opened_and_left_many_times(new_endpoint: NewEndpoint) -> None:
    endpoint = new_endpoint("ipc")
    descriptors = None
    for number in range(30):
        async with zmq_receiver(int, endpoint, bind=True) as receives, zmq_sender(int, endpoint, bind=False) as sends:
            await sends.send(number)
            assert await receives.receive() == number
            await sends.aclose()
            with pytest.raises(StreamEnded):
                await receives.receive()
        if number == 9:
            descriptors = len(os.listdir("/proc/self/fd"))
    assert descriptors is not None
    with anyio.fail_after(300):  # libzmq's reaper closes sockets a moment later
        while len(os.listdir("/proc/self/fd")) > descriptors:
            await anyio.sleep(0.01)
