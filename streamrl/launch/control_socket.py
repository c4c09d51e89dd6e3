"""The control socket of a run: a unix socket, so that the kernel says who the peer is, and nothing is ever queued.

Each connection is served for itself, within limits of size and time; whatever comes over it, the run goes on. The key
is a secret of the run in a file that only this user may read, made at start and removed at the end."""

from __future__ import annotations

import logging
import os
import secrets
import socket as sockets
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
from anyio.abc import SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream

from streamrl.base.errors import RecipeError, StreamRLError, WireError
from streamrl.comm.zmq_sockets import IPC_PATH_BYTES
from streamrl.launch import control_protocol as protocol
from streamrl.recipe.topology import control_socket, read_topology

KEY_FILE = "control.key"
REQUEST_LIMIT_S = 5.0
"""How long a request, and the reading of an answer, may take."""

MOST_CONNECTIONS = 16
BURST = 100
REQUESTS_A_SECOND = 20.0
"""How many requests are answered at once, and how many more each second: asking without pause slows nothing."""

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_GONE = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)

log = logging.getLogger(__name__)

Carry = Callable[[protocol.ControlOperation], Awaitable[protocol.ControlAnswer]]


def write_key(run_directory: Path) -> str:
    """Make the key of a run, a new one for each of its lives. Nobody else may read the file, from its first moment."""
    key = secrets.token_hex(32)
    (run_directory / KEY_FILE).unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(run_directory / KEY_FILE, flags, 0o600), "w") as file:
        file.write(key)
    return key


def read_key(run_directory: Path) -> str:
    """The key of a run. Raises ``StreamRLError`` for who may not read it."""
    path = run_directory / KEY_FILE
    try:
        return path.read_text()
    except OSError as error:
        raise StreamRLError(
            f"{path} cannot be read ({error.strerror}): who changes a run needs its key; be the user who started it"
        ) from error


def check_path(path: Path) -> None:
    """Raises ``StreamRLError`` where no socket can have this path."""
    if (length := len(os.fsencode(path))) > IPC_PATH_BYTES:
        raise StreamRLError(
            f"the control socket {path} has {length} bytes and a unix socket path may have {IPC_PATH_BYTES}: "
            "set TMPDIR to a shorter directory"
        )


class ControlServer:
    """Answers requests on ``path`` by what ``carry_out`` returns; ``StreamRLError`` is a refusal."""

    def __init__(self, path: Path, key: str, carry_out: Carry, *, request_limit_s: float = REQUEST_LIMIT_S) -> None:
        self._path = path
        self._key = key
        self._carry_out = carry_out
        self._limit_s = request_limit_s
        self._open = 0
        self._budget = float(BURST)
        self._budget_at_s = time.monotonic()
        self._listener: anyio.abc.SocketListener | None = None

    async def open(self) -> None:
        """Raises ``StreamRLError`` where there can be no such socket."""
        check_path(self._path)
        try:
            self._listener = await anyio.create_unix_listener(self._path, mode=0o600, backlog=MOST_CONNECTIONS)
        except OSError as error:
            raise StreamRLError(f"the control socket {self._path} cannot be made: {error.strerror}") from error

    async def run(self) -> None:
        """Serve after ``open`` until cancelled; the socket is gone then."""
        assert self._listener is not None, "open comes before run"
        try:
            async with self._listener, anyio.create_task_group() as connections:
                while True:
                    try:
                        stream = await self._listener.accept()
                    except OSError as error:  # no descriptors left, say: the run has other needs
                        log.warning("the control socket cannot take a connection: %s", error)
                        await anyio.sleep(1)
                        continue
                    connections.start_soon(self._serve, stream)
        finally:
            self._path.unlink(missing_ok=True)

    async def _serve(self, stream: anyio.abc.SocketStream) -> None:
        self._open += 1
        try:
            with suppress(*_GONE):
                async with stream:
                    content = _written(await self._answer(stream))
                    with anyio.move_on_after(self._limit_s):
                        await stream.send(content)
        finally:
            self._open -= 1

    async def _answer(self, stream: anyio.abc.SocketStream) -> protocol.ControlAnswer:
        process, user = peer_of(stream)
        if user not in (os.getuid(), 0):
            return protocol.ControlRefused(problems=("this run belongs to another user",))
        if self._open > MOST_CONNECTIONS:
            return protocol.ControlRefused(problems=(f"{MOST_CONNECTIONS} requests are open already: try again later",))
        if not self._may_ask():
            return protocol.ControlRefused(
                problems=(f"more than {REQUESTS_A_SECOND:g} requests a second: try again later",)
            )
        try:
            with anyio.fail_after(self._limit_s):
                request = protocol.decode_request(await _receive(stream, protocol.LARGEST_REQUEST))
        except TimeoutError:
            return protocol.ControlRefused(problems=(f"no whole request came within {self._limit_s:g} s",))
        except WireError as error:
            return protocol.ControlRefused(problems=(f"{error}: correct it, or use the streamrl version of the run",))
        operation = type(request.operation).__name__
        if not protocol.is_allowed(request, self._key):
            log.warning("control socket: pid %d asked for %s with a wrong key: refused", process, operation)
            return protocol.ControlRefused(problems=(f"{operation} changes the run and needs its key ({KEY_FILE})",))
        if not isinstance(request.operation, protocol.READ_ONLY):
            asked = protocol.described(request.operation)
            log.warning("control socket: pid %d asked, with the key, for %s", process, asked)
        try:
            return await self._carry_out(request.operation)
        except RecipeError as error:
            return protocol.ControlRefused(problems=tuple(error.problems))
        except StreamRLError as error:
            return protocol.ControlRefused(problems=(str(error),))
        except Exception as error:  # whatever went wrong with a request must not end the run
            log.exception("control socket: %s failed", operation)
            return protocol.ControlRefused(
                problems=(f"{operation} failed: {type(error).__name__}: the log of the run has more",)
            )

    def _may_ask(self) -> bool:
        """Return whether one more request is within the budget, which it uses up."""
        now = time.monotonic()
        self._budget = min(BURST, self._budget + (now - self._budget_at_s) * REQUESTS_A_SECOND)
        self._budget_at_s = now
        if self._budget < 1:
            return False
        self._budget -= 1
        return True


