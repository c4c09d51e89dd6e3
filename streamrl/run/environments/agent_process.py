"""The programs of an ``agent`` environment: one program for each trajectory, or processes that take many trajectories.

``worker.py`` makes the ``Agents`` of an environment worker, and the episodes of ``environment_forms.py`` call
``Agents.run``. A program gets the address and a key of the worker's endpoint, and is ended with all processes that it
started.

A process that takes many trajectories (``environment.agent_tasks``) reads a line ``{"key": KEY, "row": {...}}`` from
stdin for each, and ends a trajectory with a line ``{"key": KEY, "reward": 1.0}`` on stdout; ``"error": TEXT`` in place
of the reward is a failure. A process whose remaining trajectories are all late or cancelled is ended."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread
from msgspec import Struct, json

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.types import JsonMapping, TextsByName
from streamrl.recipe.environment import Environment, with_run_python
from streamrl.rewards.user_variables import variables_of_user_code
from streamrl.run.environments.agents.printed_reward import LARGEST_LINE, PrintedReward
from streamrl.run.environments.endpoint_server import EndpointServer
from streamrl.run.environments.endpoint_session import EndpointSession

MOST_OUTPUT = 64 << 20
"""Largest number of bytes that an agent may write to stderr, and to stdout where it takes one trajectory."""
_TAIL_BYTES = 1 << 16  # end of stderr that is held in memory
_MESSAGE_CHARACTERS = 2_000
_DRAIN_S = 1.0  # time to read outputs to their end when the agent has ended
_GRACE_S = 5.0  # time between SIGTERM and SIGKILL
# Runs the agent's program, and ends with its exit code when all processes below it have ended, also those with another
# session and other variables: orphans become its children. When it gets SIGTERM, it ends the program, and when the
# worker has ended, it kills it. It is a process of its own for each program, and so imports as little as it can.
_REAPER = """
import ctypes, glob, os, resource, signal, sys, time
parent, grace_s, *command = sys.argv[1:]
def become():
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")
if sys.platform != "linux":
    become()
prctl = ctypes.CDLL(None).prctl
expected = {signal.SIGTERM, signal.SIGCHLD}
mask = signal.pthread_sigmask(signal.SIG_BLOCK, expected)
prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(parent):
    sys.exit(1)
program = os.fork()
if not program:
    os.setsid()
    prctl(1, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    become()
null = os.open(os.devnull, os.O_RDWR)
for output in range(3):
    os.dup2(null, output)
status = 0
ends = False
kills_at = float("inf")
while True:
    try:
        child, code = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        break
    if child:
        if child == program:
            status, kills_at = code, 0.0
        continue
    if time.monotonic() >= kills_at:
        for path in glob.glob("/proc/[0-9]*/stat"):
            try:
                with open(path, "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        os.kill(int(path.split("/")[2]), signal.SIGKILL)
            except OSError:  # it has ended
                pass
    waits_s = 3600.0 if kills_at == float("inf") else 0.01
    received = signal.sigtimedwait(expected, waits_s)
    if received and received.si_signo == signal.SIGTERM and not ends:
        ends = True
        kills_at = min(kills_at, time.monotonic() + (float(grace_s) if os.getppid() == int(parent) else 0.0))
        try:
            os.killpg(program, signal.SIGTERM)
        except OSError:  # it has ended
            pass
code = os.waitstatus_to_exitcode(status)
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.kill(os.getpid(), -code)
os._exit(code)
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

    async def run(self, session: EndpointSession, columns: JsonMapping, printed: PrintedReward) -> None:
        """Give a row and the key of ``session`` to an agent, which fills ``printed``. When the call ends, cancelled or
        not, a program for one trajectory has ended with all its processes. Raises ``AgentFailedError``."""
        with self._server.serving(session):
            if self._tasks_a_process:
                await self._run_in_shared_process(session.key, columns, printed)
                return
            end_of_input = b""
            process = _Process(json.encode(columns) + b"\n", end_of_input, printed=printed)
            await self._run_program(session.key, process)

    async def _run_in_shared_process(self, key: str, columns: JsonMapping, printed: PrintedReward) -> None:
        process = self._process_with_room()
        end = asyncio.Future[None]()
        process.tasks[key] = _Task(printed, end)
        process.lines.put_nowait(json.encode({"key": key, "row": columns}) + b"\n")
        try:
            await end
        finally:
            # A task whose end is done and that has not been removed belongs to a cancelled trajectory, which the agent
            # may still be running.
            if process.tasks and all(task.end.done() for task in process.tasks.values()):
                process.scope.cancel()

    def _process_with_room(self) -> _Process:
        for process in self._processes:
            if len(process.tasks) < self._tasks_a_process and not process.scope.cancel_called:
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
            await self._run_program(no_trajectory, process)
        except AgentFailedError as error:
            failure = str(error)
        finally:
            self._processes.remove(process)
            for key in list(process.tasks):
                process.fail(key, failure)

    async def _run_program(self, key: str, program: _Process) -> None:
        """Run the program until it ends, or ``program.scope`` is cancelled. Raises ``AgentFailedError``."""
        command = [sys.executable, "-I", "-S", "-c", _REAPER, str(os.getpid()), str(_GRACE_S), *self._command]
        scope = program.scope
        folder = TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True)
        variables = self._program_variables(key) | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder.name)
        with anyio.CancelScope(shield=True):  # a start that is cancelled half-way would leave a process
            process = await anyio.open_process(command, env=variables, start_new_session=True)
        try:
            async with process, anyio.create_task_group() as tasks:
                tasks.start_soon(program.write_lines, process.stdin)
                tasks.start_soon(program.read, process.stdout)
                tasks.start_soon(program.read, process.stderr, program.errors)
                try:
                    with scope:
                        await process.wait()
                finally:
                    with anyio.CancelScope(shield=True), suppress(ProcessLookupError):
                        process.terminate()
                        await process.wait()
                tasks.cancel_scope.deadline = anyio.current_time() + _DRAIN_S
        finally:
            program.end_line()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(folder.cleanup)
        if scope.cancelled_caught:
            raise _failure(f"wrote more than {MOST_OUTPUT} bytes", program.errors)
        if process.returncode:
            raise _failure(f"ended with {process.returncode}", program.errors)

    def _program_variables(self, key: str) -> TextsByName:
        """Return the environment variables of a program: variables of the worker that programs need or the recipe
        names, and the address and key for clients of both APIs."""
        variables = variables_of_user_code((), self._variables)
        url = self._server.base_url
        variables |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
        variables |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        no_proxy = variables.get("NO_PROXY") or variables.get("no_proxy") or "localhost"
        no_proxy = f"{no_proxy},127.0.0.1,localhost,{self._server.address}"
        return variables | {"NO_PROXY": no_proxy, "no_proxy": no_proxy}


