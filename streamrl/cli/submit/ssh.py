"""Ray on a list of hosts by ssh: one connection a host, over which its token, its lease and its orders go.

``submit.host`` runs there; it ends with the connection, however that ends. Nothing is left when ``run_over_ssh``
returns."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc
import msgspec
from anyio.streams.text import TextReceiveStream

from streamrl.base.errors import RecipeError
from streamrl.cli.submit.ray_start import Work, host_command

REACH_S = 10.0
"""Seconds in which every host has to let us in."""
_BEAT_S = 2.0
_END_S = 45.0
_HELLO = "streamrl-host"
_SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=4")
HERE = ("localhost", "127.0.0.1")


class SshJob(msgspec.Struct, frozen=True, kw_only=True):
    """A run on ``hosts``, as ssh names them; the first has Ray's head and runs ``work`` (``localhost``: this one).
    ``setup``: lines before everything else; ``folder``: on each host, from which relative paths of the recipe count."""

    work: Work
    hosts: Sequence[str]
    folder: Path
    setup: Sequence[str]
    port: int
    gpus: int | None = None
    interface: str = ""


def ssh_commands(job: SshJob) -> list[list[str]]:
    """The command of each host. A token is in none."""
    found = []
    for rank, host in enumerate(job.hosts):
        arguments = ["--rank", str(rank), "--nodes", str(len(job.hosts)), "--port", str(job.port), "--lease"]
        arguments += [] if job.gpus is None else ["--gpus", str(job.gpus)]
        arguments += ["--interface", job.interface] if job.interface else []
        lines = [f'echo "{_HELLO} ${{SSH_CONNECTION:-}}"', f"cd {shlex.quote(str(job.folder))} || exit 1", *job.setup]
        text = "\n".join([*lines, f"exec {shlex.join(host_command(arguments, job.work))}"])
        local = ["bash", "-c", text]
        found.append(local if host in HERE else ["ssh", *_SSH, "--", host, f"exec {shlex.join(local)}"])
    return found


async def run_over_ssh(job: SshJob) -> int:
    """Run it and print what hosts say. The first Ctrl-C or SIGTERM drains the run, the second ends it. Returns the exit
    code of the run. Raises ``RecipeError`` where hosts cannot be reached: then nothing was started."""
    token = secrets.token_hex(32)
    async with anyio.create_task_group() as tasks:
        hosts = [_Host(name, command) for name, command in zip(job.hosts, ssh_commands(job), strict=True)]
        try:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
                for host in hosts:
                    await host.open(tasks)
                with anyio.move_on_after(REACH_S):
                    for host in hosts:
                        await host.answered.wait()
                if failures := [f"{host.name}: {host.failure()}" for host in hosts if host.connection is None]:
                    raise RecipeError(*failures)
                head = _head_address(hosts)
                for host in hosts:
                    await host.send(json.dumps({"token": token, "head": head}) + "\n")
                    tasks.start_soon(host.beat)
                tasks.start_soon(_pass_on, signals, hosts[0])
                for host in hosts[1:]:
                    tasks.start_soon(_pass_on_failure, host, hosts[0])
                await hosts[0].ended.wait()
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as ends:
                    for host in hosts:
                        ends.start_soon(host.kill)
        tasks.cancel_scope.cancel()
    return hosts[0].code


def _head_address(hosts: Sequence[_Host]) -> str:
    """Address of the first host as its own ssh server has it, or as that of another host sees this one."""
    if hosts[0].connection:
        return hosts[0].connection[2]
    return next((host.connection[0] for host in hosts if host.connection), "")


async def _pass_on(signals: AsyncIterator[signal.Signals], head: _Host) -> None:
    order = "d"
    async for number in signals:
        print(f"{number.name}: {'draining the run; again to end it' if order == 'd' else 'ending'}", flush=True)
        await head.send(f"{order}\n")
        order = "e"


async def _pass_on_failure(host: _Host, head: _Host) -> None:
    """Have the first host wait no longer for one that has failed. A run that has begun goes on without it."""
    await host.ended.wait()
    if host.code:
        print(f"{host.name}: ended with exit code {host.code}", flush=True)
        await head.send("f\n")


class _Host:
    """One host. ``connection``: None before it has answered, then what its ssh server says of the connection."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.connection: list[str] | None = None
        self.answered = anyio.Event()
        self.ended = anyio.Event()
        self.code = 1
        self._command = command
        self._said: list[str] = []
        self._began_s = time.monotonic()

    async def open(self, tasks: anyio.abc.TaskGroup) -> None:
        """Connect. What the host prints is printed from now on."""
        # A session of its own: the terminal's Ctrl-C is an order for the run, and must not cut the connections.
        self._process = await anyio.open_process(self._command, stderr=-2, start_new_session=True)
        tasks.start_soon(self._listen)

    def failure(self) -> str:
        """Say why it did not answer."""
        said = self._said[-1] if self._said else f"no answer within {REACH_S:g} s"
        return f"{said} (`{shlex.join(['ssh', *_SSH[:2], self.name, 'true'])}` has to succeed)"

    async def send(self, text: str) -> None:
        """Write on its stdin, if it still reads."""
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await self._process.stdin.send(text.encode())

    async def beat(self) -> None:
        """Show it for ever that this process is there."""
        while not self.ended.is_set():
            await self.send("\n")
            await anyio.sleep(_BEAT_S)

    async def kill(self) -> None:
        """End its lease and, where that does not end it, cut the connection, which ends the lease too."""
        if self.connection is not None:
            await self.send("e\n")
            assert self._process.stdin is not None
            with suppress(OSError):
                await self._process.stdin.aclose()
            with anyio.move_on_after(_END_S):
                await self._process.wait()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        await self._process.aclose()

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        rest = ""
        async for text in TextReceiveStream(self._process.stdout, errors="replace"):
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                if self.connection is None and line.startswith(_HELLO):
                    self.connection = line.split()[1:]
                    print(f"{self.name}: reached ({time.monotonic() - self._began_s:.1f} s)", flush=True)
                    self.answered.set()
                elif self.connection is None:
                    self._said.append(line.strip())
                else:
                    print(line, flush=True)
        self.code = await self._process.wait()
        self.ended.set()
        self.answered.set()


def local_setup() -> list[str]:
    """Lines that give another host, or a job, the programs and modules of this process."""
    lines = [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]
    modules = os.environ.get("PYTHONPATH")
    return [*lines, f"export PYTHONPATH={shlex.quote(modules)}"] if modules else lines
