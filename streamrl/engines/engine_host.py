"""Serves one engine over two streams: the whole of an engine host's work. A host outlives its controller."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
    PauseMode,
    Resume,
    Sleep,
    StageWeights,
    Wake,
)
from streamrl.comm.stream import ReceiveStream, SendStream, greet, serve_each_controller
from streamrl.engines.engine import Engine
from streamrl.engines.remote_engine import ENGINE_FAILURE
from streamrl.plan.topology import RECONNECT_S

_EngineWideOrder = Pause | Resume | Sleep | Wake | StageWeights | CommitWeights | ComputeChecksums

OpenController = Callable[[], AbstractAsyncContextManager[tuple[ReceiveStream[EngineOrder], SendStream[EngineEvent]]]]
"""Opens the two streams to a controller: its orders, and the answers to it."""

LOAD_SECONDS = 0.2
UNCOMMITTED = -1
log = logging.getLogger(__name__)
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
    """Start ``engine``, carry out the ``orders`` of one controller until they end, then stop it.

    Raises ``EngineError`` when the engine died; its cause is sent first, as the last event of the stream.
    """

    @asynccontextmanager
    async def only_controller() -> AsyncIterator[tuple[ReceiveStream[EngineOrder], SendStream[EngineEvent]]]:
        yield orders, completions

    await serve_controllers(engine, only_controller, reconnect_s=0.0)
    await completions.aclose()


async def serve_controllers(
    engine: WatchedEngine, open_controller: OpenController, *, reconnect_s: float = RECONNECT_S
) -> None:
    """Start ``engine`` and carry out orders until they end, then stop it. A controller that is gone before (its stream
    broke) has a successor: ``engine`` drops all requests, stands still with the weights that it holds, says so to the
    next one, and waits for it ``reconnect_s`` at most.

    Raises ``EngineError`` when the engine died, whose cause is the last event of the stream, and ``StreamBroken`` when
    no controller came.
    """
    host = _EngineHost(engine)
    try:
        await host.start()
        await serve_each_controller(open_controller, host.serve, host.stand_still, reconnect_s=reconnect_s)
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


async def _send_farewell(completions: SendStream[EngineEvent], reason: str) -> None:
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

    async def serve(
        self, orders: ReceiveStream[EngineOrder], completions: SendStream[EngineEvent], wait_s: float
    ) -> None:
        """One controller, until its orders end; it must come within ``wait_s``. Then the engine is stopped.

        Raises ``EngineError`` when the engine died, ``StreamBroken`` when the controller is gone: alone, not in groups.
        """
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._engine.watch)  # it may die while nobody is there yet
                assert self._ready is not None
                await greet(completions, orders, self._ready, wait_s)
                await self._converse(orders, completions)
                watching.cancel_scope.cancel()
        except BaseException as error:
            cause = first_error(error)
            if isinstance(cause, EngineError):
                with anyio.move_on_after(FAREWELL_SECONDS, shield=True):
                    await _send_farewell(completions, str(cause))
            if isinstance(error, BaseExceptionGroup):
                raise cause from None
            raise
        with anyio.CancelScope(shield=True):
            await self._engine.aclose()  # whoever waits for the end of the stream waits for that

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

    async def stand_still(self) -> None:
        """Serve nothing until the next controller says so. What was asked for was cancelled, and nothing of it is said
        to anybody else: each controller has streams of its own."""
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._engine.watch)
                await self._engine.pause(PauseMode.ABORT, clear_cache=True)
                watching.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        assert self._ready is not None
        self._ready = msgspec.structs.replace(self._ready, paused=True)

    def _holds(self, policy_version: int, state_hash: int) -> None:
        assert self._ready is not None
        self._ready = msgspec.structs.replace(self._ready, policy_version=policy_version, state_hash=state_hash)

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
            self._holds(UNCOMMITTED, 0)  # until it is known to hold something
            done = await self._engine.commit(order.policy_version)
            self._holds(order.policy_version, done.state_hash)
            return done
        checksums: dict[str, str] = {}
        if isinstance(order, Pause):
            await self._engine.pause(order.mode, clear_cache=order.clear_cache)
        elif isinstance(order, Resume):
            await self._engine.resume()
        elif isinstance(order, Sleep):
            await self._engine.sleep(order.level)
            if order.level > 1:
                self._holds(UNCOMMITTED, 0)
        elif isinstance(order, Wake):
            await self._engine.wake()
        else:
            checksums = await self._engine.checksums()
        return OrderDone(order_id=order.order_id, seconds=0.0, checksums=checksums)

    async def _report_load(self, completions: SendStream[EngineEvent]) -> None:
        while True:
            await completions.send(self._engine.load())
            await anyio.sleep(LOAD_SECONDS)
