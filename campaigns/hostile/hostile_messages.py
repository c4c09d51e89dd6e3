"""Hostile messages to every live socket of a running pipeline, below and above the ZMTP layer.

A real run (simulated engines) is started over ipc, over tcp without keys, and over tcp with CURVE keys. Every unix
socket and every listening tcp port of its processes gets ``MESSAGES`` hostile messages: raw bytes that ZeroMQ has to
refuse itself, and ZeroMQ messages that streamrl has to refuse. Passed when optimizer steps go on during the flood and
after it, and when the run then drains with exit code 0 and without a traceback."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import zmq

from campaigns.hostile.real_runs import train_command
from streamrl.comm.stream_protocol import Kind
from streamrl.comm.transport_keys import make_keys
from streamrl.comm.wire import pack_header

MESSAGES = 10_000
"""For each socket."""

RAW_SHARE = 0.1
"""Share of the messages that are a connection of raw bytes each; the others are ZeroMQ messages."""

STEP_LIMIT_S = 120.0

_GREETING_3 = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # ZMTP 3.0: signature and version, to be followed by a mechanism
_NULL = _GREETING_3 + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
_SOCKET_KINDS = (zmq.DEALER, zmq.REQ, zmq.SUB, zmq.XSUB, zmq.PUSH, zmq.PAIR, zmq.ROUTER)


def raw_content(draw: random.Random) -> bytes:
    """Bytes below the ZMTP layer: old peers, broken handshakes, foreign protocols, valid handshakes and nonsense."""
    noise = draw.randbytes(draw.choice((1, 7, 64, 600, 20_000)))
    return draw.choice(
        (
            noise,
            bytes(range(1, 200)),
            b"\x01\x00" + 3 * b"\x02\x00x",  # ZMTP 1.0
            b"\x01\x00" + b"\xff" + (1 << 62).to_bytes(8, "big") + b"\x00x",  # a frame of 2**62 bytes
            b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00\x00\x05hello" + noise[:40],  # ZMTP 2.0
            _GREETING_3,
            _GREETING_3 + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + noise[:194],
            _GREETING_3 + b"PLAIN".ljust(20, b"\0") + bytes(32),
            _NULL + noise[:200],
            _NULL + _READY + b"\x00" + bytes([len(noise[:200])]) + noise[:200],
            _NULL + _READY + b"\x02" + (1 << 40).to_bytes(8, "big") + noise[:64],
            _NULL + _READY + b"\x04\x05\x04PING" + noise[:9],
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.2\r\n",
            (1 << 20).to_bytes(4, "big") + noise,  # the control socket's length, and less than that
            len(noise).to_bytes(4, "big") + noise,
        )
    )


def frames(draw: random.Random) -> list[bytes]:
    """One ZeroMQ message: nonsense, or a message kind of a stream with a body that does not belong to it."""
    kind = draw.choice(list(Kind))
    noise = draw.randbytes(draw.choice((0, 1, 16, 300, 5_000)))
    return draw.choice(
        (
            [noise],
            [b"", b"", noise],
            [b"x"] * draw.choice((2, 40, 400)),
            [pack_header(kind, draw.choice((0, 1, 2**32, 2**63))), noise],
            [
                pack_header(kind),
                msgspec.msgpack.encode({"type": "EngineCall", "order_id": draw.randrange(99), "method": "resume"}),
            ],
            [pack_header(kind, version=draw.randrange(256)), noise, noise],
            [msgspec.msgpack.encode(draw.choice(([[[]]] * 50, {"piece": 0, "digest": "x"}, -1, "a" * 999)))],
            [b"\x01" + noise[:200]],  # a subscription, for the metrics socket
        )
    )


def attack(endpoint: str, messages: int, seed: int) -> None:
    """Send ``messages`` hostile messages to one endpoint (``ipc://PATH`` or ``tcp://HOST:PORT``) and leave."""
    draw = random.Random(seed)
    raw = max(1, int(messages * RAW_SHARE))
    held: list[socket.socket] = []
    for number in range(raw):
        with suppress(OSError):  # refused, reset, or more connections than the listener takes at once
            connection = _connect(endpoint)
            connection.settimeout(0.05)
            with suppress(OSError):
                connection.sendall(raw_content(draw))
            if number % 10:
                connection.close()
            else:
                held.append(connection)  # stays open and says nothing more
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        per_kind = (messages - raw) // len(_SOCKET_KINDS) + 1
        for kind in _SOCKET_KINDS:
            sender = context.socket(kind)
            sender.setsockopt(zmq.LINGER, 200)
            sender.setsockopt(zmq.SNDHWM, 0)
            if kind == zmq.REQ:
                sender.setsockopt(zmq.REQ_RELAXED, 1)
            sender.connect(endpoint)
            for _ in range(per_kind):
                with suppress(zmq.ZMQError):
                    if kind == zmq.SUB:
                        sender.setsockopt(zmq.SUBSCRIBE, draw.randbytes(draw.randrange(60)))
                    else:
                        sender.send_multipart(frames(draw), flags=zmq.NOBLOCK)
            time.sleep(0.05)
            sender.close()
    finally:
        for connection in held:
            connection.close()
        context.term()


def _connect(endpoint: str) -> socket.socket:
    kind, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    connection = socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET)
    connection.settimeout(1.0)
    connection.connect(address if kind == "ipc" else (host, int(port)))
    return connection


