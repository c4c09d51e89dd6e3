"""Serves one engine over two streams: the whole of an engine host's work."""

from __future__ import annotations

import time
from typing import Protocol

import anyio

from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.engines.concurrent_calls import first_error
from streamrl.engines.engine import Engine
from streamrl.engines.remote_engine import ENGINE_FAILURE
from streamrl.errors import EngineError, RequestRefused, StreamBroken, StreamClosed, WeightError
from streamrl.messages import (
    Abort,
    CommitWeights,
    ComputeChecksums,
    EngineEvent,
    EngineOrder,
    Generate,
    Generated,
    GenerationFailed,
    OrderDone,
    OrderFailed,
    Pause,
    Resume,
    Sleep,
    StageWeights,
    Wake,
)

_EngineWideOrder = Pause | Resume | Sleep | Wake | StageWeights | CommitWeights | ComputeChecksums

LOAD_SECONDS = 0.2
FAREWELL_SECONDS = 1.0


class WatchedEngine(Engine, Protocol):
    """An engine that runs in this process, can be put to sleep, and can say when it died."""

    async def sleep(self, level: int) -> None:
        """Give the device's memory back until ``wake``."""
        ...

    async def wake(self) -> None:
        """Take the device's memory again."""
        ...

    async def watch(self) -> None:
        """Return never; raise ``EngineError`` when the engine died."""
        ...


async def serve_engine(
    engine: WatchedEngine, orders: ReceiveStream[EngineOrder], completions: SendStream[EngineEvent]
) -> None:
    """Start ``engine``, carry out ``orders`` until they end, then stop it.

    Raises ``EngineError`` when the engine died; its cause is sent first, as the last event of the stream.
    """
    host = _EngineHost(engine, orders, completions)
    try:
        await host.run()
    except BaseException as error:
        cause = first_error(error)
        if isinstance(cause, EngineError):
            with anyio.move_on_after(FAREWELL_SECONDS, shield=True):
                await _send_farewell(completions, str(cause))
        if isinstance(error, BaseExceptionGroup):
            raise cause from None
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()
    await completions.aclose()


async def _send_farewell(completions: SendStream[EngineEvent], reason: str) -> None:
    try:
        await completions.send(OrderFailed(order_id=ENGINE_FAILURE, reason=reason))
    except (StreamBroken, StreamClosed):
        return  # nobody is left to be told; the error itself is raised


class _EngineHost:
    def __init__(
        self, engine: WatchedEngine, orders: ReceiveStream[EngineOrder], completions: SendStream[EngineEvent]
    ) -> None:
        self._engine = engine
        self._orders = orders
        self._completions = completions

    async def run(self) -> None:
        ready = await self._engine.start()
        async with anyio.create_task_group() as group:
            group.start_soon(self._engine.watch)
            await self._completions.send(ready)  # waits for the controller; the engine may die meanwhile
            group.start_soon(self._report_load)
            async for order in self._orders:
                # Tasks start in this order and reach the engine before they wait, so a pause follows the requests
                # that were sent before it.
                if isinstance(order, Generate):
                    group.start_soon(self._generate, order)
                elif isinstance(order, Abort):
                    group.start_soon(self._engine.abort, order.request_ids)
                else:
                    group.start_soon(self._carry_out, order)
            group.cancel_scope.cancel()

    async def _generate(self, request: Generate) -> None:
        began = time.monotonic()
        try:
            completion = await self._engine.generate(request)
        except RequestRefused as error:
            await self._completions.send(GenerationFailed(request_id=request.request_id, reason=str(error)))
            return
        seconds = time.monotonic() - began
        await self._completions.send(Generated(request_id=request.request_id, completion=completion, seconds=seconds))

    async def _carry_out(self, order: _EngineWideOrder) -> None:
        began = time.monotonic()
        try:
            done = await self._act(order)
        except (WeightError, RequestRefused) as error:
            await self._completions.send(OrderFailed(order_id=order.order_id, reason=str(error)))
            return
        await self._completions.send(
            OrderDone(
                order_id=order.order_id,
                seconds=time.monotonic() - began,
                state_hash=done.state_hash,
                payload_bytes=done.payload_bytes,
                checksums=done.checksums,
            )
        )
        await self._completions.send(self._engine.load())

    async def _act(self, order: _EngineWideOrder) -> OrderDone:
        if isinstance(order, StageWeights):
            return await self._engine.stage(order.announcement)
        if isinstance(order, CommitWeights):
            return await self._engine.commit(order.policy_version)
        checksums: dict[str, str] = {}
        if isinstance(order, Pause):
            await self._engine.pause(order.mode, clear_cache=order.clear_cache)
        elif isinstance(order, Resume):
            await self._engine.resume()
        elif isinstance(order, Sleep):
            await self._engine.sleep(order.level)
        elif isinstance(order, Wake):
            await self._engine.wake()
        else:
            checksums = await self._engine.checksums()
        return OrderDone(order_id=order.order_id, seconds=0.0, checksums=checksums)

    async def _report_load(self) -> None:
        while True:
            await self._completions.send(self._engine.load())
            await anyio.sleep(LOAD_SECONDS)
