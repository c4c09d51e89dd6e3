"""Ray on a list of hosts by ssh: one connection a host, which carries its token, its lease and its orders.

``streamrl launch ssh`` calls ``run_over_ssh`` in its process. ``submit.cluster_host`` runs on each host and ends with
the connection. No process is left when ``run_over_ssh`` returns."""

from __future__ import annotations

import base64
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
from types import MappingProxyType

import anyio
from anyio.abc import TaskGroup
from anyio.streams.text import TextReceiveStream
from msgspec import Struct

from streamrl.base.errors import raise_problems
from streamrl.base.types import TextMapping
from streamrl.cli.submit.ray_start import Work, host_command

REACH_S = 10.0
"""Seconds in which every host has to accept the connection."""
_BEAT_S = 2.0
_END_S = 45.0
_HELLO = "streamrl-host"
_SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=12")
"""A connection ends after a minute without an answer: Ray waits as long for its head."""
HERE = ("localhost", "127.0.0.1")


class SshJob(Struct, frozen=True, kw_only=True):
    """A run on ``hosts``, named as for ssh; the first host has Ray's head and runs ``work``.

    ``hosts``: names of hosts; ``localhost`` is this one.
    ``setup``: shell lines that each host runs first.
    ``variables``: environment variables of the host's program and of all that it starts. They go over the connection,
    as the token does: every user of a host sees arguments.
    ``folder``: working directory on each host, for relative paths of the recipe."""

    work: Work
    hosts: Sequence[str]
    folder: Path
    setup: Sequence[str]
    port: int
    variables: TextMapping = MappingProxyType({})
    gpus: int | None = None
    interface: str = ""


def host_scripts(job: SshJob) -> list[str]:
    """The script of each host, for bash. No script contains the token or the variables."""
    scripts = []
    for rank in range(len(job.hosts)):
        arguments = ["--rank", str(rank), "--nodes", str(len(job.hosts)), "--port", str(job.port), "--lease"]
        if job.gpus is not None:
            arguments += ["--gpus", str(job.gpus)]
        if job.interface:
            arguments += ["--interface", job.interface]
        lines = [
            f'printf "\\n{_HELLO} %s\\n" "${{SSH_CONNECTION:-}}"',
            f"cd {shlex.quote(str(job.folder))} || exit 1",
            *job.setup,
        ]
        scripts.append("\n".join([*lines, f"exec {shlex.join(host_command(arguments, job.work))}"]))
    return scripts


def ssh_command(host: str, script: str) -> list[str]:
    """The command that runs ``script`` on ``host``."""
    if host in HERE:
        return ["bash", "-c", script]
    # One line without quotes of its own: the login shell there may be sh, bash, zsh, fish or csh.
    encoded = base64.b64encode(script.encode()).decode()
    return ["ssh", *_SSH, "--", host, f"""exec bash -c 'eval "$(echo {encoded} | base64 -d)"'"""]


async def run_over_ssh(job: SshJob) -> int:
    """Run ``job`` and print the output of its hosts. The first Ctrl-C or SIGTERM drains the run, the second ends it.
    Returns the exit code of the run. Raises ``RecipeError`` where hosts cannot be reached: then nothing was started."""
    token = secrets.token_hex(32)
    async with anyio.create_task_group() as tasks:
        hosts = [
            _Host(name, ssh_command(name, script)) for name, script in zip(job.hosts, host_scripts(job), strict=True)
        ]
        try:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
                for host in hosts:
                    await host.open(tasks)
                with anyio.move_on_after(REACH_S):
                    for host in hosts:
                        await host.answered.wait()
                raise_problems([f"{host.name}: {host.failure()}" for host in hosts if host.connection is None])
                head = _head_address(hosts)
                for host in hosts:
                    facts = {"token": token, "head": head, "variables": dict(job.variables)}
                    await host.send(json.dumps(facts) + "\n")
                    tasks.start_soon(host.beat)
                tasks.start_soon(_pass_on, signals, hosts[0])
                for host in hosts[1:]:
                    tasks.start_soon(_pass_on_failure, host, hosts[0])
                await hosts[0].finished.wait()
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as ends:
                    for host in hosts:
                        ends.start_soon(host.kill)
        tasks.cancel_scope.cancel()
    return hosts[0].code


def _head_address(hosts: Sequence[_Host]) -> str:
    """Address of the first host by its own ssh server; where the first host is this one, by the ssh server of another
    host."""
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
    """Tell the first host when ``host`` fails, so that it does not wait for it. A run that has begun goes on."""
    await host.finished.wait()
    if host.code:
        print(f"{host.name}: ended with exit code {host.code}", flush=True)
        await head.send("f\n")


class _Host:
    """One host of the job. ``connection``: addresses and ports of the connection, from its ssh server (empty for this
    host); None before the host has answered."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.connection: list[str] | None = None
        self.answered = anyio.Event()
        self.finished = anyio.Event()
        self.code = 1
        self._command = command
        self._messages: list[str] = []
        self._began_s = time.monotonic()

    async def open(self, tasks: TaskGroup) -> None:
        """Connect, and print the output of the host from now on."""
        # A session of its own: the terminal's Ctrl-C is an order for the run, and must not cut the connections.
        self._process = await anyio.open_process(self._command, stderr=-2, start_new_session=True)
        tasks.start_soon(self._listen)

    def failure(self) -> str:
        """The reason why the host did not answer."""
        message = self._messages[-1] if self._messages else f"no answer within {REACH_S:g} s"
        return f"{message} (`{shlex.join(['ssh', *_SSH[:2], self.name, 'true'])}` has to succeed)"

    async def send(self, text: str) -> None:
        """Write to the stdin of the host's program, if the program still reads."""
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await self._process.stdin.send(text.encode())

    async def beat(self) -> None:
        """Renew the lease of the host until its program ends."""
        while not self.finished.is_set():
            await self.send("\n")
            await anyio.sleep(_BEAT_S)

    async def kill(self) -> None:
        """Order the host's program to end; where it does not end, cut the connection, which ends its lease."""
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
        unfinished = ""
        async for text in TextReceiveStream(self._process.stdout, errors="replace"):
            *lines, unfinished = (unfinished + text).split("\n")
            for line in lines:
                if self.connection is None and line.startswith(_HELLO):
                    self.connection = line.split()[1:]
                    print(f"{self.name}: reached ({time.monotonic() - self._began_s:.1f} s)", flush=True)
                    self.answered.set()
                elif self.connection is None:
                    self._messages.append(line.strip())
                else:
                    print(line, flush=True)
        self.code = await self._process.wait()
        self.finished.set()
        self.answered.set()


def local_setup() -> list[str]:
    """Lines that give another host, or a job, the programs and modules of this process."""
    lines = [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]
    modules = os.environ.get("PYTHONPATH")
    if modules:
        lines.append(f"export PYTHONPATH={shlex.quote(modules)}")
    return lines
