"""The two kinds of socket of the weight path, in a ZeroMQ context of their own.

A context is not shared with the streams: the trainer publishes from a plain thread, and the receiver lives in
vLLM's worker process, which uses ZeroMQ itself.
"""

from __future__ import annotations

import zmq

from streamrl.comm.zmq_sockets import HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS, transport_of

WeightContext = zmq.Context[zmq.Socket[bytes]]


def pull_socket(context: WeightContext, kind: int, endpoint: str, *, max_frame_bytes: int) -> zmq.Socket[bytes]:
    """A socket that drops what is unsent when it is closed, and whose peer is cut off above ``max_frame_bytes``."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    # With IPv6 on, a host name that has both kinds of address would resolve to the other kind than the peer bound.
    socket.setsockopt(zmq.IPV6, int(transport_of(endpoint) == "tcp" and "[" in endpoint))
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # otherwise a reply to a peer that is gone vanishes silently
    return socket
