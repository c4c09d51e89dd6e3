"""The program of an agent: started for one trajectory with the address and key of the endpoint, limited, and ended with
all that it started."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.run_process import PARENT_PID
from streamrl.run.environments.endpoint_session import EndpointSession

MOST_OUTPUT = 64 << 20
"""Bytes that an agent may write to stdout, and to stderr."""
_KEPT, _SHOWN, _LEFT_OPEN_S = 1 << 16, 2_000, 1.0
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


async def run_agent(
    command: Sequence[str],
    session: EndpointSession,
    columns: Mapping[str, Any],
    seconds: float = math.inf,
    *,
    base_url: str,
    directory: Path | None = None,
    grace_s: float = 5.0,
) -> float | None:
    """Run ``command`` for at most ``seconds`` with the row ``columns`` as a JSON object on its stdin, and return its
    reward: the number in its last line, or in ``reward`` of the JSON object there (else None). Its environment
    has ``base_url`` (of the server) and the key of ``session``, where clients of OpenAI and Anthropic look for them.
    ``directory``: of the program; ``grace_s``: from SIGTERM to SIGKILL. Nothing that it started is left, also where the
    call is cancelled. Raises ``AgentFailedError``."""
    command = [sys.executable, "-I", "-S", "-c", _STARTER, str(_ROOT), str(os.getpid()), *command]
    given = {name: value for name, value in os.environ.items() if name not in (PARENT_PID, "ANTHROPIC_AUTH_TOKEN")}
    given |= {"OPENAI_BASE_URL": f"{base_url}/v1", "OPENAI_API_KEY": session.key}
    given |= {"ANTHROPIC_BASE_URL": base_url, "ANTHROPIC_API_KEY": session.key}
    local = given.get("NO_PROXY") or given.get("no_proxy") or "localhost"
    given |= dict.fromkeys(("NO_PROXY", "no_proxy"), f"{local},127.0.0.1,localhost")
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(command, cwd=directory, env=given, start_new_session=True)
    limit = anyio.CancelScope(deadline=anyio.current_time() + seconds)
    out, errors, failure = bytearray(), bytearray(), ""
    async with process, anyio.create_task_group() as tasks:
        tasks.start_soon(_give, process.stdin, msgspec.json.encode(columns))
        tasks.start_soon(_read, process.stdout, out, limit)
        tasks.start_soon(_read, process.stderr, errors, limit)
        try:
            with limit:
                await process.wait()
            if limit.cancelled_caught:
                late = anyio.current_time() >= limit.deadline
                failure = f"took more than {seconds:g} s" if late else f"wrote more than {MOST_OUTPUT} bytes"
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process, session.key, grace_s)
        tasks.cancel_scope.deadline = anyio.current_time() + _LEFT_OPEN_S
    if failure or process.returncode:
        *before, last = errors.decode(errors="replace").strip()[-_SHOWN:].splitlines() or [""]
        failure = f"the agent {failure or f'ended with {process.returncode}'}"
        raise AgentFailedError("\n".join([": ".join(filter(None, (failure, last))), *before]))
    return reward_of(bytes(out))


def reward_of(output: bytes) -> float | None:
    """The finite number in the last line of ``output``, or in ``reward`` of the JSON object there; else None."""
    try:
        found = msgspec.json.decode(output.strip().rpartition(b"\n")[2])
        value = found.get("reward") if isinstance(found, dict) else found
        reward = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except UNDECODABLE:
        return None
    return reward if math.isfinite(reward) else None


async def _read(stream: Any, kept: bytearray, limit: anyio.CancelScope) -> None:
    """Read an output to its end, so that the agent never waits, and keep its last bytes."""
    written = 0
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async for part in stream:
            written += len(part)
            kept[:] = (kept + part)[-_KEPT:]
            if written > MOST_OUTPUT:
                limit.cancel()


async def _give(stream: Any, row: bytes) -> None:
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # an agent need not read it
        await stream.send(row + b"\n")
        await stream.aclose()


async def _end(process: anyio.abc.Process, key: str, grace_s: float) -> None:
    """End the process group, then processes that have left it: they have the key in their environment."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with anyio.move_on_after(grace_s if number is signal.SIGTERM else math.inf):
            await process.wait()
    with anyio.move_on_after(grace_s):
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
