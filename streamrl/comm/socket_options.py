"""The one factory of ZeroMQ sockets: every option that anything here relies on is set, whatever the socket is for."""

from __future__ import annotations

from typing import Any

import zmq

HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
"""A peer whose host or network is gone is noticed after this time; a killed process at once, by its closed connection.
libzmq's own thread answers heartbeats, so a peer that computes for minutes does not look dead."""

HANDSHAKE_TIMEOUT_MS = 10_000
RECONNECT_INTERVAL_MS = 50
RECONNECT_INTERVAL_MAX_MS = 500
SMALL_FRAME = 64 << 10
"""Enough for what libzmq says of a connection."""


def make_socket(
    context: zmq.Context[Any],
    kind: int,
    *,
    endpoint: str,
    max_frame_bytes: int,
    linger_ms: int = 0,
    send_high_water_mark: int = 1000,
    receive_high_water_mark: int = 1000,
) -> zmq.Socket[bytes]:
    """A socket for ``endpoint``, neither bound nor connected. A peer that sends a larger frame is cut off.
    ``linger_ms``: how long bytes may still leave after it was closed. High-water marks in messages; 0: no bound."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.SNDHWM, send_high_water_mark)
    socket.setsockopt(zmq.RCVHWM, receive_high_water_mark)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_INTERVAL_MAX_MS)
    # With IPv6 on, a host name that has both kinds of address would resolve to the other kind than the peer bound.
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://") and "[" in endpoint))
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # otherwise a message to a peer that is gone vanishes silently
    return socket
