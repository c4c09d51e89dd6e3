"""The agent of a recipe: a program for each trajectory, or processes that take many. Each has the address and a key of
the endpoint, and is ended with all that it started.

A process that takes many (``environment.agent_tasks``) is given ``{"key": KEY, "row": {...}}`` of each in a line of its
stdin, and ends it by a line ``{"key": KEY, "reward": 1.0}`` (or ``error``, a text) of its stdout. Requests of one that
is late, or was cancelled, are refused, and the process is ended where it has none but such."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.recipe.environment import Environment, with_run_python
from streamrl.rewards.environment import passed_environment
from streamrl.run.environments.endpoint_server import EndpointServer
from streamrl.run.environments.endpoint_session import EndpointSession

MOST_OUTPUT = 64 << 20
"""Bytes that an agent may write to stdout, and to stderr; in a line, where it takes many trajectories."""
_KEPT, _SHOWN, _LEFT_OPEN_S, _GRACE_S = 1 << 16, 2_000, 1.0, 5.0
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


class _Said(msgspec.Struct):
    key: str
    error: str = ""


class Agents:
    """The agent of ``environment``, and the endpoint at which it reaches the model while it is ``serving``."""

    def __init__(self, environment: Environment) -> None:
        self._command, self._variables = with_run_python(environment.agent), environment.agent_variables
        self._at_once, self._server = environment.agent_tasks, EndpointServer()
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
            if self._at_once:
                return await self._run_beside_others(session.key, columns)
            alone, out = _Process(), bytearray()
            alone.lines.put_nowait(msgspec.json.encode(columns) + b"\n")
            alone.lines.put_nowait(b"")
            await self._run_program(session.key, alone, partial(_read, kept=out, limit=alone.limit))
            return reward_of(bytes(out))

    async def _run_beside_others(self, key: str, columns: Mapping[str, Any]) -> float | None:
        process = next((one for one in self._processes if one.takes(self._at_once)), None)
        if process is None:
            self._processes.append(process := _Process())
            self._group.start_soon(self._live, process)
        ended: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        process.open[key] = ended
        process.lines.put_nowait(msgspec.json.encode({"key": key, "row": columns}) + b"\n")
        try:
            return await ended
        finally:
            if process.open and all(one.done() for one in process.open.values()):
                process.limit.cancel()

    async def _live(self, process: _Process) -> None:
        failure = "the agent ended before this trajectory"
        try:
            await self._run_program(secrets.token_hex(16), process, process.take)
        except AgentFailedError as error:
            failure = str(error)
        finally:
            self._processes.remove(process)
            for ended in [one for one in process.open.values() if not one.done()]:
                ended.set_exception(AgentFailedError(failure))

    async def _run_program(self, key: str, given: _Process, take: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Run the program until it ends, or ``given.limit`` is cancelled. Its environment has what programs need of the
        worker's and the recipe names, and address and key where clients of OpenAI and Anthropic look for them."""
        command = [sys.executable, "-I", "-S", "-c", _STARTER, str(_ROOT), str(os.getpid()), *self._command]
        own, url, limit = passed_environment((), self._variables), self._server.base_url, given.limit
        own |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
        own |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        local = own.get("NO_PROXY") or own.get("no_proxy") or "localhost"
        own |= dict.fromkeys(("NO_PROXY", "no_proxy"), f"{local},127.0.0.1,localhost")
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(command, env=own, start_new_session=True)
        errors = bytearray()
        async with process, anyio.create_task_group() as tasks:
            tasks.start_soon(given.give, process.stdin)
            tasks.start_soon(take, process.stdout)
            tasks.start_soon(partial(_read, kept=errors, limit=limit), process.stderr)
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
    """A process as its trajectories know it. ``lines``: for its stdin, an empty one ends it; ``open``: by key, the ends
    of trajectories that it has not said, cancelled where the trajectory is."""

    def __init__(self) -> None:
        self.lines, self.limit = asyncio.Queue[bytes](), anyio.CancelScope()
        self.open: dict[str, asyncio.Future[float | None]] = {}

    def takes(self, at_once: int) -> bool:
        return len(self.open) < at_once and not self.limit.cancel_called

    async def give(self, stdin: Any) -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # an agent need not read it
            while line := await self.lines.get():
                await stdin.send(line)
            await stdin.aclose()

    async def take(self, stdout: Any) -> None:
        lines = BufferedByteReceiveStream(stdout)
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.IncompleteRead):
            try:
                while True:
                    self._end(await lines.receive_until(b"\n", MOST_OUTPUT))
            except anyio.DelimiterNotFound:
                self.limit.cancel()

    def _end(self, line: bytes) -> None:
        """End the trajectory that a line names."""
        with suppress(*UNDECODABLE):
            said = msgspec.json.decode(line, type=_Said)
            if (ended := self.open.pop(said.key, None)) is not None and not ended.done():
                if said.error:
                    ended.set_exception(AgentFailedError(said.error[:_SHOWN]))
                else:
                    ended.set_result(reward_of(line))


def reward_of(output: bytes) -> float | None:
    """The finite number in the last line of ``output``, or in ``reward`` of the JSON object there; else None."""
    try:
        found = msgspec.json.decode(output.strip().rpartition(b"\n")[2])
        value = found.get("reward") if isinstance(found, dict) else found
        reward = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except UNDECODABLE:
        return None
    return reward if math.isfinite(reward) else None


async def _read(stream: Any, *, kept: bytearray, limit: anyio.CancelScope) -> None:
    """Read an output to its end, so that the agent never waits, and keep its last bytes."""
    written = 0
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async for part in stream:
            written += len(part)
            kept[:] = (kept + part)[-_KEPT:]
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
