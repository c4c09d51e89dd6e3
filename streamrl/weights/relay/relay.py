"""The relay of one engine: a thread that fetches pieces from other relays or the trainer, for the workers of its
engine, and serves its pieces to the relays of other engines.

``launch/roles.py`` makes one in the engine's process where a cluster has several hosts of engines. Workers fetch from
it as from the trainer and verify all that they get. When a relay fails, its workers fetch from the trainer."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from logging import getLogger
from threading import Thread
from time import monotonic

import zmq
from msgspec import msgpack
from msgspec.structs import replace
from zmq import NOBLOCK, POLLIN, Again, Poller

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.messages import WeightAnnouncement
from streamrl.comm.guarded_sockets import GuardedContext, bind, connect
from streamrl.comm.object_store import in_store
from streamrl.comm.socket_options import ByteSocket
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.zmq_sockets import KEEP_S, IpcPath
from streamrl.weights.relay.state import Asker, AskPiece, PieceSource, RelayReply, RelayState
from streamrl.weights.requests import MANIFEST_LIMIT, REQUEST_LIMIT, encoder, pull_socket, send_reply

_TICK_MS = 200
_MESSAGES_AT_ONCE = 8

_ask_decoder = msgpack.Decoder(AskPiece)
_reply_decoder: msgpack.Decoder[RelayReply] = msgpack.Decoder(RelayReply)
log = getLogger(__name__)


class Relay:
    """The sockets and the thread of a relay, as a context manager. ``endpoint``: address for the relays of other
    engines. ``local``: address for the workers of this engine (``ipc://``). The engine's process calls ``through`` for
    each announcement."""

    def __init__(self, endpoint: str, local: str) -> None:
        self.endpoint = endpoint
        self._local = local
        self._context = GuardedContext(io_threads=1)
        self._wake_fd = os.eventfd(0)
        self._stopped = False
        self._failed = False
        self._announced: deque[WeightAnnouncement] = deque()
        self.state = RelayState(self._ask, self._reply)
        self._dealers: dict[PieceSource, ByteSocket] = {}
        self._poller = Poller()
        self._routers: dict[bool, ByteSocket] = {}
        self._local_path: IpcPath
        self._thread = Thread(target=self._run, name="weight relay", daemon=True)

    def __enter__(self) -> Relay:
        """Bind both addresses and start the thread. Raises ``StreamRLError`` where ``local`` cannot be bound. Where
        ``endpoint`` cannot be bound, logs a warning: other engines then fetch from their next source."""
        zmq.Frame(b"", copy=False)  # pyzmq makes its context for uncopied frames now, not at the first large piece
        self._poller.register(self._wake_fd, POLLIN)
        self._listen(self._local, is_local=True)
        self._local_path = IpcPath(self._routers[True], self._local)
        try:
            self.endpoint = self._listen(self.endpoint, is_local=False)
        except StreamRLError as error:
            log.warning("this engine gives no weights to other hosts: %s", error)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)
        self._local_path.remove()

    def through(self, announced: WeightAnnouncement) -> WeightAnnouncement:
        """Return the announcement for the engine's workers, with this relay as source, and without ``peers``, the other
        engines from which the relay itself fetches. The sources stay where the relay has failed, and where they are in
        an object store, which every worker reaches."""
        if self._failed or any(in_store(source.endpoint) for source in announced.sources):
            return replace(announced, peers=())
        self._announced.append(announced)
        os.eventfd_write(self._wake_fd, 1)
        sources = tuple(replace(source, endpoint=self._local) for source in announced.sources)
        return replace(announced, sources=sources, peers=())

    # ---- in the thread -----------------------------------------------------------------------------

    def _listen(self, endpoint: str, *, is_local: bool) -> str:
        router = pull_socket(self._context, zmq.ROUTER, endpoint, max_frame_bytes=REQUEST_LIMIT)
        try:
            bound = bind(router, endpoint, admits=KeyRole.ENGINE)
        except StreamRLError:
            router.close(linger=0)  # the end of the context would wait for it
            raise
        self._routers[is_local] = router
        self._poller.register(router, POLLIN)
        return bound

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            self._failed = True
            log.exception("the relay of weights has failed; this engine fetches from the trainer from now on")
        finally:
            for socket in (*self._dealers.values(), *self._routers.values()):
                socket.close(linger=0)
            self._context.close_gate()
            self._context.term()

    def _serve(self) -> None:
        gate = self._context.opened_gate  # admits peers by their keys; None: no socket has needed it
        if gate is not None:
            self._poller.register(gate.ended_fd, POLLIN)
        ticked = monotonic()
        while True:
            ready = dict(self._poller.poll(_TICK_MS if self.state.waits else int(KEEP_S * 1000)))
            self._local_path.keep()
            if self._stopped:
                return
            if gate is not None and gate.ended_fd in ready:
                gate.check()
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                self._take_announcements()
            for is_local, router in self._routers.items():
                if router in ready:
                    self._take_requests(router, is_local=is_local)
            for source, dealer in list(self._dealers.items()):
                if dealer in ready:
                    self._take_replies(source, dealer)
            if monotonic() - ticked > _TICK_MS / 1000:
                ticked = monotonic()
                self.state.tick(ticked)

    def _take_announcements(self) -> None:
        while self._announced:
            self.state.announce(self._announced.popleft(), monotonic())
        for source in self._dealers.keys() - self.state.sources:
            dealer = self._dealers.pop(source)
            self._poller.unregister(dealer)
            dealer.close(linger=0)

    def _take_requests(self, router: ByteSocket, *, is_local: bool) -> None:
        with suppress(Again):
            for _ in range(_MESSAGES_AT_ONCE):
                identity, *frames = router.recv_multipart(NOBLOCK)
                try:
                    ask = _ask_decoder.decode(frames[-1])
                except UNDECODABLE as error:
                    log.warning("a request for weights is no message of this version: %s", error)
                    continue
                self.state.requested(Asker(identity, is_local), ask, monotonic())

    def _take_replies(self, source: PieceSource, dealer: ByteSocket) -> None:
        with suppress(Again):
            for _ in range(_MESSAGES_AT_ONCE):
                frames = dealer.recv_multipart(NOBLOCK)
                self.state.replied(source, _decoded_reply(frames), frames[-1], monotonic())

    def _ask(self, source: PieceSource, ask: AskPiece) -> None:
        if source not in self._dealers:
            dealer = pull_socket(self._context, zmq.DEALER, source.endpoint, max_frame_bytes=MANIFEST_LIMIT)
            self._dealers[source] = dealer  # which the end of the thread closes, also where it cannot connect
            serves = KeyRole.ENGINE if source.is_relay else KeyRole.TRAINER
            connect(dealer, source.endpoint, serves)
            self._poller.register(dealer, POLLIN)
        with suppress(Again):
            self._dealers[source].send(encoder.encode(ask), NOBLOCK)

    def _reply(self, asker: Asker, reply: RelayReply, payload: bytes) -> None:
        send_reply(self._routers[asker.is_local], asker.identity, reply, payload)


def _decoded_reply(frames: Sequence[bytes]) -> RelayReply | None:
    """Decode the header of a reply. Returns None for frames that are no reply."""
    if len(frames) != 2:
        return None
    try:
        return _reply_decoder.decode(frames[0])
    except UNDECODABLE:
        return None
