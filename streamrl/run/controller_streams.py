"""The two streams to the controller, as a process opens them that serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from streamrl.comm.zmq_stream import ZmqReceiveStream, ZmqSendStream, zmq_receiver, zmq_sender
from streamrl.plan.topology import Topology


@asynccontextmanager
async def controller_streams(
    topology: Topology, name: str, orders: tuple[str, Any], events: tuple[str, Any]
) -> AsyncIterator[tuple[ZmqReceiveStream[Any], ZmqSendStream[Any]]]:
    """Open the orders of the process ``name``, and what it says. Each: (stream, type of its items)."""
    (orders_stream, order_type), (events_stream, event_type) = orders, events
    orders_at, events_at = topology.endpoint(name, orders_stream), topology.endpoint(name, events_stream)
    async with (
        zmq_sender(event_type, events_at, bind=False, name=f"{name}.{events_stream}") as sender,
        zmq_receiver(order_type, orders_at, bind=False, name=f"{name}.{orders_stream}") as receiver,
    ):
        yield receiver, sender
