"""S8: every socket has every option, whatever part of streamrl made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from streamrl.comm.guarded_sockets import GuardedContext
from streamrl.comm.zmq_sockets import create_socket
from streamrl.observe.telemetry import LARGEST_MESSAGE, LARGEST_SUBSCRIPTION, TelemetryPublisher, TelemetrySubscriber
from streamrl.weights.requests import REQUEST_LIMIT, pull_socket


@contextmanager
def every_socket(directory: Path) -> Iterator[dict[str, tuple[Any, int]]]:
    """By name: the socket and the largest frame that it takes."""
    context = GuardedContext()
    publisher = TelemetryPublisher(f"ipc://{directory}/m", run_id="r")
    subscriber = TelemetrySubscriber(f"ipc://{directory}/m")
    sockets = {
        "stream": (create_socket(context, zmq.ROUTER, "ipc:///x", max_frame_bytes=77, receive_high_water_mark=9), 77),
        "weights": (
            pull_socket(context, zmq.ROUTER, "tcp://127.0.0.1:1", max_frame_bytes=REQUEST_LIMIT),
            REQUEST_LIMIT,
        ),
        "metrics": (publisher._socket, LARGEST_SUBSCRIPTION),
        "watcher": (subscriber._socket, LARGEST_MESSAGE),
        "gate": (context.gate._requests, 64 << 10),
    }
    try:
        yield sockets
    finally:
        for name in ("stream", "weights"):
            sockets[name][0].close(linger=0)
        subscriber.close()
        publisher.close()
        context.close_gate()
        context.term()


def test_every_option_is_set(tmp_path: Path) -> None:
    with every_socket(tmp_path) as sockets:
        for name, (socket, largest) in sockets.items():
            options = {
                zmq.MAXMSGSIZE: largest,
                zmq.HANDSHAKE_IVL: 10_000,
                zmq.HEARTBEAT_IVL: 0,
                zmq.RECONNECT_IVL_MAX: 500,
                zmq.IPV6: 0,
            }
            assert {option: socket.getsockopt(option) for option in options} == options, name
            assert 0 <= socket.getsockopt(zmq.LINGER) <= 500, "nothing waits for a peer for ever"
            assert socket.getsockopt(zmq.RCVHWM) > 0, "a peer that ignores credit does not fill the memory"
    with pull_socket(GuardedContext.instance(), zmq.ROUTER, "tcp://10.0.0.1:1", max_frame_bytes=1) as distant:
        assert (distant.getsockopt(zmq.HEARTBEAT_IVL), distant.getsockopt(zmq.HEARTBEAT_TIMEOUT)) == (2_000, 10_000)


def test_a_reply_to_a_peer_that_is_gone_is_an_error() -> None:
    """ROUTER_MANDATORY, which cannot be read back."""
    context = GuardedContext.instance()
    routers = [
        create_socket(context, zmq.ROUTER, "ipc:///x", max_frame_bytes=1, receive_high_water_mark=1),
        pull_socket(context, zmq.ROUTER, "ipc:///x", max_frame_bytes=1),
    ]
    for router in routers:
        with router, pytest.raises(zmq.ZMQError, match="unreachable"):
            router.send_multipart([b"nobody", b"x"], zmq.NOBLOCK)
