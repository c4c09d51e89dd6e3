"""Security of ZeroMQ sockets, set before a socket is bound or connected.

A socket that only this host or this user can reach is plain. Any other socket uses CURVE with an allow-list of keys; a
process without keys is refused such a socket. Streams (``zmq_stream``, with a ``KeyGuard``), weight servers, relays and
telemetry come through here, in every process that they run in: only ``bind`` and ``connect`` of this module, and
streams without a guard, call ``bind`` and ``connect`` of ``zmq_sockets``."""

from __future__ import annotations

import os

import zmq
from zmq import Context
from zmq.utils.monitor import parse_monitor_message

from streamrl.base.errors import StreamRLError
from streamrl.base.host_addresses import host_of, is_loopback, is_wildcard
from streamrl.comm import zmq_sockets
from streamrl.comm.key_gate import ZAP_ENDPOINT, KeyGate
from streamrl.comm.socket_options import SMALL_FRAME, ByteSocket, make_socket
from streamrl.comm.transport_keys import KEYS_DIRECTORY, OPEN_TO_ALL, KeyRole, RoleKeys, process_keys, public_keys

STRANGER_MS = 5_000
"""Longest time until an unknown peer is refused. A working gate needs a few milliseconds."""

_PARTNERS: dict[int, int] = {zmq.ROUTER: zmq.DEALER, zmq.XPUB: zmq.SUB}
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FAILED = _REFUSED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class GuardedContext(Context["zmq.Socket[bytes]"]):
    """A ZeroMQ context with at most one gate, which is made with the first socket that needs it."""

    _instance = None  # not shared with zmq.Context.instance(), which vllm uses in the same process
    _gate: KeyGate | None = None

    @property
    def gate(self) -> KeyGate:
        """The gate of this context, made by the first call."""
        if self._gate is None:
            self._gate = KeyGate(make_socket(self, zmq.REP, endpoint=ZAP_ENDPOINT, max_frame_bytes=SMALL_FRAME))
        return self._gate

    @property
    def opened_gate(self) -> KeyGate | None:
        """The gate of this context, or None while no socket has needed one."""
        return self._gate

    def close_gate(self) -> None:
        """Close the gate. Call it before ``term``, which waits for the gate's socket. Idempotent."""
        if self._gate is not None:
            self._gate.close()


def keys_for(endpoint: str) -> RoleKeys | None:
    """Keys that a socket at ``endpoint`` must use; None for a plain socket. Raises ``StreamRLError`` for an endpoint
    that other hosts can reach, where this process has no keys."""
    host = host_of(endpoint)
    if not endpoint.startswith("tcp://"):
        return None  # an ipc socket is a file in a directory of this user
    keys = process_keys()
    if keys is None and not is_loopback(host) and os.environ.get(OPEN_TO_ALL) != "none":
        raise StreamRLError(
            f"{endpoint} can be reached from other hosts, and this process has no keys: make some with "
            f"`streamrl keys DIRECTORY` and set transport.keys ({KEYS_DIRECTORY} outside of a run), or use a loopback "
            'address; transport.advanced.security = "none" leaves it open to everybody'
        )
    return keys


def bind(socket: ByteSocket, endpoint: str, admits: KeyRole) -> str:
    """Bind and return the endpoint with its real port. ``admits``: role whose keys are let in, where there are keys.

    Raises ``StreamRLError`` naming the endpoint and the remedy, also where other hosts would reach the socket without
    keys, or where an unknown peer is not refused."""
    gate = guard_listener(socket, endpoint, admits)
    bound = zmq_sockets.bind(socket, endpoint)
    if gate is not None:
        kind = socket.getsockopt(zmq.TYPE)
        assert isinstance(kind, int)
        check_unknown_peers_are_refused(kind, bound, gate)
    return bound


def connect(socket: ByteSocket, endpoint: str, serves: KeyRole) -> None:
    """Start connecting; libzmq retries until somebody binds. ``serves``: role whose first key the other end must have,
    where there are keys. Raises ``StreamRLError`` for an impossible address, or for one on another host where this
    process has no keys."""
    keys = keys_for(endpoint)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, public_keys(keys.directory, serves)[0])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    zmq_sockets.connect(socket, endpoint)


