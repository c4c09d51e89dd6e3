"""The main coroutine of an engine process: it serves one engine to the controller over two streams.

``launch.roles.run_engine`` calls ``serve_engine`` when the process starts. The process ends with its controller; the
controller's end of the streams is ``remote_engine``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from os import getpid
from time import monotonic

from anyio import CancelScope, create_task_group, move_on_after, sleep
from msgspec.structs import replace

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
    """Start ``engine``, carry out the controller's orders until they end, then stop the engine and end the events.

    ``streams``: streams of orders and events, which are opened after the start: vLLM may fork while it starts, and no
    socket may be open then
    ``routed``: function that replaces an announcement of weights before the engine gets it

    Raises ``EngineError`` when the engine died, after its cause was sent as the last event, and ``StreamBroken`` when
    the controller died. No error is in an exception group."""
    try:
        ready = replace(await engine.start(), pid=getpid())
        async with streams as (orders, events):
            try:
                await _serve(engine, ready, orders, events, routed)
            except EngineError as error:
                with move_on_after(LAST_EVENT_SECONDS, shield=True):
                    await _send_last(events, str(error))
                raise
            with CancelScope(shield=True):
                await engine.aclose()  # before the events end: the controller waits for both by waiting for their end
                await events.aclose()
    finally:
        with CancelScope(shield=True):
            await engine.aclose()


async def _send_last(events: Events, reason: str) -> None:
    try:
        await events.send(messages.OrderFailed(order_id=ENGINE_FAILURE, reason=reason))
    except (StreamBroken, StreamClosed):
        return  # the controller is gone; ``serve_engine`` raises the error itself


async def _serve(
    engine: WatchedEngine, ready: messages.EngineReady, orders: Orders, events: Events, routed: Routed
) -> None:
    try:
        async with create_task_group() as group:
            group.start_soon(engine.watch)  # the engine may die before the controller has connected
            await send_hello(events, orders, ready)
            group.start_soon(_report_load, engine, events)
            async for order in orders:
                # Tasks start in the order of the orders and call the engine before they first wait. So a pause reaches
                # the engine after the requests that were sent before it.
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
        await sleep(LOAD_SECONDS)


async def _generate(engine: WatchedEngine, request: messages.Generate, events: Events) -> None:
    began = monotonic()
    try:
        completion = await engine.generate(request)
    except RequestRefused as error:
        await events.send(messages.GenerationFailed(request_id=request.request_id, reason=str(error)))
        return
    seconds = monotonic() - began
    await events.send(messages.Generated(request_id=request.request_id, completion=completion, seconds=seconds))


async def _call(engine: WatchedEngine, order: messages.EngineCall, events: Events) -> None:
    """Call the method that ``order`` names, and answer with its result."""
    began = monotonic()
    try:
        returned = await getattr(engine, order.method)(**order.arguments)
    except (WeightError, RequestRefused) as error:
        await events.send(messages.OrderFailed(order_id=order.order_id, reason=str(error)))
        return
    seconds = monotonic() - began
    answer = messages.OrderDone(order_id=order.order_id, seconds=seconds)
    if order.method == "checksums":
        answer = replace(answer, checksums=returned)
    elif returned is not None:  # the ``OrderDone`` of a stage or a commit
        answer = replace(returned, order_id=order.order_id, seconds=seconds)
    await events.send(answer)
    await events.send(engine.load())