class LiveRun:
    """A run of the sorting example on simulated engines, in a directory and with a TMPDIR of its own."""

    def __init__(self, directory: Path, settings: dict[str, object]) -> None:
        self.directory = directory
        self._sockets = directory / "t"
        self._sockets.mkdir()
        settings = {"run.steps": 1_000_000, "run.directory": str(directory / "runs")} | settings
        with (directory / "output").open("wb") as output:
            self.process = subprocess.Popen(
                train_command(settings),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"TMPDIR": str(self._sockets)},
            )

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        found = list((self.directory / "runs").glob("*/metrics.jsonl"))
        return sum(b'"step"' in line for line in found[0].read_bytes().splitlines()) if found else 0

    def wait_for_steps(self, count: int) -> bool:
        """Whether ``count`` more optimizer steps end within ``STEP_LIMIT_S``."""
        wanted, deadline = self.steps + count, time.monotonic() + STEP_LIMIT_S
        while self.steps < wanted:
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def endpoints(self) -> Iterator[str]:
        """Every unix socket in the run's folders, and every listening tcp port of its processes."""
        for path in sorted((*self._sockets.rglob("*"), *(self.directory / "runs").rglob("*"))):
            with suppress(OSError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    yield f"ipc://{path}"
        root = psutil.Process(self.process.pid)
        listening = {
            f"tcp://127.0.0.1:{connection.laddr.port}"
            for process in (root, *root.children(recursive=True))
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        yield from sorted(listening)

    def drain(self) -> str:
        """End the run as Ctrl-C does. What went wrong, or an empty text."""
        self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "the run did not drain within 60 s"
        said = (self.directory / "output").read_text(errors="replace")
        if "Traceback" in said:
            return "a traceback: " + said[said.index("Traceback") :][:600]
        return "" if code == 0 else f"exit code {code}: {said[-600:]}"


def flood(name: str, settings: dict[str, object], out: Callable[[str], None]) -> int:
    """Attack every socket of one run. Returns 1 if the run failed."""
    with tempfile.TemporaryDirectory(prefix="srl") as folder:
        directory = Path(folder)
        if "transport.keys" in settings:
            make_keys(directory / "keys")
            settings["transport.keys"] = str(directory / "keys")
        run = LiveRun(directory, settings)
        try:
            if not run.wait_for_steps(2):
                out(f"{name}: no step before the first message:\n{(directory / 'output').read_text()[-1500:]}")
                return 1
            endpoints, before, began = list(run.endpoints()), run.steps, time.monotonic()
            for number, endpoint in enumerate(endpoints):
                attack(endpoint, MESSAGES, seed=number)
                shown = endpoint.replace(folder, "")
                out(f"{name}: {number + 1}/{len(endpoints)} {shown}: {MESSAGES} messages, step {run.steps}")
                if run.process.poll() is not None:
                    break
            during, took = run.steps - before, time.monotonic() - began
            problem = "" if run.wait_for_steps(3) else f"no three steps in {STEP_LIMIT_S:g} s after the messages"
            problem = (problem and f"{problem}; ") + run.drain()
        finally:
            run.process.kill()
            run.process.wait()
    sent = f"{MESSAGES * len(endpoints):,} messages to {len(endpoints)} sockets in {took:.0f} s"
    out(f"{name}: {sent}, {during} steps meanwhile: {problem or 'passed'}")
    return int(bool(problem) or not during)


def free_ports(count: int) -> int:
    """The first of ``count`` free tcp ports in a row, below those that the kernel hands out."""
    for first in random.sample(range(20_000, 30_000, count), 50):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
    raise SystemExit(f"no {count} free ports in a row")


def run(out: Callable[[str], None], words: Sequence[str] = ()) -> int:
    """Flood a run over each transport (``words``: over these). Returns how many runs failed."""
    failed = 0
    for name in ("ipc", "tcp", "tcp with keys"):
        if words and not any(word in name for word in words):
            continue
        settings: dict[str, object] = {}
        if name != "ipc":
            first = free_ports(12)
            settings = {
                "transport.kind": "tcp",
                "transport.port": first,
                "metrics.endpoint": f"tcp://127.0.0.1:{first + 11}",
            }
        if name == "tcp with keys":
            settings["transport.keys"] = "made when the run is"
        failed += flood(name, settings, out)
    return failed
