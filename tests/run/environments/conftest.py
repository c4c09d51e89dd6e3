"""An MCP server, and tokenizers of families by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.pretrained.turns.conftest import of_family as of_family

SERVER = """
import os, subprocess, sys, time
import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import BlobResourceContents, CallToolResult, EmbeddedResource, ImageContent, TextContent
server = MCPServer("tools")
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], stdin=subprocess.DEVNULL)
@server.tool()
def add(a: int, b: int) -> int:
    '''Add two integers.'''
    return a + b
@server.tool()
def fails() -> str: raise ToolError("no such row")
@server.tool()
def big() -> str: return "x" * 1_000_000
@server.tool()
def several() -> list[str]: return ["one", "two"]
@server.tool()
def data() -> CallToolResult: return CallToolResult(content=[], structured_content={"rows": [1, 2]})
PICTURE = ImageContent(type="image", data="AAAA", mime_type="image/png")
FILE = EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///a.pdf", blob="AAAA"))
@server.tool()
def shows() -> CallToolResult:
    return CallToolResult(content=[PICTURE, FILE, TextContent(type="text", text="of a cat")])
@server.tool()
def silent() -> CallToolResult: return CallToolResult(content=[], is_error=True)
@server.tool()
def pids() -> str: return f"{os.getpid()} {below.pid}"
@server.tool()
async def hangs() -> None: await anyio.sleep(3600)
@server.tool()
async def blocks() -> None:
    print("it blocks", file=sys.stderr, flush=True)
    time.sleep(3600)
@server.tool()
def ends() -> None: os._exit(3)
server.run("stdio")
"""


@pytest.fixture
def mcp_server(tmp_path: Path) -> tuple[str, ...]:
    """The command of a server."""
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return sys.executable, str(file)