def _failure(end: str, errors: bytearray) -> AgentFailedError:
    """Return an error with the end of stderr. Its last line, the message of an exception, comes first."""
    text = errors.decode(errors="replace").strip()[-_MESSAGE_CHARACTERS:]
    earlier_lines, _, last_line = text.rpartition("\n")
    return AgentFailedError(f"the agent {end}: {last_line}\n{earlier_lines}".rstrip("\n: "))


class _Task(NamedTuple):
    """A trajectory of a process that takes many. ``end``: future that is done when the agent has ended it, and
    cancelled with it."""

    printed: PrintedReward
    end: asyncio.Future[None]


class _TaskLine(Struct):
    """A line by which such a process ends a trajectory."""

    key: str
    error: Any = None


class _Process:
    """One process of the agent. ``printed``: reward that it prints; None: it takes many trajectories.

    ``lines``: queue of lines for its stdin; an empty one closes stdin;
    ``scope``: cancel scope whose cancellation ends the process;
    ``errors``: end of its stderr;
    ``tasks``: trajectories that it has, by key."""

    def __init__(self, *lines: bytes, printed: PrintedReward | None = None) -> None:
        self.lines = asyncio.Queue[bytes]()
        self.scope = anyio.CancelScope()
        self._printed = printed
        self._line = bytearray()
        self.errors = bytearray()
        self.tasks: dict[str, _Task] = {}
        for line in lines:
            self.lines.put_nowait(line)

    async def write_lines(self, stdin: Any) -> None:
        """Write ``lines`` to the process, which need not read them."""
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            while line := await self.lines.get():
                await stdin.send(line)
            await stdin.aclose()

    async def read(self, stream: Any, output: bytearray | None = None) -> None:
        """Read stdout by lines, or the end of another ``output``, to its end, so that the agent never waits for a
        reader."""
        written = 0
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async for part in stream:
                written += len(part)
                if written > MOST_OUTPUT and self._printed:  # of a process for many trajectories the end is held alone
                    self.scope.cancel()
                if output is not None:
                    output += part
                    output[:] = output[-_TAIL_BYTES:]
                    continue
                for text in part.splitlines(keepends=True):
                    self._line += text
                    # Of a longer line its start and its end are kept: one of them names the trajectory.
                    del self._line[LARGEST_LINE // 2 : -(LARGEST_LINE // 2) - 1]
                    if text.endswith((b"\n", b"\r")):
                        self.end_line()

    def end_line(self) -> None:
        """Take the line of stdout so far: at the end of the output it has no line break."""
        line = bytes(self._line)
        self._line.clear()
        if self._printed:
            self._printed.read(line)
        elif len(line) > LARGEST_LINE:
            for key in [key for key in self.tasks if key.encode() in line]:
                self.fail(key, f"the agent wrote a line of more than {LARGEST_LINE} bytes: shorten it")
        else:
            self._end_task(line)

    def fail(self, key: str, failure: str) -> None:
        """End the trajectory of ``key`` with a failure."""
        task = self.tasks.pop(key)
        if not task.end.done():
            task.end.set_exception(AgentFailedError(failure))

    def _end_task(self, line: bytes) -> None:
        """End the trajectory that a line of stdout names; other lines are ignored."""
        with suppress(*UNDECODABLE):
            message = json.decode(line, type=_TaskLine)
            if message.key not in self.tasks:
                return
            if message.error:
                self.fail(message.key, str(message.error)[:_MESSAGE_CHARACTERS])
                return
            task = self.tasks.pop(message.key)
            task.printed.read(line)
            if not task.end.done():
                task.end.set_result(None)
