"""The HTTP endpoint at which agents reach the model: OpenAI's chat completions and responses and Anthropic's messages.

``agent_process.Agents`` opens one server in each environment worker process whose recipe has an ``agent``; uvicorn runs
it in the worker's event loop. The key of a request names its trajectory: ``Authorization: Bearer KEY``,
``x-api-key: KEY``, or the path ``/sessions/KEY/v1/...``, where a key in the path takes precedence."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import anyio
import anyio.to_thread

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import RecipeError
from streamrl.base.host_addresses import at_port
from streamrl.run.environments.chat_answers import MODELS, write_answer, write_refusal, write_refusal_in_stream
from streamrl.run.environments.chat_requests import READERS, TOKEN_COUNT_PATH, read_request
from streamrl.run.environments.endpoint_session import UNWANTED, ApiError, ChatRequest, Client, EndpointSession

Receive = Callable[[], Awaitable[Any]]
LARGEST_BODY = 16 << 20
"""Largest number of bytes of a request."""
OPEN_REQUESTS = 256
"""Largest number of open requests of one trajectory."""
BODY_S = 60.0
"""Seconds in which the body of a request arrives."""
UNREAD_BYTES = 64 << 20
"""Largest number of bytes of the requests of one trajectory that are being received and read."""
ALL_UNREAD_BYTES = 256 << 20
"""Largest number of bytes of the requests of all trajectories that are being received and read."""
_BYTES_IN_LOOP = 128 << 10
"""Bytes of a request that the event loop reads itself; a larger one is read in a thread."""
_WAITING = 1024
"""Connections that the system keeps until they are accepted."""
_ACCEPTED_AT_ONCE = 64
"""Connections that are accepted in one pass of the event loop (asyncio's backlog). With many, one that has sent its
request could be closed for a new one before the request is read."""
_UNTIL_STREAM_S = 0.25
"""Seconds until the headers of a stream are sent. A request that fails earlier gets the status of its failure, and one
that fails later an event in its stream."""
ABANDONED_S = 10.0
"""Seconds until the turn of a client that disconnected is dropped: clients repeat a request within 8 s."""
_BETWEEN_COMMENTS_S = 2.0  # clients wait 5 s (httpx) and longer


class EndpointServer:
    """An ASGI application and its server. The socket listens as soon as the object is made, and requests are answered
    while ``serve`` runs. ``host``: address of this host at which it listens; ``address``: name or address by which
    agents reach it (empty: ``host``); ``body_s``: seconds in which a body arrives. Raises ``RecipeError`` where the
    socket cannot listen at ``host``."""

    def __init__(
        self, *, host: str = "127.0.0.1", address: str = "", largest_body: int = LARGEST_BODY, body_s: float = BODY_S
    ) -> None:
        self._sessions: dict[str, EndpointSession] = {}
        self._largest_body = largest_body
        self._body_s = body_s
        self._unread_bytes = 0
        self.socket = listening_socket(host)
        self.address = address or host
        self.base_url = f"http://{at_port(self.address, self.socket.getsockname()[1])}"  # clients of OpenAI add /v1

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

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Callable[[Any], Any]) -> bool:
        """Answer one request (ASGI), and return whether it had the key of an open trajectory. The turn of a client that
        disconnects is sampled for ``ABANDONED_S`` all the same, and a repetition of its request gets the answer."""
        if scope["type"] != "http":
            return False
        key, path = _split_path(scope["path"].rstrip("/"))
        headers = dict(scope["headers"])
        response = _Response(path, send)
        try:
            session = self._session(key, headers)
        except ApiError as error:
            await response.refuse(error)
            return False
        session.open_requests += 1
        session.figures["requests"] += 1
        try:
            await self._respond(session, path, scope["method"], headers, receive, response)
        except ApiError as error:
            session.figures[f"refused/{error.status}"] += 1
            if error.status != UNWANTED:
                session.refusal = str(error)
            await response.refuse(error)
        finally:
            session.open_requests -= 1
        return True

    async def _respond(
        self,
        session: EndpointSession,
        path: str,
        method: str,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        response: _Response,
    ) -> None:
        """Answer a request of a trajectory. Raises ``ApiError`` for one that is refused."""
        if path == "/v1/models" and method == "GET":
            await response.send(200, MODELS)
            return
        if path not in READERS:
            raise ApiError(404, f"there is no {path[:200]}: post to one of {', '.join(READERS)}")
        if method != "POST":
            raise ApiError(405, f"{path} takes POST")
        if session.open_requests > OPEN_REQUESTS:
            raise ApiError(429, f"{OPEN_REQUESTS} requests of this trajectory are open: wait for answers")
        request = await self._receive(session, path, headers, receive)
        if request is None:  # the client disconnected before it had sent the request
            return
        if path == TOKEN_COUNT_PATH:
            await response.send(200, b'{"input_tokens":%d}' % await session.count(request))
            return
        retry = headers.get(b"x-stainless-retry-count", b"0") != b"0"  # sent by the clients of both APIs
        client = Client(headers.get(b"idempotency-key", b""))
        async with response.waiting(session, receive, client, stream=request.stream):
            answer = await session.answer(request, client, retry=retry)
            await response.write(200, write_answer(path, request, answer, session.model.tokenizer))
        await response.end()

    async def _receive(
        self, session: EndpointSession, path: str, headers: Mapping[bytes, bytes], receive: Receive
    ) -> ChatRequest | None:
        """Receive and read a request of a trajectory; None: the client disconnected. Raises ``ApiError``, as soon as
        the body has, or is announced to have, too many bytes, or takes too long."""
        length = headers.get(b"content-length", b"")
        # A client may send anything: int() would also take signs and underscores, and refuses thousands of digits.
        if length.isdigit() and len(length) < 20:
            self._refuse_large(int(length))
        body = bytearray()
        try:
            with anyio.fail_after(self._body_s):
                while True:
                    message: Mapping[str, Any] = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    self._refuse_large(len(body) + len(part))
                    self._refuse_unread(session, len(part))
                    body += part
                    session.unread_bytes += len(part)
                    self._unread_bytes += len(part)
                    if not message.get("more_body", False):
                        break
            if len(body) <= _BYTES_IN_LOOP:
                return read_request(path, bytes(body))
            return await anyio.to_thread.run_sync(read_request, path, bytes(body), limiter=session.reading)
        except TimeoutError:
            seconds = f"{self._body_s:g} s"
            raise ApiError(408, f"the request was not whole after {seconds}: send its body at once") from None
        finally:
            session.unread_bytes -= len(body)
            self._unread_bytes -= len(body)

    def _refuse_large(self, size: int) -> None:
        if size > self._largest_body:
            raise ApiError(413, f"the request has more than {self._largest_body} bytes: shorten the chat")

    def _refuse_unread(self, session: EndpointSession, size: int) -> None:
        """Raise ``ApiError`` where ``size`` more bytes of a request are too many beside those of other requests."""
        if session.unread_bytes + size > UNREAD_BYTES:
            raise ApiError(429, f"requests of this trajectory have {UNREAD_BYTES >> 20} MiB: wait for answers")
        if self._unread_bytes + size > ALL_UNREAD_BYTES:
            raise ApiError(503, f"requests of agents have {ALL_UNREAD_BYTES >> 20} MiB: send the request again")

    def _session(self, path_key: str | None, headers: Mapping[bytes, bytes]) -> EndpointSession:
        """Return the session that a request names by ``path_key``, or by a header where that is None. Raises
        ``ApiError``."""
        keys = [path_key] if path_key is not None else _header_keys(headers)
        for key in keys:
            session = self._sessions.get(key)
            if session is not None:
                return session
        raise ApiError(401, "no trajectory has this key: it is wrong, or the trajectory has ended")


class _Response:
    """The HTTP response to a request at ``path``. ``send``: function that takes ASGI messages."""

    def __init__(self, path: str, send: Callable[[Any], Awaitable[None]]) -> None:
        self._path = path
        self._send = send
        self._has_begun = False
        self._comments = anyio.CancelScope()

    @asynccontextmanager
    async def waiting(
        self, session: EndpointSession, receive: Receive, client: Client, *, stream: bool
    ) -> AsyncIterator[None]:
        """Note in the block whether ``client`` disconnects, and write comments to a ``stream``. Clients give up where
        they receive nothing for some seconds, and pass over comments. The block is cancelled where no client waits for
        the answer any more."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_unwanted, session, receive, client, tasks.cancel_scope)
                if stream:
                    tasks.start_soon(self._write_comments)
                yield
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _write_comments(self) -> None:
        with self._comments:
            await anyio.sleep(_UNTIL_STREAM_S)
            while True:
                await self._begin(200, b"text/event-stream")
                await self._send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                await anyio.sleep(_BETWEEN_COMMENTS_S)

    async def _begin(self, status: int, media_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send the status and the headers, unless they are sent."""
        if self._has_begun:
            return
        self._has_begun = True
        # Proxies pass a stream on at once.
        all_headers = [(b"content-type", media_type), (b"x-accel-buffering", b"no"), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def write(self, status: int, body: bytes) -> None:
        """Send all of the body, which may be the rest of a stream. The response goes on."""
        self._comments.cancel()
        media_type = b"application/json" if body.startswith(b"{") else b"text/event-stream"
        await self._begin(status, media_type, (b"content-length", str(len(body)).encode()))
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """End the response."""
        await self._send({"type": "http.response.body"})

    async def send(self, status: int, body: bytes) -> None:
        """Send the body, and end the response."""
        await self.write(status, body)
        await self.end()

    async def refuse(self, error: ApiError) -> None:
        """Send a refusal, and end the response."""
        write_error = write_refusal_in_stream if self._has_begun else write_refusal
        await self.send(error.status, write_error(self._path, error))


async def _cancel_unwanted(
    session: EndpointSession, receive: Receive, client: Client, scope: anyio.CancelScope
) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    client.gone = True
    is_wanted = True
    while is_wanted:
        await anyio.sleep(ABANDONED_S)
        is_wanted = session.is_wanted(client)
    scope.cancel()


def listening_socket(host: str) -> socket.socket:
    """Return a socket that listens at a free port of ``host``, an address of this host. Raises ``RecipeError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=_WAITING)
    except OSError as error:
        raise RecipeError(
            f'environment.agent_host: the endpoint for agents cannot listen at "{host}" ({error}): name an address of '
            "this host"
        ) from error


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


def _uvicorn_server(application: EndpointServer) -> Any:
    """Return a server that handles no signals, which are the worker's, and does not configure logging."""
    try:
        import uvicorn

        from streamrl.comm.http_connections import KEPT_S, Connections
    except ImportError as error:
        raise RecipeError("agents reach the model by uvicorn: pip install 'streamrl[dashboard]'") from error

    class Server(uvicorn.Server):
        def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
            return nullcontext()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for listening in sockets or ():
                listening.listen(_WAITING)  # asyncio has set it to ``_ACCEPTED_AT_ONCE``

    config = uvicorn.Config(
        application,
        http=Connections().open,  # type: ignore[arg-type]
        backlog=_ACCEPTED_AT_ONCE,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=int(KEPT_S),
        timeout_graceful_shutdown=1,
    )
    return Server(config)
