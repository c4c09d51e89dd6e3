"""Serves one engine over two streams: the whole of an engine host's work. A host ends with its controller."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import anyio
import msgspec

from streamrl.base import messages
from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import EngineError, RequestRefused, StreamBroken, StreamClosed, WeightError
from streamrl.comm.stream import ReceiveStream, SendStream, send_hello
from streamrl.contracts import WatchedEngine
from streamrl.engines.remote_engine import ENGINE_FAILURE

Orders = ReceiveStream[messages.EngineOrder]
Events = SendStream[messages.EngineEvent]
Routed = Callable[[messages.WeightAnnouncement], messages.WeightAnnouncement]

LOAD_SECONDS = 0.2
LAST_EVENT_SECONDS = 1.0


async def serve_engine(
    engine: WatchedEngine,
    streams: AbstractAsyncContextManager[tuple[Orders, Events]],
    routed: Routed = lambda announced: announced,
) -> None:
    """Start ``engine``, then open the ``streams`` to the controller (its orders, and the answers to it: vLLM may fork,
    and no socket may be open then). Carry out orders until they end, stop the engine, end the answers. ``routed``: what
    is announced to the workers in place of an announcement.

    Raises ``EngineError`` when the engine died, whose cause is the last event of the stream, and ``StreamBroken`` when
    the controller did: alone, not in groups."""
    try:
        ready = msgspec.structs.replace(await engine.start(), pid=os.getpid())
        async with streams as (orders, events):
            try:
                await _serve(engine, ready, orders, events, routed)
            except EngineError as error:
                with anyio.move_on_after(LAST_EVENT_SECONDS, shield=True):
                    await _send_last(events, str(error))
                raise
            with anyio.CancelScope(shield=True):
                await engine.aclose()  # what waits for the end of the stream waits for that
                await events.aclose()
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


async def _send_last(events: Events, reason: str) -> None:
    try:
        await events.send(messages.OrderFailed(order_id=ENGINE_FAILURE, reason=reason))
    except (StreamBroken, StreamClosed):
        return  # the controller is gone; the error itself is raised


async def _serve(
    engine: WatchedEngine, ready: messages.EngineReady, orders: Orders, events: Events, routed: Routed
) -> None:
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.watch)  # it may die before the controller is there
            await send_hello(events, orders, ready)
            group.start_soon(_report_load, engine, events)
            async for order in orders:
                # Tasks start in this order and reach the engine before they wait, so a pause follows the requests
                # that were sent before it.
                if isinstance(order, messages.Generate):
                    group.start_soon(_generate, engine, order, events)
                elif isinstance(order, messages.Abort):
                    group.start_soon(engine.abort, order.request_ids)
                else:
                    announced = order.arguments.get("announcement")
                    if isinstance(announced, messages.WeightAnnouncement):
                        order.arguments["announcement"] = routed(announced)
                    group.start_soon(_call, engine, order, events)
            group.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def _report_load(engine: WatchedEngine, events: Events) -> None:
    while True:
        await events.send(engine.load())
        await anyio.sleep(LOAD_SECONDS)


async def _generate(engine: WatchedEngine, request: messages.Generate, events: Events) -> None:
    began = time.monotonic()
    try:
        completion = await engine.generate(request)
    except RequestRefused as error:
        await events.send(messages.GenerationFailed(request_id=request.request_id, reason=str(error)))
        return
    seconds = time.monotonic() - began
    await events.send(messages.Generated(request_id=request.request_id, completion=completion, seconds=seconds))


async def _call(engine: WatchedEngine, order: messages.EngineCall, events: Events) -> None:
    """Call a method of the whole engine."""
    began = time.monotonic()
    try:
        returned = await getattr(engine, order.method)(**order.arguments)
    except (WeightError, RequestRefused) as error:
        await events.send(messages.OrderFailed(order_id=order.order_id, reason=str(error)))
        return
    seconds = time.monotonic() - began
    done = messages.OrderDone(order_id=order.order_id, seconds=seconds)
    if order.method == "checksums":
        done = msgspec.structs.replace(done, checksums=returned)
    elif returned is not None:  # of a stage or a commit
        done = msgspec.structs.replace(returned, order_id=order.order_id, seconds=seconds)
    await events.send(done)
    await events.send(engine.load())
