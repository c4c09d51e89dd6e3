"""The agent of a recipe: a program for each trajectory, or processes that take many. Each has the address and a key of
the endpoint, and is ended with all that it started.

A process that takes many (``environment.agent_tasks``) is given ``{"key": KEY, "row": {...}}`` of each in a line of its
stdin, and ends it by a line ``{"key": KEY, "reward": 1.0}`` (or ``error``, a text) of its stdout. Requests of one that
is late, or was cancelled, are refused, and a process with only such trajectories is ended."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.recipe.environment import Environment, with_run_python
from streamrl.rewards.environment import passed_environment
from streamrl.run.environments.endpoint_server import EndpointServer
from streamrl.run.environments.endpoint_session import EndpointSession

MOST_OUTPUT = 64 << 20
"""Bytes that an agent may write to stderr, and to stdout where that is not read as lines."""
_KEPT = 1 << 16
_SHOWN = 2_000
_LEFT_OPEN_S = 1.0
_GRACE_S = 5.0
_ROOT = Path(__file__).resolve().parents[3]
_STARTER = """
import os, sys
root, parent, *command = sys.argv[1:]
sys.path.insert(0, root)
from streamrl.base.run_process import die_with
die_with(int(parent))
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]} cannot be started: {error}")
"""


class AgentFailedError(StreamRLError):
    """An agent that did not end by itself with exit code 0; the message has the end of its stderr."""


class Agents:
    """The agent of ``environment``, and the endpoint at which it reaches the model while it is ``serving``."""

    def __init__(self, environment: Environment) -> None:
        self._command = with_run_python(environment.agent)
        self._variables = environment.agent_variables
        self._at_once = environment.agent_tasks
        self._server = EndpointServer()
        self._processes: list[_Process] = []
        self._group: anyio.abc.TaskGroup

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer requests in the block, with which all processes end."""
        async with anyio.create_task_group() as self._group:
            self._group.start_soon(self._server.serve)
            yield
            self._group.cancel_scope.cancel()

    async def run(self, session: EndpointSession, columns: Mapping[str, Any]) -> float | None:
        """Give a row and the key of ``session`` to the agent, and return its reward (None: it said none). Nothing is
        left of a program for one trajectory, also where the call is cancelled. Raises ``AgentFailedError``."""
        with self._server.serving(session):
            if not self._at_once:
                alone = _Process(msgspec.json.encode(columns) + b"\n", b"")
                await self._run_program(session.key, alone)
                return reward_of(bytes(alone.out))
            free = [one for one in self._processes if len(one.open) < self._at_once and not one.limit.cancel_called]
            if not free:
                self._processes += (free := [_Process()])
                self._group.start_soon(self._live, free[0])
            ended = free[0].open[session.key] = asyncio.Future[float | None]()
            free[0].lines.put_nowait(msgspec.json.encode({"key": session.key, "row": columns}) + b"\n")
            try:
                return await ended
            finally:
                if (others := free[0].open.values()) and all(one.done() for one in others):
                    free[0].limit.cancel()

    async def _live(self, process: _Process) -> None:
        failure = "the agent ended before this trajectory"
        try:
            await self._run_program(secrets.token_hex(16), process, process.end)
        except AgentFailedError as error:
            failure = str(error)
        finally:
            self._processes.remove(process)
            for ended in [one for one in process.open.values() if not one.done()]:
                ended.set_exception(AgentFailedError(failure))

    async def _run_program(self, key: str, given: _Process, end: Callable[[bytes], None] | None = None) -> None:
        """Run the program until it ends, or ``given.limit`` is cancelled; ``end`` takes lines of its stdout. Of the
        worker's environment it has what programs need and the recipe names, with address and key for its clients."""
        command = [sys.executable, "-I", "-S", "-c", _STARTER, str(_ROOT), str(os.getpid()), *self._command]
        own = passed_environment((), self._variables)
        url = self._server.base_url
        limit = given.limit
        own |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
        own |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "STREAMRL_AGENT": key}  # harnesses hide API keys
        local = own.get("NO_PROXY") or own.get("no_proxy") or "localhost"
        own |= dict.fromkeys(("NO_PROXY", "no_proxy"), f"{local},127.0.0.1,localhost")
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(command, env=own, start_new_session=True)
        errors = bytearray()
        async with process, anyio.create_task_group() as tasks:
            tasks.start_soon(given.give, process.stdin)
            tasks.start_soon(_read, process.stdout, given.out, limit, end)
            tasks.start_soon(_read, process.stderr, errors, limit)
            try:
                with limit:
                    await process.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process, key)
            tasks.cancel_scope.deadline = anyio.current_time() + _LEFT_OPEN_S
        if (flooded := limit.cancelled_caught) or process.returncode:
            *before, last = errors.decode(errors="replace").strip()[-_SHOWN:].splitlines() or [""]
            how = f"wrote more than {MOST_OUTPUT} bytes" if flooded else f"ended with {process.returncode}"
            raise AgentFailedError("\n".join([": ".join(filter(None, (f"the agent {how}", last))), *before]))


