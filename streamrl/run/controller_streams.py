"""The two streams to a controller, as whoever serves it opens them, again for each one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from streamrl.comm.zmq_stream import ZmqReceiveStream, ZmqSendStream, zmq_receiver, zmq_sender
from streamrl.plan.topology import Topology

Streams = tuple[ZmqReceiveStream[Any], ZmqSendStream[Any]]


def controller_streams(
    topology: Topology, name: str, orders: tuple[str, Any], events: tuple[str, Any]
) -> Callable[[], AbstractAsyncContextManager[Streams]]:
    """What opens them for the process ``name``: its orders, and what it says. Each: (stream, type of its items)."""
    (orders_stream, order_type), (events_stream, event_type) = orders, events
    orders_at, events_at = topology.endpoint(name, orders_stream), topology.endpoint(name, events_stream)

    @asynccontextmanager
    async def open_controller() -> AsyncIterator[Streams]:
        async with (
            zmq_sender(event_type, events_at, bind=False, name=f"{name}.{events_stream}") as sender,
            zmq_receiver(order_type, orders_at, bind=False, name=f"{name}.{orders_stream}") as receiver,
        ):
            yield receiver, sender

    return open_controller
