"""A sandbox that lives as long as a test module, and a host with things that no code may reach."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from streamrl.rewards.sandbox.jail import Limits
from streamrl.rewards.sandbox.reward import CodeOptions, CodeReward
from streamrl.rewards.sandbox.sandbox import Sandbox
from streamrl.rewards.sandbox.syscalls import drop_capabilities, set_no_new_privileges

MIB = 1 << 20
LIMITS = Limits(
    seconds=100.0, memory_bytes=256 * MIB, file_bytes=2 * MIB, scratch_bytes=4 * MIB, scratch_files=64, processes=1,
    threads=16, open_files=64, stack_bytes=16 * MIB,
)  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    """With every layer that this machine has."""
    async with Sandbox() as started:
        await started.layers()
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def no_sandbox() -> AsyncIterator[Sandbox]:
    """What ``allow_unsandboxed`` gives where no layer is available: limits only."""
    async with Sandbox(()) as started:
        assert (await started.layers()).active == ()
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reward(sandbox: Sandbox) -> CodeReward:
    """Of completions that are code and nothing else."""
    return CodeReward(CodeOptions(whole=True, timeout_s=100.0), sandbox)


def _unprivileged() -> None:
    set_no_new_privileges()
    drop_capabilities()


class Host:
    """Files, sockets and a process outside of the sandbox, and what reached them."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.secret = secrets.token_hex(8)
        self.directory = directory
        self.file = directory / "canary"
        self.file.write_text(self.secret)
        self.shared = Path(f"/dev/shm/streamrl-{self.secret}")
        stack.callback(self.shared.unlink, missing_ok=True)
        self.shared.write_text(self.secret)
        unix = str(directory / "socket")
        self.listeners = {
            "tcp": socket.create_server(("127.0.0.1", 0)),
            "udp": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            "unix": socket.socket(socket.AF_UNIX),
            "abstract": socket.socket(socket.AF_UNIX),
            "datagram": socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        }
        self.listeners["udp"].bind(("127.0.0.1", 0))
        self.listeners["unix"].bind(unix)
        self.listeners["abstract"].bind(f"\0{self.secret}")
        self.listeners["datagram"].bind(f"\0d{self.secret}")
        for name, listener in self.listeners.items():
            stack.callback(listener.close)
            listener.setblocking(False)
            if name in ("unix", "abstract"):
                listener.listen(8)
        self.tcp, self.udp = (self.listeners[name].getsockname()[1] for name in ("tcp", "udp"))
        # Without capabilities, as the code is: else that alone would keep the code from it.
        self.victim = subprocess.Popen(["sleep", "100"], env={"SECRET": self.secret}, preexec_fn=_unprivileged)
        stack.callback(self.victim.wait)
        stack.callback(self.victim.kill)
        self.victim_socket = unix

    def contacted(self, name: str) -> bool:
        """Whether anything arrived at that socket since it was asked last."""
        listener = self.listeners[name]
        try:
            if listener.type == socket.SOCK_DGRAM:
                listener.recv(100)
            else:
                listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    @property
    def victim_lives(self) -> bool:
        """Neither ended nor stopped, once no signal that was sent is still on its way to it."""
        process = Path(f"/proc/{self.victim.pid}/status")
        while self.victim.poll() is None:
            status = dict(line.split(":\t", 1) for line in process.read_text().splitlines())
            if status["State"].startswith(("T", "t")):
                return False
            # It wakes from its sleep for each signal: asleep with none pending, it got none.
            if status["State"].startswith("S") and not int(status["SigPnd"], 16) | int(status["ShdPnd"], 16):
                return True
            os.sched_yield()
        return False

    def fill(self, source: str) -> bytes:
        """The source with what it has to know about this host."""
        for name, value in {
            "FILE": str(self.file), "SHARED": str(self.shared), "UNIX": self.victim_socket, "ABSTRACT": self.secret,
            "TCP": str(self.tcp), "UDP": str(self.udp), "PID": str(self.victim.pid), "PARENT": str(os.getpid()),
            "DIRECTORY": str(self.directory),
        }.items():  # fmt: skip
            source = source.replace(f"@{name}@", value)
        return source.encode()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with contextlib.ExitStack() as stack:
        yield Host(tmp_path, stack)


@pytest.fixture(scope="session")
def limits() -> Callable[..., Limits]:
    """Small limits, with other values for some."""
    return lambda **other: LIMITS._replace(**other)
