"""The programs of an ``agent`` environment: one program for each trajectory, or processes that take many trajectories.

``worker.py`` makes the ``Agents`` of an environment worker, and the episodes of ``environment_forms.py`` call
``Agents.run``. A program gets the address and a key of the worker's endpoint, and is ended with all processes that it
started.

A process that takes many trajectories (``environment.agent_tasks``) reads a line ``{"key": KEY, "row": {...}}`` from
stdin for each, and ends a trajectory with a line ``{"key": KEY, "reward": 1.0}`` on stdout; ``"error": TEXT`` in place
of the reward is a failure. A process whose remaining trajectories are all late or cancelled is ended."""

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
from streamrl.rewards.user_variables import variables_of_user_code
from streamrl.run.environments.endpoint_server import EndpointServer
from streamrl.run.environments.endpoint_session import EndpointSession

MOST_OUTPUT = 64 << 20
"""Largest number of bytes that an agent may write to stderr, and to stdout where stdout is not read by lines."""
_TAIL_BYTES = 1 << 16  # end of an output that is held in memory
_MESSAGE_CHARACTERS = 2_000
_DRAIN_S = 1.0  # time to read outputs that another process still holds open when the agent has ended
_GRACE_S = 5.0  # time between SIGTERM and SIGKILL
_ROOT = Path(__file__).resolve().parents[3]
# Becomes the agent's program, after it has arranged that the agent dies with the worker.
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
    """Raised where an agent reported an error, or did not end by itself with exit code 0; the message has the error, or
    the end of its stderr."""


