"""Connections with something wrong on them, at the endpoint for agents as a process serves it.

Each connection follows from the seed: it says nothing, half a head, junk, another protocol, a body that does not end,
or a request with a mutation. Meanwhile an agent asks, on a new connection each time, and is answered in ``LONGEST_S``
with 200, or with 401 where its trajectory has just ended. The server has 1,024 files. At the end it has the
descriptors that it began with, and has grown by less than ``MOST_GROWTH``."""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.abc
import httpx
import psutil

from campaigns.endpoint_requests import BODIES, CHAT, SaidTurns, request_of, small_tokenizer
from streamrl.run.environments.chat_tokens import ChatModel
from streamrl.run.environments.endpoint_server import EndpointServer
from streamrl.run.environments.endpoint_session import EndpointSession

KEY = "key-" + "a" * 28
OPEN_FILES = 1024
AT_ONCE = 700
"""Connections of the campaign at once: more than the half of the server's files that connections may take."""
LONGEST_S = 5.0
MOST_GROWTH = 200 << 20
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nContent-Type: application/json\r\n"
WEBSOCKET = (
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
OTHERS_HEAD = HEAD.replace(KEY, "key-" + "b" * 28)


class Peer(NamedTuple):
    """One connection. ``parts``: bytes that it sends one after the other; ``hold_s``: seconds that it waits after each;
    ``reads``: whether it reads answers."""

    parts: list[bytes]
    hold_s: float
    reads: bool


def _bytes_of(request: tuple[dict[str, object], bytes]) -> bytes:
    scope, data = request
    path = str(scope["path"]).encode("ascii", "replace").decode()
    lines = [f"{scope['method']} {path} HTTP/1.1", "Host: x"]
    names = set()
    for name, value in scope["headers"]:  # type: ignore[attr-defined]
        if name not in names and name != b"content-length":
            lines.append(f"{name.decode()}: {value.decode('latin-1')}")
            names.add(name)
    lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


FORMS: dict[str, Callable[[random.Random], list[bytes]]] = {
    "silent": lambda chance: [b""],
    "half a line": lambda chance: [HEAD[: chance.randrange(1, 30)].encode()],
    "half a head": lambda chance: [HEAD.encode()],
    "a head byte for byte": lambda chance: [bytes([byte]) for byte in HEAD.encode()],
    "a head without an end": lambda chance: [HEAD.encode(), *[b"x: " + b"y" * 1000 + b"\r\n"] * 200],
    "a name without an end": lambda chance: [HEAD.encode() + b"x" * 300_000],
    "many headers": lambda chance: [HEAD.encode() + b"".join(b"x%d: y\r\n" % at for at in range(5000)) + b"\r\n"],
    "junk": lambda chance: [chance.randbytes(chance.randrange(1, 2000))],
    "a hello of TLS": lambda chance: [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500)],
    "HTTP/2": lambda chance: [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(50)],
    "a websocket": lambda chance: [WEBSOCKET],
    "a body that does not end": lambda chance: [HEAD.encode() + b"Content-Length: 90000\r\n\r\n" + b"[" * 50_000],
    "a body of another key": lambda chance: [OTHERS_HEAD.encode() + b"Content-Length: 900000\r\n\r\n" + b"[" * 300_000],
    "a body byte for byte": lambda chance: [HEAD.encode() + b"Content-Length: 50\r\n\r\n", *[b"["] * 40],
    "a body that is announced": lambda chance: [HEAD.encode() + b"Content-Length: 9999999999999999\r\n\r\n"],
    "a chunk without an end": lambda chance: [
        HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n" + b"[" * 9000
    ],
    "chunks of junk": lambda chance: [HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chance.randbytes(200)],
    "two lengths": lambda chance: [HEAD.encode() + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
    "many requests at once": lambda chance: [(OTHERS_HEAD.encode() + b"Content-Length: 2\r\n\r\n{}") * 50],
    "requests with a key at once": lambda chance: [(HEAD.encode() + b"Content-Length: 2\r\n\r\n{}") * 20],
    "a long chat": lambda chance: [_chat([{"role": "user", "content": "a" * 100}] * 2000 + [{"role": "assistant"}])],
    "a mutated request": lambda chance: [_bytes_of(request_of(chance, [KEY], {}))],
    "a request": lambda chance: [_chat(BODIES[CHAT]["messages"])],
}


def _chat(messages: Sequence[Mapping[str, object]]) -> bytes:
    body = json.dumps({"messages": messages}).encode()
    return HEAD.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def _peers(count: int, seed: int) -> list[tuple[str, Peer]]:
    chance = random.Random(seed)
    peers = []
    for _ in range(count):
        name = chance.choice(list(FORMS))
        parts = FORMS[name](chance)
        hold_s = chance.choice((0.0, 0.0, 0.1, 2.0)) / len(parts)
        peers.append((name, Peer(parts, hold_s, chance.random() < 0.7)))
    return peers


async def _send(address: tuple[str, int], peer: Peer) -> None:
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
        async with await anyio.connect_tcp(*address) as stream:
            for part in peer.parts:
                with anyio.move_on_after(5):
                    await stream.send(part)
                await anyio.sleep(peer.hold_s)
            with anyio.move_on_after(0.2):
                while peer.reads:
                    await stream.receive()


@asynccontextmanager
async def _server() -> AsyncIterator[tuple[tuple[str, int], psutil.Process]]:
    command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
    async with await anyio.open_process(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        port = int(await process.stdout.receive())
        yield ("127.0.0.1", port), psutil.Process(process.pid)
        process.kill()


def serve() -> None:
    """Serve one trajectory until killed. Prints the port."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = small_tokenizer(Path(folder))

    async def run() -> None:
        server = EndpointServer()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve)
            # A trajectory keeps its turns: it begins anew each second, so that memory is that of connections.
            print(server.socket.getsockname()[1], flush=True)
            while True:
                with server.serving(EndpointSession(KEY, SaidTurns(tokenizer), ChatModel(tokenizer), turns_at_once=4)):
                    await anyio.sleep(1)

    anyio.run(run)


async def _agent(address: tuple[str, int], problems: list[str], waits: list[float], ends: anyio.Event) -> None:
    """Ask on new connections until ``ends``."""
    while not ends.is_set():
        begin = time.monotonic()
        try:
            async with httpx.AsyncClient(timeout=30) as client:
                answer = await client.get(f"http://127.0.0.1:{address[1]}/v1/models", headers={"x-api-key": KEY})
            if answer.status_code not in (200, 401):  # 401: in the moment between two trajectories
                problems.append(f"the agent got {answer.status_code}: {answer.text[:200]}")
        except httpx.HTTPError as error:
            problems.append(f"the agent got {type(error).__name__}: {error}")
        waits.append(time.monotonic() - begin)
        await anyio.sleep(0.05)


async def try_connections(count: int, seed: int, say: Callable[[str], None] | None = None) -> list[str]:
    """Open ``count`` connections. Returns a sentence for each thing that is wrong."""
    problems: list[str] = []
    waits: list[float] = []
    done = Counter[str]()
    ends = anyio.Event()
    free = anyio.Semaphore(min(AT_ONCE, count))
    async with _server() as (address, process):
        await _send(address, Peer(FORMS["a request"](random.Random(0)), 0.0, True))  # what is made once is made
        files = process.num_fds()
        memory = process.memory_info().rss

        async def one(name: str, peer: Peer) -> None:
            await _send(address, peer)
            free.release()
            done[name] += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_agent, address, problems, waits, ends)
            async with anyio.create_task_group() as connections:
                for start in range(0, count, 1000):
                    for name, peer in _peers(min(1000, count - start), seed + start):
                        await free.acquire()
                        connections.start_soon(one, name, peer)
                    if say is not None:
                        say(
                            f"{sum(done.values()):,} connections; an agent waited {max(waits, default=0):.2f} s; "
                            f"{(process.memory_info().rss - memory) >> 20} MiB more"
                        )
            ends.set()
        growth = process.memory_info().rss - memory
        with anyio.move_on_after(30):
            while process.num_fds() > files + 2:
                await anyio.sleep(0.1)
        if process.num_fds() > files + 2:
            problems.append(f"{process.num_fds()} descriptors are open after all connections, {files} before")
    if max(waits) > LONGEST_S:
        problems.append(f"an agent waited {max(waits):.1f} s for an answer")
    if growth > MOST_GROWTH:
        problems.append(f"the server has grown by {growth >> 20} MiB")
    if say is not None:
        say(f"{sum(done.values()):,} connections of {len(done)} kinds; the server grew by {growth / 2**20:.0f} MiB")
    return problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(work=_work)


def _work(options: argparse.Namespace) -> int:
    problems = anyio.run(try_connections, options.connections, options.seed, lambda text: print(text, flush=True))
    counts = Counter(problems)
    print(*(f"{number} x {problem}" for problem, number in counts.items()), sep="\n")
    return int(bool(problems))
