"""Security of ZeroMQ sockets before they are bound or connected: plain where only this host or this user reaches them,
CURVE with an allow-list where the process has keys, refused otherwise. There is no way around it: only the functions
``bind`` and ``connect`` here, and streams, call those of ``zmq_sockets``."""

from __future__ import annotations

import os

import zmq
from zmq.utils.monitor import parse_monitor_message

from streamrl.base.errors import StreamRLError
from streamrl.base.hosts import host_of, is_loopback, is_wildcard
from streamrl.comm import zmq_sockets
from streamrl.comm.key_gate import ZAP_ENDPOINT, KeyGate
from streamrl.comm.socket_options import SMALL_FRAME, make_socket
from streamrl.comm.transport_keys import KEYS_DIRECTORY, OPEN_TO_ALL, KeyRole, RoleKeys, process_keys, public_keys

STRANGER_MS = 5_000
"""How long a stranger may wait for being refused: a few milliseconds, unless nobody decides."""

_PARTNERS: dict[int, int] = {zmq.ROUTER: zmq.DEALER, zmq.XPUB: zmq.SUB}
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FAILED = _REFUSED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class GuardedContext(zmq.Context["zmq.Socket[bytes]"]):
    """A context with at most one gate, which is made with the first socket that needs it."""

    _instance = None  # of its own: vllm, in the same process, uses zmq.Context.instance() as well
    _gate: KeyGate | None = None

    @property
    def gate(self) -> KeyGate:
        """The gate of this context."""
        if self._gate is None:
            self._gate = KeyGate(make_socket(self, zmq.REP, endpoint=ZAP_ENDPOINT, max_frame_bytes=SMALL_FRAME))
        return self._gate

    @property
    def opened_gate(self) -> KeyGate | None:
        """The gate, where a socket needed one."""
        return self._gate

    def close_gate(self) -> None:
        """Close the gate. To be called before ``term``, which waits for the gate's socket. Idempotent."""
        if self._gate is not None:
            self._gate.close()


def keys_for(endpoint: str) -> RoleKeys | None:
    """Keys that a socket at ``endpoint`` must use; None: a plain one. Raises ``StreamRLError`` where neither may be."""
    host = host_of(endpoint)
    if not endpoint.startswith("tcp://"):
        return None  # ipc: a file in a directory of this user's
    keys = process_keys()
    if keys is None and not is_loopback(host) and os.environ.get(OPEN_TO_ALL) != "none":
        raise StreamRLError(
            f"{endpoint} can be reached from other hosts, and this process has no keys: make some with "
            f"`streamrl keys DIRECTORY` and set transport.keys ({KEYS_DIRECTORY} outside of a run), or use a loopback "
            'address; transport.advanced.security = "none" leaves it open to everybody'
        )
    return keys


def bind(socket: zmq.Socket[bytes], endpoint: str, admits: KeyRole) -> str:
    """Bind and return the endpoint with its real port. ``admits``: whose keys are let in, where there are keys.

    Raises ``StreamRLError`` naming the endpoint and the remedy, also where other hosts would reach it without keys, or
    where a stranger is not refused."""
    gate = guard_listener(socket, endpoint, admits)
    bound = zmq_sockets.bind(socket, endpoint)
    if gate is not None:
        kind = socket.getsockopt(zmq.TYPE)
        assert isinstance(kind, int)
        check_unknown_peers_are_refused(kind, bound, gate)
    return bound


def connect(socket: zmq.Socket[bytes], endpoint: str, serves: KeyRole) -> None:
    """Start connecting; libzmq retries until somebody binds. ``serves``: whose key must be there, where there are keys.
    Raises ``StreamRLError`` for an impossible address, or one on another host where this process has no keys."""
    if (keys := keys_for(endpoint)) is not None:
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
        """One for all streams of this process."""
        context = GuardedContext.instance()
        assert isinstance(context, GuardedContext)
        return context

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Let in the keys of the peer's role. Raises as ``bind`` of this module."""
        return bind(socket, endpoint, self._peer)

    def connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Talk to the first key of the peer's role only. Raises as ``connect`` of this module."""
        connect(socket, endpoint, self._peer)

    def watch(self, socket: zmq.Socket[bytes]) -> int:
        """A file descriptor of the caller's own that becomes readable when nobody decides any more who may connect to a
        bound ``socket``; -1 where it is a plain one."""
        gate = self.context.opened_gate
        return -1 if gate is None or socket.getsockopt(zmq.MECHANISM) != zmq.CURVE else os.dup(gate.ended_fd)

    def check(self) -> None:
        """Raise ``StreamRLError`` when nobody decides any more who may connect."""
        if (gate := self.context.opened_gate) is not None:
            gate.check()


def guard_listener(socket: zmq.Socket[bytes], endpoint: str, admits: KeyRole) -> KeyGate | None:
    """Set the key of a socket that is about to be bound, and who is admitted. Returns its gate; None for a plain
    socket."""
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
    public_keys(keys.directory, admits)  # raises now, rather than refusing everybody later
    socket.setsockopt(zmq.ZAP_DOMAIN, context.gate.admit(keys.directory, admits))
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it everybody is let in when the gate is not there
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return context.gate


def check_unknown_peers_are_refused(kind: int, endpoint: str, gate: KeyGate) -> None:
    """Connect to a socket bound with ``gate`` with an unknown key, and without any key. Raises ``StreamRLError`` unless
    both are refused, the first one by the gate."""
    keys = process_keys()
    if keys is None:
        return
    public, secret = zmq.curve_keypair()
    gate.expect_unknown_key(public)
    for with_key, refusals in ((True, _REFUSED), (False, _FAILED)):
        outcome = _try_handshake(kind, _reachable(endpoint), (keys.public, public, secret) if with_key else None)
        if not outcome & refusals:
            said = "let in" if outcome & zmq.EVENT_HANDSHAKE_SUCCEEDED else "not refused"
            who = "an unknown key" if with_key else "no key"
            raise StreamRLError(
                f"{endpoint}: a connection with {who} was {said}, so this process does not start: that is a bug of "
                f"streamrl or of libzmq {zmq.zmq_version()}; please report it"
            )


def _try_handshake(kind: int, endpoint: str, keys: tuple[bytes, bytes, bytes] | None) -> int:
    """The event that tells what became of a stranger's connection; 0: no handshake in time. ``keys``: the server's, and
    the stranger's own two."""
    with (
        zmq.Context(io_threads=1) as context,
        make_socket(context, _PARTNERS[kind], endpoint=endpoint, max_frame_bytes=SMALL_FRAME) as stranger,
    ):
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        if keys is not None:
            for option, key in zip((zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), keys, strict=True):
                stranger.setsockopt(option, key)
        events: zmq.Socket[bytes] = stranger.get_monitor_socket(_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            stranger.connect(endpoint)
            if not events.poll(STRANGER_MS):
                return 0
            return int(parse_monitor_message(events.recv_multipart())["event"])
        finally:
            stranger.disable_monitor()
            events.close(linger=0)


def _reachable(endpoint: str) -> str:
    """Endpoint by which this process reaches a socket that it bound at ``endpoint``."""
    host = host_of(endpoint)
    port = endpoint.rpartition(":")[2]
    if not is_wildcard(host):
        return endpoint
    return f"tcp://{'[::1]' if '[' in endpoint else '127.0.0.1'}:{port}"
