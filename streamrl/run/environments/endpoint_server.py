"""The HTTP endpoint of an environment worker: OpenAI chat completions and responses and Anthropic messages on uvicorn.
The key of a request (``Authorization: Bearer``, ``x-api-key`` or ``/sessions/KEY/v1``) names the trajectory."""

from __future__ import annotations

import resource
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import anyio

from streamrl.base.errors import RecipeError
from streamrl.run.environments.chat_answers import MODELS, write_answer, write_refusal
from streamrl.run.environments.chat_requests import COUNTED, READERS, read_request
from streamrl.run.environments.endpoint_session import ApiError, EndpointSession

Receive = Callable[[], Awaitable[Any]]
LARGEST_BODY = 16 << 20
OPEN_REQUESTS = 256
"""Bytes of a request; requests of one trajectory that may be open at once."""


class EndpointServer:
    """An ASGI application and its server. It listens from the beginning, and answers while ``serve`` runs. Raises
    ``RecipeError`` where it cannot listen at ``host``."""

    def __init__(self, *, host: str = "127.0.0.1", largest_body: int = LARGEST_BODY) -> None:
        self._sessions: dict[str, EndpointSession] = {}
        self._largest_body = largest_body
        try:
            self.socket = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise RecipeError(f"the endpoint for agents cannot listen at {host} ({error}): choose another") from error
        self.base_url = f"http://{host}:{self.socket.getsockname()[1]}"  # clients of OpenAI add /v1

    @contextmanager
    def serving(self, session: EndpointSession) -> Iterator[EndpointSession]:
        """Answer requests with the key of ``session``; afterwards it is closed and its key unknown."""
        self._sessions[session.key] = session
        try:
            yield session
        finally:
            session.close()
            self._sessions.pop(session.key, None)

    async def serve(self) -> None:
        """Answer requests until cancelled. Raises ``RecipeError`` where uvicorn is not installed."""
        server = _uvicorn_server(self)
        try:
            await server.serve(sockets=[self.socket])
        finally:
            for session in self._sessions.values():
                session.close()
            with anyio.CancelScope(shield=True):
                server.force_exit = True
                if server.started:
                    await server.shutdown(sockets=[self.socket])
                for connection in list(server.server_state.connections):
                    connection.transport.abort()
            self.socket.close()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Callable[[Any], Any]) -> None:
        """Answer one request (ASGI). A client that goes away loses the answer alone: the turn is sampled and kept."""
        if scope["type"] != "http":
            return
        key = None
        path = scope["path"].rstrip("/")
        if path.startswith("/sessions/"):
            _, _, key, path = path.split("/", 3) if path.count("/") > 2 else ("", "", path, "")
            path = f"/{path}"
        try:
            session = self._session(key, headers := dict(scope["headers"]))
            status = 200
            body = await self._body(session, path, scope["method"], headers, receive)
            if body is None:
                return
        except ApiError as error:
            status = error.status
            body = write_refusal(path, error)
        media = b"application/json" if body.startswith(b"{") else b"text/event-stream"
        sent = [(b"content-type", media), (b"content-length", str(len(body)).encode()), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body})

    async def _body(
        self, session: EndpointSession, path: str, method: str, headers: Mapping[bytes, bytes], receive: Receive
    ) -> bytes | None:
        """The body of the answer; None: the client has gone before its request was whole. Raises ``ApiError``."""
        session.open_requests += 1
        try:
            session.figures["requests"] += 1
            if path == "/v1/models" and method == "GET":
                return MODELS
            if path not in READERS:
                raise ApiError(404, f"there is no {path[:200]}: post to one of {', '.join(READERS)}")
            if method != "POST":
                raise ApiError(405, f"{path} takes POST")
            if session.open_requests > OPEN_REQUESTS:
                raise ApiError(429, f"{OPEN_REQUESTS} requests of this trajectory are open: wait for answers")
            if (body := await _received(headers, receive, self._largest_body)) is None:
                return None
            request = read_request(path, body)
            if path == COUNTED:
                return b'{"input_tokens":%d}' % await session.count(request)
            retry = headers.get(b"x-stainless-retry-count", b"0") != b"0"
            answer = await session.answer(request, retry=retry, again=b"x-streamrl-resample" in headers)
            return write_answer(path, request, answer, session.model.tokenizer)
        except ApiError as error:
            session.figures[f"refused/{error.status}"] += 1
            raise
        finally:
            session.open_requests -= 1

    def _session(self, key: str | None, headers: Mapping[bytes, bytes]) -> EndpointSession:
        """The session that a request names. Raises ``ApiError``."""
        scheme, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        given = [bearer.strip()] * (scheme.lower() == "bearer") + [headers.get(b"x-api-key", b"").decode("latin-1")]
        for name in given if key is None else [key]:
            if (session := self._sessions.get(name)) is not None:
                return session
        raise ApiError(401, "no trajectory has this key: it is wrong, or the trajectory has ended")


async def _received(headers: Mapping[bytes, bytes], receive: Receive, most: int) -> bytes | None:
    """The bytes of a request; None: the client has gone. Raises ``ApiError`` as soon as they are too many."""
    length = headers.get(b"content-length", b"")
    announced = int(length) if length.isdigit() and len(length) < 20 else 0
    found = bytearray()
    more = True
    while more:
        message: Mapping[str, Any] = await receive() if announced <= most else {"type": "http.request"}
        if message["type"] == "http.disconnect":
            return None
        found += message.get("body", b"")
        more = message.get("more_body", False)
        if max(announced, len(found)) > most:
            raise ApiError(413, f"the request has more than {most} bytes: shorten the chat")
    return bytes(found)


def _uvicorn_server(application: EndpointServer) -> Any:
    """A server that takes no signals and leaves logging as it is."""
    try:
        import uvicorn
    except ImportError as error:
        raise RecipeError("agents reach the model by uvicorn: pip install 'streamrl[dashboard]'") from error

    class Server(uvicorn.Server):
        def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
            return nullcontext()

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = 4096 if most < 0 else min(4096, most // 2)
    waits: Any = {"timeout_keep_alive": 75, "timeout_graceful_shutdown": 1, "limit_concurrency": most}
    config = uvicorn.Config(application, lifespan="off", ws="none", log_config=None, access_log=False, **waits)
    return Server(config)
