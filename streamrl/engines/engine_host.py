"""Serves one engine over two streams: the whole of an engine host's work."""

from __future__ import annotations

import os
import time
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio
import msgspec

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import EngineError, RequestRefused, StreamBroken, StreamClosed, WeightError
from streamrl.base.messages import (
    Abort,
    CommitWeights,
    ComputeChecksums,
    EngineEvent,
    EngineOrder,
    EngineReady,
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
from streamrl.comm.stream import ReceiveStream, SendStream, send_hello
from streamrl.engines.engine import Engine
from streamrl.engines.remote_engine import ENGINE_FAILURE

_EngineWideOrder = Pause | Resume | Sleep | Wake | StageWeights | CommitWeights | ComputeChecksums

LOAD_SECONDS = 0.2
GOODBYE_SECONDS = 1.0


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
    engine: WatchedEngine,
    streams: AbstractAsyncContextManager[tuple[ReceiveStream[EngineOrder], SendStream[EngineEvent]]],
) -> None:
    """Start ``engine``, then open the ``streams`` to the controller (its orders, and the answers to it: vLLM may fork,
    and no socket may be open then). Carry out orders until they end, stop the engine, end the answers.

    Raises ``EngineError`` when the engine died; its cause is sent first, as the last event of the stream. Raises
    ``StreamBroken`` when the controller is gone.
    """
    host = _EngineHost(engine)
    try:
        await host.start()
        async with streams as (orders, completions):
            await host.serve(orders, completions)
            with anyio.CancelScope(shield=True):
                await engine.aclose()  # the controller waits for the end of the stream, and so for that
            await completions.aclose()
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


async def _send_goodbye(completions: SendStream[EngineEvent], reason: str) -> None:
    try:
        await completions.send(OrderFailed(order_id=ENGINE_FAILURE, reason=reason))
    except (StreamBroken, StreamClosed):
        return  # nobody is left to be told; the error itself is raised


class _EngineHost:
    def __init__(self, engine: WatchedEngine) -> None:
        self._engine = engine
        self._ready: EngineReady | None = None

    async def start(self) -> None:
        """Load the model."""
        self._ready = msgspec.structs.replace(await self._engine.start(), pid=os.getpid())

    async def serve(self, orders: ReceiveStream[EngineOrder], completions: SendStream[EngineEvent]) -> None:
        """Until orders end. Raises ``EngineError`` and ``StreamBroken`` alone, not in groups."""
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._engine.watch)  # it may die while nobody is there yet
                assert self._ready is not None
                await send_hello(completions, orders, self._ready)
                await self._converse(orders, completions)
                watching.cancel_scope.cancel()
        except BaseException as error:
            cause = first_error(error)
            if isinstance(cause, EngineError):
                with anyio.move_on_after(GOODBYE_SECONDS, shield=True):
                    await _send_goodbye(completions, str(cause))
            if isinstance(error, BaseExceptionGroup):
                raise cause from None
            raise

    async def _converse(self, orders: ReceiveStream[EngineOrder], completions: SendStream[EngineEvent]) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._report_load, completions)
            async for order in orders:
                # Tasks start in this order and reach the engine before they wait, so a pause follows the requests
                # that were sent before it.
                if isinstance(order, Generate):
                    group.start_soon(self._generate, order, completions)
                elif isinstance(order, Abort):
                    group.start_soon(self._engine.abort, order.request_ids)
                else:
                    group.start_soon(self._carry_out, order, completions)
            group.cancel_scope.cancel()

    async def _generate(self, request: Generate, completions: SendStream[EngineEvent]) -> None:
        began = time.monotonic()
        try:
            completion = await self._engine.generate(request)
        except RequestRefused as error:
            await completions.send(GenerationFailed(request_id=request.request_id, reason=str(error)))
            return
        seconds = time.monotonic() - began
        await completions.send(Generated(request_id=request.request_id, completion=completion, seconds=seconds))

    async def _carry_out(self, order: _EngineWideOrder, completions: SendStream[EngineEvent]) -> None:
        began = time.monotonic()
        try:
            # What is begun on the whole engine is seen to its end, whoever asked for it; but fetching may be given up.
            with anyio.CancelScope(shield=not isinstance(order, StageWeights)):
                done = await self._act(order)
        except (WeightError, RequestRefused) as error:
            await completions.send(OrderFailed(order_id=order.order_id, reason=str(error)))
            return
        await completions.send(
            OrderDone(
                order_id=order.order_id,
                seconds=time.monotonic() - began,
                state_hash=done.state_hash,
                payload_bytes=done.payload_bytes,
                checksums=done.checksums,
            )
        )
        await completions.send(self._engine.load())

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

    async def _report_load(self, completions: SendStream[EngineEvent]) -> None:
        while True:
            await completions.send(self._engine.load())
            await anyio.sleep(LOAD_SECONDS)
