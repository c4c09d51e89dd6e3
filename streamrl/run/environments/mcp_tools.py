"""Tools of MCP servers over stdio.

An environment worker has one process of each server, which its trajectories share and which ends with the worker. A
process that has ended is started again at the next call. ``worker.py`` runs the servers of a recipe;
``environment_forms.py`` lists their tools for the dry run. Both import this file only for recipes with such tools,
because mcp is optional."""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import anyio
import anyio.abc
from msgspec import json

from streamrl.base.errors import RecipeError, leaves
from streamrl.base.run_process import last_line
from streamrl.base.types import TextsByName
from streamrl.recipe.environment import with_run_python
from streamrl.rewards.user_variables import variables_of_user_code
from streamrl.run.environments.tools import MachineError, Tool, ToolFailedError

try:
    from mcp import ClientSession, MCPError, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.types import CONNECTION_CLOSED, PaginatedRequestParams
    from mcp.types import Tool as ListedTool
except ImportError as error:
    raise RecipeError(f"environment.tools: MCP servers need mcp ({error}): pip install 'streamrl[mcp]'") from None

MOST_STARTS = 4
"""Largest number of starts of a server in which it answers no call, the first start included."""
_START_S = 30.0
_PING_S = 10.0  # time to answer a ping after a call that took too long
_ROOT = str(Path(__file__).resolve().parents[3])
# Leader of the process group of a server; it ends the group when the server or the worker ends.
_GUARD = """
import os, signal, subprocess, sys
root, parent, *command = sys.argv[1:]
sys.path.append(root)
from streamrl.base.run_process import PR_SET_PDEATHSIG, die_with, set_process_option
group = os.getpid()
signal.signal(signal.SIGTERM, lambda *_: os.killpg(group, signal.SIGKILL))
if sys.platform == "linux":
    set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(parent):
    subprocess.run(command, preexec_fn=lambda: die_with(group))
os.killpg(group, signal.SIGKILL)
"""


def list_tools(commands: Sequence[Sequence[str]], variables: Sequence[str] = ()) -> list[Tool]:
    """Start servers with ``variables`` (see ``opened_servers``), list their tools, and end them. Raises
    ``RecipeError``."""

    async def list_and_end(errors: TextIO) -> list[Tool]:
        async with opened_servers(commands, errors, variables) as tools:
            return tools

    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            return anyio.run(list_and_end, errors)
        except RecipeError as error:
            text = last_line(errors.fileno())
            if not text:
                raise
            raise RecipeError(f"{error} (its stderr: {text})") from None


@asynccontextmanager
async def opened_servers(
    commands: Sequence[Sequence[str]], errors: TextIO, variables: Sequence[str] = ()
) -> AsyncIterator[list[Tool]]:
    """Run servers during the block, and list their tools. ``errors``: file of their stderr; ``variables``: names of
    environment variables that the servers get beside those that programs need. Raises ``RecipeError``."""
    environment = variables_of_user_code((), variables)
    problem = ""  # raised below, where the task group does not wrap it
    async with anyio.create_task_group() as nursery:
        servers = [_Server(with_run_python(command), nursery, errors, environment) for command in commands]
        try:
            for server in servers:
                await server.session()
            yield [tool for server in servers for tool in server.tools]
        except MachineError as error:
            problem = f"environment.tools: {error}"
        finally:
            nursery.cancel_scope.cancel()
    if problem:
        raise RecipeError(problem)


class _Server:
    """An MCP server. ``tools``: tools that its first process listed."""

    def __init__(
        self, command: Sequence[str], nursery: anyio.abc.TaskGroup, errors: TextIO, environment: TextsByName
    ) -> None:
        self._command = command
        self._name = f'"mcp:{shlex.join(command)}"'
        self._environment = environment
        self._nursery = nursery
        self._errors = errors
        self.tools: list[Tool] = []
        self._starting = anyio.Lock()
        self._starts = 0
        self._end = anyio.Event()
        self._session: ClientSession
        self._writes: Any = None  # stream to the server, which the session closes when the server closes its output

    async def session(self) -> ClientSession:
        """Return the session of the running process; start a process where none runs. Raises ``MachineError``."""
        async with self._starting:
            if not self._is_running():
                self._end.set()
                if self._starts == MOST_STARTS:
                    raise MachineError(f"{self._name} has ended too often, and is not started again")
                self._starts += 1
                # The process of a call that is cancelled here is started all the same, for the next call.
                with anyio.CancelScope(shield=True):
                    try:
                        await self._nursery.start(self._run)
                    except Exception as error:  # noqa: BLE001 (a program of the user may cause any error)
                        reason = str(next(leaves(error))) or f"no answer within {_START_S:g} s"
                        raise MachineError(f"{self._name} did not list its tools: {reason}") from None
            return self._session

    def _is_running(self) -> bool:
        return bool(self._writes and not self._end.is_set() and self._writes.statistics().open_send_streams)

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool, and return its result. Raises ``ToolFailedError`` with the message of the server, and
        ``MachineError`` where there is no server."""
        session = await self.session()
        end = self._end
        try:
            result = await session.call_tool(tool, arguments)
        except anyio.get_cancelled_exc_class():  # perhaps because the call took too long
            self._nursery.start_soon(_check, session, end)
            raise
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise MachineError(f"{self._name} has ended during a call of {tool}") from None
            raise ToolFailedError(error.message) from None
        self._starts = 0
        # The text is in a block itself or in its resource; pictures and sounds have none.
        blocks = [getattr(block, "resource", block) for block in result.content]
        texts = [
            getattr(block, "text", f"[{getattr(block, 'uri', None) or getattr(block, 'mime_type', None)} is left out]")
            for block in blocks
        ]
        if not blocks and result.structured_content is not None:
            texts.append(json.encode(result.structured_content).decode())
        text = "\n".join(filter(None, texts))
        if result.is_error:
            raise ToolFailedError(text or "the server of the tool gives no reason")
        return text

    async def _run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Run a process until ``_end`` is set."""
        if shutil.which(self._command[0]) is None:
            raise FileNotFoundError(
                f"there is no command {self._command[0]}: install it, or write its path (of a server at an address: "
                "the command of a bridge over stdio)"
            )
        guard = ["-I", "-S", "-c", _GUARD, _ROOT, str(os.getpid()), *self._command]
        server = StdioServerParameters(
            command=sys.executable, args=guard, env=self._environment, encoding_error_handler="replace"
        )
        async with stdio_client(server, self._errors) as (reads, writes), ClientSession(reads, writes) as session:
            with anyio.fail_after(_START_S):
                await session.initialize()
                page = await session.list_tools()
                listed = page.tools
                while page.next_cursor:
                    page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
                    listed += page.tools
            self.tools = self.tools or [self._tool(tool) for tool in listed]
            self._session = session
            self._writes = writes
            end = anyio.Event()
            self._end = end
            task_status.started()
            await end.wait()

    def _tool(self, tool: ListedTool) -> Tool:
        parameters = {"type": "object", "properties": {}} | tool.input_schema
        described = {"name": tool.name, "description": inspect.cleandoc(tool.description or tool.name)}
        schema = {"type": "function", "function": described | {"parameters": parameters}}
        return Tool(tool.name, schema, None, partial(self.call, tool.name))


async def _check(session: ClientSession, end: anyio.Event) -> None:
    """End a process that does not answer a ping either, after a call that took too long."""
    with anyio.move_on_after(_PING_S) as scope, suppress(MCPError):
        await session.send_ping()
    if scope.cancelled_caught:
        end.set()
