"""The one factory of ZeroMQ sockets, for streams, weight servers, telemetry and key gates in all processes. It sets
every option that streamrl relies on."""

from __future__ import annotations

from typing import Any

import zmq

from streamrl.base.host_addresses import host_of, is_loopback

HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
"""Time until a peer on another host counts as lost when its host or network is gone. A killed process is lost at once,
since its connection closes. libzmq's own thread answers heartbeats, so a peer that computes for minutes does not look
dead. On one host there are none: a process that is stopped (a debugger, ``docker pause``, a job that is suspended) is
not gone, and a run whose processes were all stopped goes on."""

HANDSHAKE_TIMEOUT_MS = 10_000
RECONNECT_INTERVAL_MS = 50
RECONNECT_INTERVAL_MAX_MS = 500
SMALL_FRAME = 64 << 10
"""Largest frame of sockets that carry only messages of libzmq about connections."""

ByteSocket = zmq.Socket[bytes]
"""A socket whose messages are bytes, as those of ``make_socket``."""


def stays_here(endpoint: str) -> bool:
    """Return whether only processes of this host reach ``endpoint``."""
    host = host_of(endpoint)
    return not host or is_loopback(host)


def make_socket(
    context: zmq.Context[Any],
    kind: int,
    *,
    endpoint: str,
    max_frame_bytes: int,
    linger_ms: int = 0,
    send_high_water_mark: int = 1000,
    receive_high_water_mark: int = 1000,
) -> ByteSocket:
    """Make a socket for ``endpoint``, neither bound nor connected. A peer that sends a frame larger than
    ``max_frame_bytes`` is disconnected. ``linger_ms``: time that unsent bytes have after the socket was closed.
    High-water marks count messages; 0: no bound."""
    socket: ByteSocket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.SNDHWM, send_high_water_mark)
    socket.setsockopt(zmq.RCVHWM, receive_high_water_mark)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    if not stays_here(endpoint):
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_INTERVAL_MAX_MS)
    # IPv6 is on for literal IPv6 addresses only: a host name with both kinds of address could resolve to the kind that
    # the peer has not bound.
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://") and "[" in endpoint))
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # otherwise a message to a peer that is gone vanishes silently
    return socket
