"""Tools of MCP servers over stdio. A worker has one process of each server, which its trajectories share; it is started
again at a call where it has ended, and ends with the worker. Imported only for recipes with such tools."""

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
import msgspec

from streamrl.base.errors import RecipeError, leaves
from streamrl.base.run_process import PARENT_PID
from streamrl.recipe.environment import with_run_python
from streamrl.run.environments.tools import Tool, ToolFailedError

try:
    from mcp import ClientSession, MCPError, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.types import CONNECTION_CLOSED, PaginatedRequestParams
    from mcp.types import Tool as ListedTool
except ImportError as error:
    raise RecipeError(f"environment.tools: MCP servers need mcp ({error}): pip install 'streamrl[mcp]'") from None

MOST_STARTS = 4
"""Starts of a server without a call that it answered, the first among them."""
_START_S = 30.0
_PING_S = 10.0
_ROOT = str(Path(__file__).resolve().parents[3])
# Leads the process group of a server, and ends the group when the server or the worker ends.
_GUARD = """
import os, signal, subprocess, sys
root, parent, *command = sys.argv[1:]
sys.path.append(root)
from streamrl.base.run_process import PR_SET_PDEATHSIG, die_with, set_process_option
own = os.getpid()
signal.signal(signal.SIGTERM, lambda *_: os.killpg(own, signal.SIGKILL))
if sys.platform == "linux":
    set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(parent):
    subprocess.run(command, preexec_fn=lambda: die_with(own))
os.killpg(own, signal.SIGKILL)
"""


def list_tools(commands: Sequence[Sequence[str]]) -> list[Tool]:
    """Start servers, list their tools, and end them. Raises ``RecipeError``."""

    async def listed(errors: TextIO) -> list[Tool]:
        async with opened_servers(commands, errors) as tools:
            return tools

    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            return anyio.run(listed, errors)
        except RecipeError as error:
            errors.seek(0)
            last = "".join(f" (its stderr: {line[:200]})" for line in errors.read().splitlines()[-1:])
            raise RecipeError(f"{error}{last}") from None


@asynccontextmanager
async def opened_servers(commands: Sequence[Sequence[str]], errors: TextIO) -> AsyncIterator[list[Tool]]:
    """Run servers for the block, and list their tools. ``errors``: file of their stderr. Raises ``RecipeError``."""
    problem = ""
    async with anyio.create_task_group() as nursery:
        servers = [_Server(with_run_python(command), nursery, errors) for command in commands]
        try:
            for server in servers:
                await server.session()
            yield [tool for server in servers for tool in server.tools]
        except ToolFailedError as error:
            problem = f'environment.tools: "mcp:{shlex.join(server.command)}" {error}'
        finally:
            nursery.cancel_scope.cancel()
    if problem:
        raise RecipeError(problem)


class _Server:
    """An MCP server, as its tools need it. ``tools``: those that its first process listed."""

    def __init__(self, command: Sequence[str], nursery: anyio.abc.TaskGroup, errors: TextIO) -> None:
        self.command = command
        self._nursery = nursery
        self._errors = errors
        self.tools: list[Tool] = []
        self._starting = anyio.Lock()
        self._starts = 0
        self._end = anyio.Event()
        self._session: ClientSession
        self._writes: Any = None  # the session closes it where the server has closed its output

    async def session(self) -> ClientSession:
        """Return the session of a process that lives, started where none does. Raises ``ToolFailedError``."""
        async with self._starting:
            if not self._writes or self._end.is_set() or not self._writes.statistics().open_send_streams:
                self._end.set()
                if self._starts == MOST_STARTS:
                    raise ToolFailedError("the server of this tool has ended too often, and is not started again")
                self._starts += 1
                with anyio.CancelScope(shield=True):  # where the time of this call is over, the next one has it
                    try:
                        await self._nursery.start(self._run)
                    except Exception as error:  # noqa: BLE001 (from another's program, of any kind)
                        why = str(next(leaves(error))) or f"no answer within {_START_S:g} s"
                        raise ToolFailedError(f"did not list its tools: {why}") from None
            return self._session

    async def call(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool. Raises ``ToolFailedError`` with the server's words."""
        session = await self.session()
        end = self._end
        try:
            result = await session.call_tool(tool, arguments)
        except anyio.get_cancelled_exc_class():
            self._nursery.start_soon(_check, session, end)
            raise
        except MCPError as error:
            ended = "the server of this tool has ended"
            raise ToolFailedError(ended if error.code == CONNECTION_CLOSED else error.message) from None
        self._starts = 0
        blocks = [getattr(block, "resource", block) for block in result.content]
        text = "\n".join(text for block in blocks if (text := getattr(block, "text", "")))
        if not text and result.structured_content is not None:
            text = msgspec.json.encode(result.structured_content).decode()
        if result.is_error:
            raise ToolFailedError(text)
        return text

    async def _run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Run a process until its end is asked for."""
        if shutil.which(self.command[0]) is None:
            raise FileNotFoundError(f"there is no command {self.command[0]}: install it, or write its path")
        guard = ["-I", "-S", "-c", _GUARD, _ROOT, str(os.getpid()), *self.command]
        given = {name: value for name, value in os.environ.items() if name != PARENT_PID}
        server = StdioServerParameters(command=sys.executable, args=guard, env=given, encoding_error_handler="replace")
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
            self._end = (end := anyio.Event())
            task_status.started()
            await end.wait()

    def _tool(self, tool: ListedTool) -> Tool:
        parameters = {"type": "object", "properties": {}} | tool.input_schema
        described = {"name": tool.name, "description": inspect.cleandoc(tool.description or tool.name)}
        schema = {"type": "function", "function": described | {"parameters": parameters}}
        return Tool(tool.name, schema, None, partial(self.call, tool.name))


async def _check(session: ClientSession, end: anyio.Event) -> None:
    """End a process that answers nothing after a call that took too long."""
    with anyio.move_on_after(_PING_S) as waiting, suppress(MCPError):
        await session.send_ping()
    if waiting.cancelled_caught:
        end.set()
