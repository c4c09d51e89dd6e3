"""Peers that hold connections, bytes or the loop of the endpoint for agents cost nobody else an answer."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx
import pytest

from campaigns.endpoint_connections import try_connections
from streamrl.comm import http_connections
from streamrl.run.environments import endpoint_server
from streamrl.run.environments.chat_requests import read_request
from streamrl.run.environments.endpoint_server import EndpointServer
from streamrl.run.environments.endpoint_session import ApiError, EndpointSession

KEY = "a" * 32
CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\n"


@asynccontextmanager
async def served(**limits: Any) -> AsyncIterator[EndpointServer]:
    """Serve a trajectory that has no model: its requests are read and then fail."""
    server = EndpointServer(**limits)
    model: Any = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        with server.serving(EndpointSession(KEY, model, model)):
            yield server
        tasks.cancel_scope.cancel()


@pytest.fixture
def peers() -> Iterator[list[socket.socket]]:
    """Sockets that are closed at the end of the test."""
    sockets: list[socket.socket] = []
    yield sockets
    for each in sockets:
        each.close()


def connected(server: EndpointServer, data: str = "") -> socket.socket:
    peer = socket.create_connection(server.socket.getsockname(), 5)
    peer.sendall(data.encode())
    peer.setblocking(False)
    return peer


async def is_closed_within(peer: socket.socket, seconds: float) -> bool:
    """Whether the server closes ``peer`` without an answer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(BlockingIOError):
            try:
                return peer.recv(1) == b""
            except ConnectionResetError:
                return True
        await anyio.sleep(0.02)
    return False


async def status_of(server: EndpointServer, key: str = KEY) -> int:
    async with httpx.AsyncClient(base_url=server.base_url, timeout=20) as client:
        return (await client.get("/v1/models", headers={"x-api-key": key})).status_code


@pytest.mark.parametrize("data", ["", "GET /v1", HEAD, f"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {'b' * 32}"])
async def test_a_connection_without_a_whole_head_is_closed(
    data: str, peers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "HEAD_S", 0.3)
    async with served() as server:
        peers.append(connected(server, data))
        assert await is_closed_within(peers[0], 20)


async def test_idle_connections_make_room_for_those_that_ask(
    peers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "MOST_CONNECTIONS", 8)
    async with served() as server:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=20) as client:
            for _ in range(3):
                peers += [connected(server) for _ in range(20)]
                await anyio.sleep(0.1)
                assert (await client.get("/v1/models", headers={"x-api-key": KEY})).status_code == 200
        # The longest idle ones were closed, and the newest ones are open.
        assert await is_closed_within(peers[0], 5)
        assert not await is_closed_within(peers[-1], 0.1)


async def test_answers_under_way_are_never_cut_for_others(
    peers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "MOST_CONNECTIONS", 4)
    async with served() as server:
        asking = [connected(server, f"{HEAD}Content-Length: 2\r\n\r\n") for _ in range(4)]  # bodies that are to come
        peers += asking
        await anyio.sleep(0.2)
        late = connected(server)
        peers.append(late)
        assert await is_closed_within(late, 5)
        for peer in asking:
            peer.sendall(b"{}")
        for peer in asking:
            with anyio.fail_after(20):
                await anyio.wait_readable(peer)
            assert peer.recv(64).startswith(b"HTTP/1.1 400")


async def test_a_head_has_a_size(peers: list[socket.socket]) -> None:
    parts = [HEAD, "x: y\r\n" * 4000, f"{HEAD}x: {'y' * 20_000}\r\n\r\n"]
    async with served() as server:
        for data in (parts[0] + parts[1], parts[2]):
            peer = connected(server, data)
            peers.append(peer)
            with anyio.fail_after(20):
                await anyio.wait_readable(peer)
            assert peer.recv(64).startswith(b"HTTP/1.1 400")


async def test_an_unread_body_is_no_head_of_the_next_request(peers: list[socket.socket]) -> None:
    """A connection that is kept answers the next request also after one that was refused before its body."""
    async with served() as server:
        peer = connected(server, HEAD.replace(KEY, "b" * 32) + "Content-Length: 40000\r\n\r\n")
        peers.append(peer)
        for expected, data in (("401", b"x" * 40_000), ("200", b"")):
            with anyio.fail_after(20):
                await anyio.wait_readable(peer)
            assert peer.recv(1 << 16).decode().startswith(f"HTTP/1.1 {expected}")
            get = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\n\r\n"
            peer.setblocking(True)
            await anyio.to_thread.run_sync(peer.sendall, data + get.encode())
            peer.setblocking(False)


