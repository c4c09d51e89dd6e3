"""The two kinds of socket of the weight path, in a ZeroMQ context of their own.

A context is not shared with the streams: the trainer publishes from a plain thread, and the receiver lives in
vLLM's worker process, which uses ZeroMQ itself.
"""

from __future__ import annotations

import zmq

from streamrl.comm.socket_options import make_socket
from streamrl.comm.zmq_sockets import transport_of
from streamrl.remote.guarded_sockets import GuardedContext

WeightContext = GuardedContext


def pull_socket(context: WeightContext, kind: int, endpoint: str, *, max_frame_bytes: int) -> zmq.Socket[bytes]:
    """A socket that drops what is unsent when it is closed, and whose peer is cut off above ``max_frame_bytes``."""
    transport_of(endpoint)
    return make_socket(context, kind, endpoint=endpoint, max_frame_bytes=max_frame_bytes)
