"""The HTTP endpoint at which agents reach the model: OpenAI's chat completions and responses and Anthropic's messages.

``agent_process.Agents`` opens one server in each environment worker process whose recipe has an ``agent``; uvicorn runs
it in the worker's event loop. The key of a request names its trajectory: ``Authorization: Bearer KEY``,
``x-api-key: KEY``, or the path ``/sessions/KEY/v1/...``, which alone counts where it has a key."""

from __future__ import annotations

import resource
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import anyio

from streamrl.base.errors import RecipeError
from streamrl.run.environments.chat_answers import MODELS, write_answer, write_refusal
from streamrl.run.environments.chat_requests import READERS, TOKEN_COUNT_PATH, read_request
from streamrl.run.environments.endpoint_session import ApiError, EndpointSession

Receive = Callable[[], Awaitable[Any]]
LARGEST_BODY = 16 << 20
"""Largest number of bytes of a request."""
OPEN_REQUESTS = 256
"""Largest number of open requests of one trajectory."""
_LARGEST_CONNECTIONS = 4096


class EndpointServer:
    """An ASGI application and its server. The socket listens as soon as the object is made, and requests are answered
    while ``serve`` runs. Raises ``RecipeError`` where the socket cannot listen at ``host``."""

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
        """Answer requests with the key of ``session`` in the block; then close the session and forget its key."""
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
            # Cancelled or not, uvicorn is shut down; ``force_exit`` keeps it from waiting for open requests, whose
            # connections are cut instead.
            with anyio.CancelScope(shield=True):
                server.force_exit = True
                if server.started:
                    await server.shutdown(sockets=[self.socket])
                for connection in list(server.server_state.connections):
                    connection.transport.abort()
            self.socket.close()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Callable[[Any], Any]) -> None:
        """Answer one request (ASGI). The turn of a client that disconnects is sampled all the same, and a repetition of
        its request gets the answer."""
        if scope["type"] != "http":
            return
        key, path = _split_path(scope["path"].rstrip("/"))
        headers = dict(scope["headers"])
        try:
            session = self._session(key, headers)
            status = 200
            body = await self._body(session, path, scope["method"], headers, receive)
            if body is None:
                return
        except ApiError as error:
            status = error.status
            body = write_refusal(path, error)
        media_type = b"application/json" if body.startswith(b"{") else b"text/event-stream"
        response_headers = [
            (b"content-type", media_type),
            (b"content-length", str(len(body)).encode()),
            (b"x-accel-buffering", b"no"),  # proxies pass a stream on at once
        ]
        await send({"type": "http.response.start", "status": status, "headers": response_headers})
        await send({"type": "http.response.body", "body": body})

    async def _body(
        self, session: EndpointSession, path: str, method: str, headers: Mapping[bytes, bytes], receive: Receive
    ) -> bytes | None:
        """Return the body of the answer; None: the client disconnected before it had sent the request. Raises
        ``ApiError``."""
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
            body = await _receive_body(headers, receive, self._largest_body)
            if body is None:
                return None
            request = read_request(path, body)
            if path == TOKEN_COUNT_PATH:
                return b'{"input_tokens":%d}' % await session.count(request)
            retry = headers.get(b"x-stainless-retry-count", b"0") != b"0"  # sent by the clients of both APIs
            resample = b"x-streamrl-resample" in headers
            answer = await session.answer(request, retry=retry, resample=resample)
            return write_answer(path, request, answer, session.model.tokenizer)
        except ApiError as error:
            session.figures[f"refused/{error.status}"] += 1
            raise
        finally:
            session.open_requests -= 1

    def _session(self, path_key: str | None, headers: Mapping[bytes, bytes]) -> EndpointSession:
        """Return the session that a request names by ``path_key``, or by a header where that is None. Raises
        ``ApiError``."""
        keys = [path_key] if path_key is not None else _header_keys(headers)
        for key in keys:
            session = self._sessions.get(key)
            if session is not None:
                return session
        raise ApiError(401, "no trajectory has this key: it is wrong, or the trajectory has ended")


def _split_path(path: str) -> tuple[str | None, str]:
    """Return the key in ``/sessions/KEY/v1/...`` and the path behind it. The key is None in another path."""
    start, sessions, rest = path.partition("/sessions/")
    if start or not sessions:
        return None, path
    key, _, api_path = rest.partition("/")
    return key, f"/{api_path}"


def _header_keys(headers: Mapping[bytes, bytes]) -> list[str]:
    """Return the keys in the headers of OpenAI's clients and of Anthropic's, in this order."""
    keys = []
    scheme, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() == "bearer":
        keys.append(token.strip())
    keys.append(headers.get(b"x-api-key", b"").decode("latin-1"))
    return keys


async def _receive_body(headers: Mapping[bytes, bytes], receive: Receive, largest: int) -> bytes | None:
    """Receive the body of a request; None: the client disconnected. Raises ``ApiError`` as soon as the body has, or is
    announced to have, more than ``largest`` bytes."""
    refusal = ApiError(413, f"the request has more than {largest} bytes: shorten the chat")
    length = headers.get(b"content-length", b"")
    # A client may send anything: int() would also take signs and underscores, and refuses thousands of digits.
    if length.isdigit() and len(length) < 20 and int(length) > largest:
        raise refusal
    body = bytearray()
    has_more = True
    while has_more:
        message: Mapping[str, Any] = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > largest:
            raise refusal
        has_more = message.get("more_body", False)
    return bytes(body)


def _uvicorn_server(application: EndpointServer) -> Any:
    """Return a server that handles no signals, which are the worker's, and does not configure logging."""
    try:
        import uvicorn
    except ImportError as error:
        raise RecipeError("agents reach the model by uvicorn: pip install 'streamrl[dashboard]'") from error

    class Server(uvicorn.Server):
        def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
            return nullcontext()

    config = uvicorn.Config(
        application,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        limit_concurrency=_connection_limit(),
    )
    return Server(config)


def _connection_limit() -> int:
    """Return how many connections may be open: at most half of the files that the process may open."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files < 0:  # unlimited
        return _LARGEST_CONNECTIONS
    return min(_LARGEST_CONNECTIONS, open_files // 2)
