"""Tools of a real MCP server: calls of all ends, processes that end, block, and must not outlive their worker."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import psutil
import pytest

from streamrl.base.errors import RecipeError
from streamrl.pretrained.turns.tool_calls import ToolCall
from streamrl.recipe.environment import Environment
from streamrl.run.environments import mcp_tools
from streamrl.run.environments.tools import (
    MachineError,
    OpenTools,
    ToolBox,
    ToolContext,
    ToolEnd,
    ToolLimits,
    ToolResult,
)

CALLS = [
    ("add", {"a": 2, "b": 3}, "5", ToolEnd.DONE),
    ("add", {"a": 2, "b": "x"}, "error: Error executing tool add: 1 validation error", ToolEnd.RAISED),
    ("fails", {}, "error: Error executing tool fails: no such row", ToolEnd.RAISED),
    ("big", {}, "x" * 100 + " [999900 characters more are left out]", ToolEnd.TRUNCATED),
    ("several", {}, "one\ntwo", ToolEnd.DONE),
    ("data", {}, '{"rows":[1,2]}', ToolEnd.DONE),
    ("shows", {}, "[image/png is left out]\n[file:///a.pdf is left out]\nof a cat", ToolEnd.DONE),
    ("silent", {}, "error: the server of the tool gives no reason", ToolEnd.RAISED),
    ("hangs", {}, "error: hangs took more than 2 s", ToolEnd.TIMED_OUT),
    ("missing", {}, "error: there is no tool 'missing'", ToolEnd.UNKNOWN),
]


@asynccontextmanager
async def opened(command: Sequence[str], seconds: float = 60.0) -> AsyncIterator[OpenTools]:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(mcp_tools.opened_servers([command], sys.stderr))
        yield await stack.enter_async_context(ToolBox(served, ToolLimits(seconds, characters=100)).open_for_episode())


async def call(tools: OpenTools, name: str, **arguments: object) -> ToolResult:
    return await tools.run(ToolCall(name, dict(arguments)), ToolContext(trajectory="p/0", turn=0, seed=1))


def pids_of(result: ToolResult) -> list[int]:
    return [int(word) for word in result.text.split()]


def alive(pids: Sequence[int]) -> bool:
    return any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


NAMES_SERVER = """
import os
from mcp.server.mcpserver import MCPServer
server = MCPServer("names")
@server.tool()
def names() -> str:
    '''Names of variables.'''
    return " ".join(os.environ)
server.run()
"""


async def test_a_server_sees_no_tokens_but_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "SEARCH_KEY"):
        monkeypatch.setenv(name, "x" * 20)
    command = [sys.executable, "-c", NAMES_SERVER]
    async with mcp_tools.opened_servers([command], sys.stderr, ["SEARCH_KEY"]) as served:
        names = (await served[0].call()).split()
    assert {"HF_TOKEN", "WANDB_API_KEY"}.isdisjoint(names) and {"SEARCH_KEY", "PATH"} <= set(names)


@pytest.mark.long
async def test_a_call_has_a_result_whatever_the_server_does(mcp_server: tuple[str, ...]) -> None:
    async with mcp_tools.opened_servers([mcp_server], sys.stderr) as served:
        schema = served[0].schema["function"]
        assert (schema["name"], schema["description"]) == ("add", "Add two integers.")
        assert schema["parameters"]["required"] == ["a", "b"]
        async with ToolBox(served, ToolLimits(seconds=2, characters=100)).open_for_episode() as tools:
            for name, arguments, text, end in CALLS:
                result = await call(tools, name, **arguments)
                assert (result.text[: len(text)], result.end) == (text, end)
            assert not tools.keeps_state("add")  # calls are not made again


@pytest.mark.long
async def test_a_server_that_ended_is_started_again_a_few_times(
    mcp_server: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_tools, "MOST_STARTS", 2)
    ended = f'"mcp:{shlex.join(mcp_server)}" has ended'
    seen = []
    async with opened(mcp_server) as tools:
        for name in ("pids", "ends", "pids", "ends", "ends", "ends", "pids"):  # the second "pids" is answered
            try:
                seen.append((await call(tools, name)).text)
            except MachineError as error:  # no trajectory trains it
                seen.append(str(error))
    died = f"{ended} during a call of ends"
    assert seen == [seen[0], died, seen[2], died, died, died, f"{ended} too often, and is not started again"]
    assert seen[0] != seen[2]


@pytest.mark.long
async def test_a_server_that_answers_nothing_any_more_is_ended(
    mcp_server: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_tools, "_PING_S", 0.5)
    async with opened(mcp_server, seconds=2) as tools:
        before = pids_of(await call(tools, "pids"))
        assert (await call(tools, "blocks")).end is ToolEnd.TIMED_OUT
        while alive(before):
            await anyio.sleep(0.02)
        while (result := await call(tools, "add", a=1, b=1)).end is ToolEnd.TIMED_OUT:
            pass  # it starts, which goes on when the call's time is over
        assert result.text == "2"
        after = pids_of(await call(tools, "pids"))
        assert alive(after)
    assert not alive(after)


SCRIPT = """
import anyio, sys
from tests.run.environments.test_mcp_tools import call, opened
async def main():
    async with opened(sys.argv[1:]) as tools:
        print((await call(tools, "pids")).text, flush=True)
        await call(tools, "blocks")
anyio.run(main)
"""


def test_nothing_of_a_server_outlives_a_killed_worker(mcp_server: tuple[str, ...]) -> None:
    folders = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SCRIPT, *mcp_server]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=folders) as worker:
        assert worker.stdout is not None and worker.stderr is not None
        pids = list(map(int, worker.stdout.readline().split()))
        assert len(pids) == 2 and alive(pids)
        while b"it blocks" not in worker.stderr.readline():
            pass  # so that the end of its stdin does not end it
        worker.kill()
    while alive(pids):
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("no-such-server --x", '"mcp:no-such-server --x" did not list .* no command no-such-server: install it'),
        (f"{sys.executable} missing.py", "Connection closed .*its stderr: .*missing.py"),
        ("sleep 3600", "no answer within 0.5 s"),
        ("https://example.invalid/mcp", "no command https://.* a server at an address: the command of a bridge"),
    ],
)
def test_a_server_that_does_not_start_is_refused_before_the_run(
    command: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in command:
        monkeypatch.setattr(mcp_tools, "_START_S", 0.5)
    with pytest.raises(RecipeError, match=problem):
        mcp_tools.list_tools(Environment(tools=(f"mcp:{command}",)).servers)
