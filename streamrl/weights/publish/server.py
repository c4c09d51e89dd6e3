"""A thread of a trainer rank's process that serves encoded parts: a ROUTER socket that answers the requests of
receivers.

``publisher.py`` starts it. Receivers ask for pieces, so that a transfer is resumable, idempotent and self-paced: a
receiver has as many requests open as it has credits, and repeats a request that was lost. The thread owns its ZeroMQ
context, so that the trainer may run any event loop, or none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from threading import Event, Thread

import zmq
from msgspec import Struct
from zmq import NOBLOCK, POLLIN, Poller

from streamrl.base.errors import WeightError
from streamrl.comm.guarded_sockets import GuardedContext, bind
from streamrl.comm.key_gate import KeyGate
from streamrl.comm.socket_options import ByteSocket
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.zmq_sockets import KEEP_S, IpcPath
from streamrl.weights.requests import (
    MANIFEST,
    REQUEST_LIMIT,
    NotServed,
    Piece,
    Reply,
    decode_request,
    pull_socket,
    send_reply,
)


class ServedPart(Struct, frozen=True, eq=False):
    """One rank's part of one version, encoded. Immutable: frames are sent without a copy."""

    policy_version: int
    manifest_digest: str
    manifest: bytes
    chunks: Sequence[memoryview]

    @property
    def size(self) -> int:
        """Size of the manifest and all chunks."""
        return len(self.manifest) + sum(len(chunk) for chunk in self.chunks)


class PublisherServer:
    """Serves a replaceable set of parts at ``endpoint`` (``tcp://host:*`` picks a port), from a thread of its own."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.endpoint = endpoint
        self._parts: dict[str, ServedPart] = {}
        self._name = name
        self._context: GuardedContext | None = None
        self._stop_fd = -1
        self._thread: Thread | None = None
        self._bound = Event()
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread. Returns when the endpoint is bound; raises ``WeightError`` when it cannot be bound."""
        # With the first frame that is not copied pyzmq makes a context with three threads and seven descriptors. It is
        # made here, so that the process does not grow hours later, when it first serves a large part.
        zmq.Frame(b"", copy=False)
        self._stop_fd = os.eventfd(0)
        self._context = GuardedContext(io_threads=1)
        self._thread = Thread(target=self._serve, args=(self._context,), name=self._name, daemon=True)
        self._thread.start()
        self._bound.wait()
        try:
            self.check()
        except WeightError:
            self.close()
            raise

    def check(self) -> None:
        """Raise ``WeightError`` when the thread has failed."""
        if self._failure is not None:
            raise WeightError(f"weights cannot be served at {self.endpoint}: {self._failure}") from self._failure

    def serve(self, parts: Iterable[ServedPart]) -> None:
        """Replace the served parts. A frame that ZeroMQ has already is still delivered."""
        self._parts = {part.manifest_digest: part for part in parts}

    def close(self) -> None:
        """Stop serving and release the endpoint. Idempotent."""
        self._parts = {}
        if self._context is None or self._thread is None:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)
        self._context.term()
        self._context = None

    def _serve(self, context: GuardedContext) -> None:
        try:
            self._bind_and_answer(context)
        except Exception as failure:  # noqa: BLE001 - kept, and raised in the owner's thread by check()
            self._failure = failure
        finally:
            self._bound.set()

    def _bind_and_answer(self, context: GuardedContext) -> None:
        path: IpcPath | None = None
        router = pull_socket(context, zmq.ROUTER, self.endpoint, max_frame_bytes=REQUEST_LIMIT)
        try:
            self.endpoint = bind(router, self.endpoint, KeyRole.ENGINE)
            path = IpcPath(router, self.endpoint)
            self._bound.set()
            self._answer_until_stopped(router, path, context.opened_gate)
        finally:
            router.close(linger=0)
            context.close_gate()
            if path is not None:
                path.remove()

    def _answer_until_stopped(self, router: ByteSocket, path: IpcPath, gate: KeyGate | None) -> None:
        """Answer requests in the order in which ZeroMQ delivers them, which alternates between peers."""
        poller = Poller()
        poller.register(router, POLLIN)
        poller.register(self._stop_fd, POLLIN)
        if gate is not None:
            poller.register(gate.ended_fd, POLLIN)
        while self._stop_fd not in (ready := dict(poller.poll(int(KEEP_S * 1000)))):
            path.keep()
            if gate is not None and gate.ended_fd in ready:
                gate.check()
            if router in ready:
                peer, *frames = router.recv_multipart(NOBLOCK)
                send_reply(router, peer, *self._answer(frames))

    def _answer(self, frames: Sequence[bytes]) -> tuple[Reply, bytes | memoryview]:
        frame = b""  # no request, and refused below
        if len(frames) == 1:
            frame = frames[0]
        try:
            request = decode_request(frame)
        except WeightError as error:
            return NotServed("", str(error)), b""
        digest = request.manifest_digest
        part = self._parts.get(digest)
        if part is None:
            return NotServed(digest, "this manifest is not served (any more): ask for a newer version"), b""
        if request.piece == MANIFEST:
            return Piece(digest, MANIFEST), part.manifest
        if not 0 <= request.piece < len(part.chunks):
            return NotServed(digest, f"chunk {request.piece} of {len(part.chunks)} does not exist"), b""
        return Piece(digest, request.piece), part.chunks[request.piece]