class KeyGuard:
    """The guard of a tcp stream whose other end is a process of the role ``peer``."""

    def __init__(self, peer: KeyRole) -> None:
        self._peer = peer

    @property
    def context(self) -> GuardedContext:
        """The context that all guarded streams of this process share."""
        context = GuardedContext.instance()
        assert isinstance(context, GuardedContext)
        return context

    def bind(self, socket: ByteSocket, endpoint: str) -> str:
        """Bind, and let in the keys of the peer's role. Raises as ``bind`` of this module."""
        return bind(socket, endpoint, self._peer)

    def connect(self, socket: ByteSocket, endpoint: str) -> None:
        """Connect to a peer that has the first key of its role. Raises as ``connect`` of this module."""
        connect(socket, endpoint, self._peer)

    def watch(self, socket: ByteSocket) -> int:
        """File descriptor, owned by the caller, that becomes readable when the gate of a bound ``socket`` has ended; -1
        for a plain socket."""
        gate = self.context.opened_gate
        if gate is None or socket.getsockopt(zmq.MECHANISM) != zmq.CURVE:
            return -1
        return os.dup(gate.ended_fd)

    def check(self) -> None:
        """Raise ``StreamRLError`` when the gate has ended, so that nobody could connect any more."""
        gate = self.context.opened_gate
        if gate is not None:
            gate.check()


def guard_listener(socket: ByteSocket, endpoint: str, admits: KeyRole) -> KeyGate | None:
    """Set the key and the admitted role of a socket that is about to be bound. Returns the gate that decides for the
    socket; None for a plain socket."""
    keys = keys_for(endpoint)
    if keys is None:
        return None
    context: object = socket.context
    if not isinstance(context, GuardedContext):
        raise StreamRLError(f"the socket of {endpoint} is in a context without a gate: that is a bug of streamrl")
    if keys.public != public_keys(keys.directory, keys.role)[0]:
        raise StreamRLError(
            f"{endpoint}: others expect the first key of {keys.directory / keys.role.value}.public here, and this "
            "process has another one: put its key first, there and in the copies on other hosts"
        )
    public_keys(keys.directory, admits)  # a missing key file raises now, rather than refusing every peer later
    socket.setsockopt(zmq.ZAP_DOMAIN, context.gate.admit(keys.directory, admits))
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # libzmq would otherwise let every peer in once the gate has ended
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return context.gate


def check_unknown_peers_are_refused(kind: int, endpoint: str, gate: KeyGate) -> None:
    """Try to connect to a socket bound with ``gate``, once with an unknown key and once without a key. Raises
    ``StreamRLError`` unless both attempts are refused, the first one by the gate."""
    keys = process_keys()
    if keys is None:
        return
    public, secret = zmq.curve_keypair()
    gate.expect_unknown_key(public)
    for with_key, refusals in ((True, _REFUSED), (False, _FAILED)):
        outcome = _try_handshake(kind, _reachable(endpoint), (keys.public, public, secret) if with_key else None)
        if not outcome & refusals:
            result = "let in" if outcome & zmq.EVENT_HANDSHAKE_SUCCEEDED else "not refused"
            credential = "an unknown key" if with_key else "no key"
            raise StreamRLError(
                f"{endpoint}: a connection with {credential} was {result}, so this process does not start: that is a "
                f"bug of streamrl or of libzmq {zmq.zmq_version()}; please report it"
            )


def _try_handshake(kind: int, endpoint: str, keys: tuple[bytes, bytes, bytes] | None) -> int:
    """Outcome of the handshake of an unknown peer, as an event of libzmq; 0 where no handshake ended in time. ``keys``:
    public key of the server, public and secret key of the unknown peer; None for a peer without keys."""
    with (
        Context(io_threads=1) as context,
        make_socket(context, _PARTNERS[kind], endpoint=endpoint, max_frame_bytes=SMALL_FRAME) as peer,
    ):
        peer.setsockopt(zmq.RECONNECT_IVL, -1)
        if keys is not None:
            for option, key in zip((zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), keys, strict=True):
                peer.setsockopt(option, key)
        events: ByteSocket = peer.get_monitor_socket(_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            peer.connect(endpoint)
            if not events.poll(STRANGER_MS):
                return 0
            return int(parse_monitor_message(events.recv_multipart())["event"])
        finally:
            peer.disable_monitor()
            events.close(linger=0)


def _reachable(endpoint: str) -> str:
    """Endpoint by which this process reaches a socket that it bound at ``endpoint``."""
    if not is_wildcard(host_of(endpoint)):
        return endpoint
    port = endpoint.rpartition(":")[2]
    loopback = "[::1]" if "[" in endpoint else "127.0.0.1"
    return f"tcp://{loopback}:{port}"