class Agents:
    """The programs of ``environment``, and the endpoint at which they reach the model inside of ``serving``."""

    def __init__(self, environment: Environment) -> None:
        self._command = with_run_python(environment.agent)
        self._variables = environment.variables
        self._tasks_a_process = environment.agent_tasks
        self._server = EndpointServer(host=environment.agent_host, address=environment.agent_address)
        self._processes: list[_Process] = []
        self._group: anyio.abc.TaskGroup

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer requests in the block; all processes end with it."""
        async with anyio.create_task_group() as self._group:
            self._group.start_soon(self._server.serve)
            yield
            self._group.cancel_scope.cancel()

    async def run(self, session: EndpointSession, columns: Mapping[str, Any]) -> float | None:
        """Give a row and the key of ``session`` to an agent, and return the reward (None: the agent gave none). When
        the call ends, cancelled or not, a program for one trajectory has ended with all its processes. Raises
        ``AgentFailedError``."""
        with self._server.serving(session):
            if self._tasks_a_process:
                return await self._run_in_shared_process(session.key, columns)
            end_of_input = b""
            process = _Process(msgspec.json.encode(columns) + b"\n", end_of_input)
            await self._run_program(session.key, process)
            return reward_of(bytes(process.output))

    async def _run_in_shared_process(self, key: str, columns: Mapping[str, Any]) -> float | None:
        process = self._process_with_room()
        reward = asyncio.Future[float | None]()
        process.rewards[key] = reward
        process.lines.put_nowait(msgspec.json.encode({"key": key, "row": columns}) + b"\n")
        try:
            return await reward
        finally:
            # A reward that is done and has not been removed belongs to a cancelled trajectory, which the agent may
            # still be running.
            if process.rewards and all(future.done() for future in process.rewards.values()):
                process.limit.cancel()

    def _process_with_room(self) -> _Process:
        for process in self._processes:
            if len(process.rewards) < self._tasks_a_process and not process.limit.cancel_called:
                return process
        process = _Process()
        self._processes.append(process)
        self._group.start_soon(self._run_shared_process, process)
        return process

    async def _run_shared_process(self, process: _Process) -> None:
        """Run a process that takes many trajectories. Trajectories that it has when it ends have failed."""
        failure = "the agent ended before this trajectory"
        no_trajectory = secrets.token_hex(16)
        try:
            await self._run_program(no_trajectory, process, process.end_trajectory)
        except AgentFailedError as error:
            failure = str(error)
        finally:
            self._processes.remove(process)
            for reward in process.rewards.values():
                if not reward.done():
                    reward.set_exception(AgentFailedError(failure))

    async def _run_program(self, key: str, program: _Process, on_line: Callable[[bytes], None] | None = None) -> None:
        """Run the program until it ends, or ``program.limit`` is cancelled. ``on_line``: function that is called with
        each line of stdout. Raises ``AgentFailedError``."""
        command = [sys.executable, "-I", "-S", "-c", _STARTER, str(_ROOT), str(os.getpid()), *self._command]
        limit = program.limit
        with anyio.CancelScope(shield=True):  # a start that is cancelled half-way would leave a process
            process = await anyio.open_process(command, env=self._program_variables(key), start_new_session=True)
        errors = bytearray()
        async with process, anyio.create_task_group() as tasks:
            tasks.start_soon(program.write_lines, process.stdin)
            tasks.start_soon(_read, process.stdout, program.output, limit, on_line)
            tasks.start_soon(_read, process.stderr, errors, limit)
            try:
                with limit:
                    await process.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await _end(process, key)
            tasks.cancel_scope.deadline = anyio.current_time() + _DRAIN_S
        if limit.cancelled_caught:
            raise _failure(f"wrote more than {MOST_OUTPUT} bytes", errors)
        if process.returncode:
            raise _failure(f"ended with {process.returncode}", errors)

    def _program_variables(self, key: str) -> dict[str, str]:
        """Return the environment variables of a program: variables of the worker that programs need or the recipe
        names, and the address and key for clients of both APIs."""
        variables = variables_of_user_code((), self._variables)
        url = self._server.base_url
        variables |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
        variables |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        # Marks the processes that the program starts: many harnesses hide API keys from these.
        variables["STREAMRL_AGENT"] = key
        no_proxy = variables.get("NO_PROXY") or variables.get("no_proxy") or "localhost"
        no_proxy = f"{no_proxy},127.0.0.1,localhost,{self._server.address}"
        return variables | {"NO_PROXY": no_proxy, "no_proxy": no_proxy}


def _failure(end: str, errors: bytearray) -> AgentFailedError:
    """Return an error with the end of stderr. Its last line, the message of an exception, comes first."""
    lines = errors.decode(errors="replace").strip()[-_MESSAGE_CHARACTERS:].splitlines()
    message = f"the agent {end}"
    if not lines:
        return AgentFailedError(message)
    *earlier_lines, last_line = lines
    return AgentFailedError("\n".join([f"{message}: {last_line}", *earlier_lines]))


class _Process:
    """One process of the agent.

    ``lines``: queue of lines for its stdin; an empty one closes stdin;
    ``limit``: scope whose cancellation ends the process;
    ``output``: end of its stdout;
    ``rewards``: future reward of each of its trajectories by key, until the agent ends the trajectory; a future is
    cancelled with its trajectory."""

    def __init__(self, *lines: bytes) -> None:
        self.lines = asyncio.Queue[bytes]()
        self.limit = anyio.CancelScope()
        self.output = bytearray()
        self.rewards: dict[str, asyncio.Future[float | None]] = {}
        for line in lines:
            self.lines.put_nowait(line)

    async def write_lines(self, stdin: Any) -> None:
        """Write ``lines`` to the process, which need not read them."""
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            while line := await self.lines.get():
                await stdin.send(line)
            await stdin.aclose()

    def end_trajectory(self, line: bytes) -> None:
        """End the trajectory that a line of stdout names; other lines are ignored."""
        with suppress(*UNDECODABLE):
            message = msgspec.json.decode(line, type=dict[str, Any])
            reward = self.rewards.pop(str(message.get("key")), None)
            if reward is None or reward.done():
                return
            if error := message.get("error"):
                reward.set_exception(AgentFailedError(str(error)[:_MESSAGE_CHARACTERS]))
            else:
                reward.set_result(reward_of(line))


def reward_of(output: bytes) -> float | None:
    """Return the finite number in the last line of ``output``, or in ``reward`` of a JSON object there; else None."""
    with suppress(*UNDECODABLE):
        value = msgspec.json.decode(output.strip().rpartition(b"\n")[2])
        if isinstance(value, dict):
            value = value.get("reward")
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


async def _read(
    stream: Any, tail: bytearray, limit: anyio.CancelScope, on_line: Callable[[bytes], None] | None = None
) -> None:
    """Read an output to its end, so that the agent never waits for a reader. ``tail``: end of the output, which is
    filled; ``limit``: scope that is cancelled where the output is too large; ``on_line``: function that is called with
    each line, and lifts the limit."""
    written = 0
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async for part in stream:
            tail += part
            if on_line is None:
                written += len(part)
                if written > MOST_OUTPUT:
                    limit.cancel()
            else:
                *lines, incomplete_line = tail.split(b"\n")
                tail[:] = incomplete_line
                for line in lines:
                    on_line(bytes(line))
            tail[:] = tail[-_TAIL_BYTES:]


async def _end(process: anyio.abc.Process, key: str) -> None:
    """End the process group, then processes that have left the group: these have the key in their variables."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with anyio.move_on_after(_GRACE_S if number is signal.SIGTERM else math.inf):
            await process.wait()
    with anyio.move_on_after(_GRACE_S):
        while await anyio.to_thread.run_sync(_kill_marked, key.encode()):  # noqa: ASYNC110 (polled: they are no children)
            await anyio.sleep(0.01)


def _kill_marked(key: bytes) -> bool:
    """Kill all processes that have ``key`` in their variables. Return whether there were any."""
    any_marked = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if key in path.read_bytes():
                any_marked = True
                os.kill(int(path.parent.name), signal.SIGKILL)
    return any_marked
