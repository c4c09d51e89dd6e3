"""vLLM's own OpenAI-compatible routes for an engine of ours, on a socket that only this user can reach.

The judge's process (``rewards.served.server``) serves them to the reward workers."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

from anyio import sleep

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Gate = Callable[[], AbstractAsyncContextManager[None]]

QUESTIONS = "/v1/"
_BACKLOG = 1024
_BEGIN_LOOK_S = 0.01


class OpenAIRoutes:
    """The routes of ``llm`` (an ``AsyncLLM``). ``name``: model name in the API; ``gate``: context that each POST below
    ``/v1/`` waits for and runs in."""

    def __init__(self, llm: Any, *, model_path: str, name: str, gate: Gate) -> None:
        self._llm = llm
        self._model_path = model_path
        self._name = name
        self._gate = gate
        self._started: Callable[[], bool] = lambda: False

    async def serve(self, path: Path) -> None:
        """Answer at the socket ``path`` until cancelled. The socket of a killed predecessor is removed."""
        from uvicorn import Config
        from vllm.entrypoints.launchers.launcher import NoSignalServer

        application = await self._application()
        config = Config(application, log_level="warning", access_log=False, backlog=_BACKLOG)
        server = NoSignalServer(config)  # the process itself handles signals
        self._started = lambda: bool(server.started)
        with _listening(path) as listening:
            await server.serve(sockets=[listening])

    async def started(self) -> None:
        """Wait until requests are accepted."""
        while not self._started():  # noqa: ASYNC110 - uvicorn has no event for its start
            await sleep(_BEGIN_LOOK_S)

    async def _application(self) -> Application:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(
            ["--model", self._model_path, "--served-model-name", self._name, "--disable-log-stats"]
        )
        tasks = await self._llm.get_supported_tasks()
        application = build_app(arguments, tasks, self._llm.model_config)
        await init_app_state(self._llm, application.state, arguments, tasks)

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(QUESTIONS):
                await application(scope, receive, send)
                return
            async with self._gate():
                await application(scope, receive, send)

        return gated


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Open a socket at ``path`` for this user only, and remove it afterwards."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        path.chmod(0o600)
        try:
            yield listening
        finally:
            path.unlink(missing_ok=True)