class _Process:
    """One process of the agent. ``lines``: to be written to its stdin, an empty one closes it; ``out``: the end of its
    stdout; ``open``: by key, the future reward of each trajectory that it has; cancelled with the trajectory."""

    def __init__(self, *lines: bytes) -> None:
        self.lines = asyncio.Queue[bytes]()
        self.limit = anyio.CancelScope()
        self.out = bytearray()
        self.open: dict[str, asyncio.Future[float | None]] = {}
        for line in lines:
            self.lines.put_nowait(line)

    async def give(self, stdin: Any) -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # an agent need not read it
            while line := await self.lines.get():
                await stdin.send(line)
            await stdin.aclose()

    def end(self, line: bytes) -> None:
        """End the trajectory that a line names."""
        with suppress(*UNDECODABLE):
            said = msgspec.json.decode(line, type=dict[str, Any])
            if (ended := self.open.pop(str(said.get("key")), None)) is not None and not ended.done():
                if error := said.get("error"):
                    ended.set_exception(AgentFailedError(str(error)[:_SHOWN]))
                else:
                    ended.set_result(reward_of(line))


def reward_of(output: bytes) -> float | None:
    """The finite number in the last line of ``output``, or in ``reward`` of the JSON object there; else None."""
    with suppress(*UNDECODABLE):
        found = msgspec.json.decode(output.strip().rpartition(b"\n")[2])
        value = found.get("reward") if isinstance(found, dict) else found
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


async def _read(
    stream: Any, kept: bytearray, limit: anyio.CancelScope, take: Callable[[bytes], None] | None = None
) -> None:
    """Read an output to its end, so that the agent never waits. Keep its last bytes, or ``take`` its lines."""
    written = 0
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async for part in stream:
            kept += part
            if take is not None:
                *lines, kept[:] = kept.split(b"\n")
                for line in lines:
                    take(bytes(line))
            kept[:] = kept[-_KEPT:]
            written = written + len(part) if take is None else 0
            if written > MOST_OUTPUT:
                limit.cancel()


async def _end(process: anyio.abc.Process, key: str) -> None:
    """End the process group, then processes that have left it: they have the key in their environment."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with anyio.move_on_after(_GRACE_S if number is signal.SIGTERM else math.inf):
            await process.wait()
    with anyio.move_on_after(_GRACE_S):
        while await anyio.to_thread.run_sync(_kill_marked, key.encode()):  # noqa: ASYNC110 (ends are polled)
            await anyio.sleep(0.01)


def _kill_marked(key: bytes) -> bool:
    found = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if key in path.read_bytes():
                found = True
                os.kill(int(path.parent.name), signal.SIGKILL)
    return found
