"""The control socket of a run, which receives the requests of commands such as ``streamrl drain`` and ``status``.

``launch.pipeline`` serves it in the process of the command that runs the run (``serving_control``); other commands ask
(``ask_run``). It is a unix socket: the kernel names the peer, and no request is queued. A connection carries one
request and one answer, within limits of size and time; no request can end the run. The key is a secret of the run, in a
file that only this user may read; it is made at start and removed at the end. ``control_protocol`` has the messages."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc
from anyio import (
    BrokenResourceError,
    ClosedResourceError,
    EndOfStream,
    create_task_group,
    fail_after,
    move_on_after,
    sleep,
)
from anyio.abc import SocketAttribute, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from streamrl.base.atomic_files import PRIVATE, create_file
from streamrl.base.errors import RecipeError, StreamRLError, WireError
from streamrl.comm.zmq_sockets import IPC_PATH_BYTES, KEEP_S
from streamrl.launch import control_protocol as protocol
from streamrl.recipe.topology import control_socket, read_topology
from streamrl.run.journal.journal_file import writer_of

KEY_FILE = "control.key"
REQUEST_LIMIT_S = 5.0
"""How long a request, and the reading of an answer, may take."""

MOST_CONNECTIONS = 16
BURST = 100
REQUESTS_A_SECOND = 20.0
"""How many requests are answered at once, and how many more each second: asking without pause slows nothing."""

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_CONNECTION_ERRORS = (EndOfStream, anyio.IncompleteRead, BrokenResourceError, ClosedResourceError, OSError)

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # orders are in supervisor.log, not in the terminal of the run

CarryOut = Callable[[protocol.ControlOperation], Awaitable[protocol.ControlAnswer]]


def write_key(run_directory: Path) -> str:
    """Make a new key for this life of a run. The file is created such that only this user may read it."""
    key = secrets.token_hex(32)
    with create_file(run_directory / KEY_FILE, PRIVATE) as file:
        file.write(key.encode())
    return key


def read_key(run_directory: Path) -> str:
    """Read the key of a run. Raises ``StreamRLError`` where this user may not read it."""
    path = run_directory / KEY_FILE
    try:
        return path.read_text()
    except OSError as error:
        raise StreamRLError(
            f"{path} cannot be read ({error.strerror}): a change of a run needs its key, which the user who started it "
            "can read"
        ) from error


def check_path(path: Path) -> None:
    """Raise ``StreamRLError`` where ``path`` is too long for a socket."""
    length = len(os.fsencode(path))
    if length > IPC_PATH_BYTES:
        raise StreamRLError(
            f"the control socket {path} has {length} bytes and a unix socket path may have {IPC_PATH_BYTES}: "
            "set TMPDIR to a shorter directory"
        )


class ControlServer:
    """Answers the requests on the socket ``path`` with the results of ``carry_out``, whose ``StreamRLError`` is a
    refusal. ``key``: key of the run; ``request_limit_s``: time limit of a request, and of the reading of an answer."""

    def __init__(self, path: Path, key: str, carry_out: CarryOut, *, request_limit_s: float = REQUEST_LIMIT_S) -> None:
        self._path = path
        self._key = key
        self._carry_out = carry_out
        self._limit_s = request_limit_s
        self._open_connections = 0
        self._request_budget = float(BURST)
        self._budget_at_s = time.monotonic()
        self._listener: anyio.abc.SocketListener | None = None

    async def open(self) -> None:
        """Make the socket. Raises ``StreamRLError`` where it cannot be made."""
        # Between bind and listen a connection is refused, so the file gets its name when the socket listens.
        unready = self._path.with_name(f"{self._path.name}~")
        check_path(unready)
        try:
            self._listener = await anyio.create_unix_listener(unready, mode=0o600, backlog=MOST_CONNECTIONS)
            unready.rename(self._path)
        except OSError as error:
            raise StreamRLError(f"the control socket {self._path} cannot be made: {error.strerror}") from error

    async def run(self) -> None:
        """Serve connections after ``open`` until cancelled, and remove the socket."""
        assert self._listener is not None, "open comes before run"
        try:
            async with create_task_group() as connections:
                connections.start_soon(self._take_connections, self._listener, connections)
                while True:
                    await sleep(KEEP_S)
                    try:
                        os.utime(self._path)  # cleaners of temporary files take what is old
                    except OSError:
                        log.warning("the control socket was taken away, as by a cleaner of temporary files")
                        with suppress(StreamRLError):
                            await self.open()
                            connections.start_soon(self._take_connections, self._listener, connections)
        finally:
            self._path.unlink(missing_ok=True)

    async def _take_connections(self, listener: anyio.abc.SocketListener, connections: TaskGroup) -> None:
        async with listener:
            while True:
                try:
                    stream = await listener.accept()
                except BrokenResourceError as error:  # no file descriptors left, for example
                    log.warning("the control socket cannot take a connection: %s", error.__cause__)
                    await sleep(1)
                    continue
                connections.start_soon(self._serve, stream)

    async def _serve(self, stream: anyio.abc.SocketStream) -> None:
        """Answer the request of one connection, and close the connection."""
        self._open_connections += 1
        try:
            with suppress(*_CONNECTION_ERRORS):
                async with stream:
                    answer = await self._answer(stream)
                    content = _encoded_answer(answer)
                    with move_on_after(self._limit_s):
                        await stream.send(content)
        finally:
            self._open_connections -= 1

    async def _answer(self, stream: anyio.abc.SocketStream) -> protocol.ControlAnswer:
        """Read the request of a connection, and carry it out where everything about it is allowed."""
        process, user = peer_of(stream)
        if user not in (os.getuid(), 0):
            return _refused("this run belongs to another user")
        if self._open_connections > MOST_CONNECTIONS:
            return _refused(f"{MOST_CONNECTIONS} requests are open already: try again later")
        if not self._has_budget():
            return _refused(f"more than {REQUESTS_A_SECOND:g} requests a second: try again later")
        try:
            with fail_after(self._limit_s):
                body = await _receive(stream, protocol.LARGEST_REQUEST)
                request = protocol.decode_request(body)
        except TimeoutError:
            return _refused(f"no whole request came within {self._limit_s:g} s")
        except WireError as error:
            return _refused(f"{error}: correct it, or use the streamrl version of the run")
        operation = request.operation
        name = type(operation).__name__
        if not protocol.is_allowed(request, self._key):
            log.warning("control socket: pid %d asked for %s with a wrong key: refused", process, name)
            return _refused(f"{name} changes the run and needs its key ({KEY_FILE})")
        if not isinstance(operation, protocol.READ_ONLY):
            description = protocol.described(operation)
            log.info("control socket: pid %d asked, with the key, for %s", process, description)
        return await self._result_of(operation)

    async def _result_of(self, operation: protocol.ControlOperation) -> protocol.ControlAnswer:
        """Carry out an operation that is allowed. Every error becomes a refusal: it must not end the run."""
        try:
            return await self._carry_out(operation)
        except RecipeError as error:
            return protocol.ControlRefused(problems=tuple(error.problems))
        except StreamRLError as error:
            return _refused(str(error))
        except Exception as error:
            name = type(operation).__name__
            log.exception("control socket: %s failed", name)
            return _refused(f"{name} failed: {type(error).__name__}: the log of the run has more")

    def _has_budget(self) -> bool:
        """Take one request from the budget, which time refills. False where it is spent."""
        now_s = time.monotonic()
        refill = (now_s - self._budget_at_s) * REQUESTS_A_SECOND
        self._request_budget = min(BURST, self._request_budget + refill)
        self._budget_at_s = now_s
        if self._request_budget < 1:
            return False
        self._request_budget -= 1
        return True


@asynccontextmanager
async def serving_control(path: Path, run_directory: Path, carry_out: CarryOut) -> AsyncIterator[None]:
    """Serve the control socket at ``path`` while the body runs. Removes the socket and the key at the end."""
    key = write_key(run_directory)
    try:
        server = ControlServer(path, key, carry_out)
        await server.open()
        async with create_task_group() as tasks:
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
    """Send one request to the run that listens at ``path``, and return its answer. Raises ``StreamRLError`` where no
    run listens there, or it does not answer in time."""
    check_path(path)
    try:
        with fail_after(timeout_s):
            async with await anyio.connect_unix(path) as stream:
                _, user = peer_of(stream)
                if user not in (os.getuid(), 0):
                    raise StreamRLError(f"{path} belongs to another user: nothing was sent to it")
                request = protocol.ControlRequest(operation=operation, key=key)
                await stream.send(protocol.encode(request))
                body = await _receive(stream, protocol.LARGEST_ANSWER)
                return protocol.decode_answer(body)
    except TimeoutError:
        raise StreamRLError(
            f"the run has not answered within {timeout_s:g} s; it may still do what was asked: `streamrl status` tells"
        ) from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise StreamRLError(f"no run listens at {path}: it has ended, or has not begun") from None
    except _CONNECTION_ERRORS as error:
        raise StreamRLError(f"the run ended the conversation at {path}: {error or 'it may have ended'}") from error


async def ask_run(
    run_directory: Path, operation: protocol.ControlOperation, timeout_s: float, *, changes: bool = True
) -> protocol.ControlAnswer:
    """Send one request to the run in ``run_directory``, and return its answer. ``changes``: whether the operation
    changes the run and needs its key. Raises the errors of ``ask_control`` and ``read_key``."""
    refuse_ended(run_directory)
    path = control_socket(read_topology(run_directory))
    key = ""
    if changes:
        key = read_key(run_directory)
    return await ask_control(path, operation, key, timeout_s)


def refuse_ended(run_directory: Path) -> None:
    """Raise ``StreamRLError`` where ``run_directory`` has a run that no process of this host runs."""
    if (run_directory / "recipe.toml").is_file() and writer_of(run_directory) is None:
        raise StreamRLError(
            f"{run_directory} does not run on this host: it has ended (`streamrl show {run_directory}` says how, "
            f"`streamrl resume {run_directory}` goes on), or another host runs it: ask there"
        )


def peer_of(stream: anyio.abc.SocketStream) -> tuple[int, int]:
    """Process id and user id of the peer, from the kernel."""
    raw_socket: socket.socket = stream.extra(SocketAttribute.raw_socket)
    credentials = raw_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return int(process), int(user)


async def _receive(stream: anyio.abc.SocketStream, largest: int) -> bytes:
    """Read the body of one message: its length, then so many bytes. Raises ``WireError`` above ``largest`` bytes."""
    incoming = BufferedByteReceiveStream(stream)
    prefix = await incoming.receive_exactly(protocol.LENGTH_BYTES)
    length = protocol.length_of(prefix, largest)
    return await incoming.receive_exactly(length)


def _refused(problem: str) -> protocol.ControlRefused:
    return protocol.ControlRefused(problems=(problem,))


def _encoded_answer(answer: protocol.ControlAnswer) -> bytes:
    """Encode ``answer``. A text that UTF-8 cannot encode (a path may have one) gives a refusal instead."""
    try:
        return protocol.encode(answer)
    except WireError as error:
        reason = str(error).encode("ascii", "backslashreplace").decode()
        return protocol.encode(_refused(f"the answer could not be written: {reason}"))