async def test_requests_may_come_before_the_answer_of_another(peers: list[socket.socket]) -> None:
    body = b"x" * 40_000
    head = f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode()
    async with served() as server:
        first = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\n\r\n"
        peers.append(connected(server, first + head.decode()))
        await anyio.sleep(0.2)
        peers[0].setblocking(True)
        await anyio.to_thread.run_sync(peers[0].sendall, body)
        await anyio.sleep(0.5)
        answers = peers[0].recv(1 << 16)
    assert answers.count(b"HTTP/1.1 200") == 1
    assert answers.count(b"HTTP/1.1 400") == 1 and b"cannot be read" in answers


async def test_a_body_has_a_time(peers: list[socket.socket]) -> None:
    async with served(body_s=0.3) as server:
        peers.append(connected(server, f"{HEAD}Content-Length: 100\r\n\r\n" + "{"))
        with anyio.fail_after(20):
            await anyio.wait_readable(peers[0])
        answer = peers[0].recv(4096).decode()
    assert answer.startswith("HTTP/1.1 408")
    assert "not whole after 0.3 s" in answer


@pytest.mark.parametrize(("limit", "status"), [("UNREAD_BYTES", 429), ("ALL_UNREAD_BYTES", 503)])
async def test_bytes_that_are_not_read_yet_are_counted(
    limit: str, status: int, peers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_server, limit, 1 << 20)
    body = json.dumps({"messages": [{"role": "assistant", "content": "x" * 600_000}]})
    async with served() as server, httpx.AsyncClient(base_url=server.base_url, timeout=20) as client:
        peers.append(socket.create_connection(server.socket.getsockname(), 5))
        unfinished = f"{HEAD}Content-Length: 700000\r\n\r\n{body}".encode()
        await anyio.to_thread.run_sync(peers[0].sendall, unfinished)
        await anyio.sleep(0.2)
        assert (await client.post(CHAT, content=body, headers={"x-api-key": KEY})).status_code == status
        peers[0].close()
        await anyio.sleep(0.2)
        assert (await client.post(CHAT, content=body, headers={"x-api-key": KEY})).status_code == 400
        assert server._unread_bytes == 0


@pytest.fixture
def no_collections() -> Iterator[None]:
    """A collection of all objects of a test process takes longer than what the loop does."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
async def test_a_large_request_does_not_hold_the_loop() -> None:
    """Seconds of processors, not of a clock: they are the same on a machine that is busy with something else."""
    messages = [{"role": "user", "content": "a"}] * 32_000
    last = {"role": "assistant", "content": "x"}  # refused once the request is read
    body = json.dumps({"messages": [*messages, last]}).encode()
    begin_s = time.thread_time()
    with pytest.raises(ApiError, match="the last message is the assistant's"):
        read_request(CHAT, body)
    one_read_s = time.thread_time() - begin_s
    longest_of_loop_s = 0.0
    longest_of_process_s = 0.0
    async with served() as server, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:

        async def ask() -> None:
            answer = await client.post(CHAT, content=body, headers={"x-api-key": KEY})
            assert "the last message is the assistant's" in answer.text

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
            await anyio.lowlevel.checkpoint()
            while server._unread_bytes or not longest_of_loop_s:
                loop_s = time.thread_time()
                process_s = time.process_time()
                await anyio.sleep(0.01)
                longest_of_loop_s = max(longest_of_loop_s, time.thread_time() - loop_s)
                longest_of_process_s = max(longest_of_process_s, time.process_time() - process_s)
        many = {"messages": messages * 2}
        refusal = await client.post(CHAT, content=json.dumps(many), headers={"x-api-key": KEY})
    assert longest_of_loop_s < 0.8 * one_read_s  # the loop itself reads none of the four
    assert longest_of_process_s < 2.5 * one_read_s  # threads, which hold the interpreter, read one at a time
    assert "messages has 64000 items: send at most 32768" in refusal.text


async def test_odd_connections_keep_nobody_from_the_model() -> None:
    assert await try_connections(400, seed=1) == []