@asynccontextmanager
async def serving_control(path: Path, run_directory: Path, carry_out: Carry) -> AsyncIterator[None]:
    """Serve the control socket at ``path`` while the body runs. Neither it nor the key is left behind."""
    key = write_key(run_directory)
    try:
        server = ControlServer(path, key, carry_out)
        await server.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()
    finally:
        (run_directory / KEY_FILE).unlink(missing_ok=True)


async def ask_control(
    path: Path, operation: protocol.ControlOperation, key: str, timeout_s: float
) -> protocol.ControlAnswer:
    """The run's answer. Raises ``StreamRLError`` where no run listens at ``path``, or it does not answer in time."""
    check_path(path)
    try:
        with anyio.fail_after(timeout_s):
            async with await anyio.connect_unix(path) as stream:
                if peer_of(stream)[1] not in (os.getuid(), 0):
                    raise StreamRLError(f"{path} belongs to another user: nothing was sent to it")
                await stream.send(protocol.encode(protocol.ControlRequest(operation=operation, key=key)))
                return protocol.decode_answer(await _receive(stream, protocol.LARGEST_ANSWER))
    except TimeoutError:
        raise StreamRLError(
            f"the run has not answered within {timeout_s:g} s; it may still do what was asked: `streamrl status` tells"
        ) from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise StreamRLError(f"no run listens at {path}: it has ended, or has not begun") from None
    except _GONE as error:
        raise StreamRLError(f"the run ended the conversation at {path}: {error or 'it may have ended'}") from error


async def ask_run(
    run_directory: Path, operation: protocol.ControlOperation, timeout_s: float, *, changes: bool = True
) -> protocol.ControlAnswer:
    """The answer of the run in a directory; its key goes along where it ``changes``. Raises as ``ask_control``."""
    path = control_socket(read_topology(run_directory))
    return await ask_control(path, operation, read_key(run_directory) if changes else "", timeout_s)


def peer_of(stream: anyio.abc.SocketStream) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel says."""
    raw: sockets.socket = stream.extra(SocketAttribute.raw_socket)
    process, user, _ = _CREDENTIALS.unpack(raw.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size))
    return int(process), int(user)


async def _receive(stream: anyio.abc.SocketStream, largest: int) -> bytes:
    incoming = BufferedByteReceiveStream(stream)
    return await incoming.receive_exactly(
        protocol.length_of(await incoming.receive_exactly(protocol.LENGTH_BYTES), largest)
    )


def _written(answer: protocol.ControlAnswer) -> bytes:
    """A text with half of a character in it, such as a path may have, must not end the run that refuses it."""
    try:
        return protocol.encode(answer)
    except WireError as error:
        reason = str(error).encode("ascii", "backslashreplace").decode()
        return protocol.encode(protocol.ControlRefused(problems=(f"the answer could not be written: {reason}",)))
