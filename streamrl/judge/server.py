"""Serves the run's own judge: an engine that nothing is pushed to, behind a gate, on vLLM's own routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import StreamEnded
from streamrl.base.messages import PauseMode
from streamrl.comm.stream import ReceiveStream, SendStream, greet, serve_each_controller
from streamrl.judge.gate import JudgeGate, gate_policy
from streamrl.judge.messages import JudgeEvent, JudgeOrder, JudgeReady, JudgeReport, with_counters
from streamrl.plan.topology import RECONNECT_S
from streamrl.recipe.judge import Judge, YieldKind
from streamrl.vllm.engine import VllmEngine
from streamrl.vllm.openai_form import OpenAIRoutes

REPORT_S = 0.5
_SLEEP_LEVEL = 1  # its weights stay in host memory

Move = Callable[[], Awaitable[None]]
OpenController = Callable[[], AbstractAsyncContextManager[tuple[ReceiveStream[JudgeOrder], SendStream[JudgeEvent]]]]


async def serve_judge(
    engine: VllmEngine,
    judge: Judge,
    socket_path: Path,
    open_controller: OpenController,
    *,
    sleeps: bool,
    reconnect_s: float = RECONNECT_S,
) -> None:
    """Load the model when the first order comes, then answer questions at ``socket_path`` until orders end. A
    controller that is gone before has a successor, which is waited for ``reconnect_s`` at most.

    ``sleeps``: the engine can be put to sleep; otherwise it is paused. Raises ``EngineError`` when it died, and
    ``StreamBroken`` when no controller came.
    """
    try:
        async with anyio.create_task_group() as tasks:
            server = _JudgeServer(engine, judge, socket_path, tasks, sleeps=sleeps)
            await serve_each_controller(open_controller, server.serve, server.stand_still, reconnect_s=reconnect_s)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


class _JudgeServer:
    """The engine with its gate and routes, which outlive controllers."""

    def __init__(self, engine: VllmEngine, judge: Judge, socket_path: Path, tasks: TaskGroup, *, sleeps: bool) -> None:
        self._engine, self._judge, self._socket_path, self._tasks = engine, judge, socket_path, tasks
        self._gate = JudgeGate(gate_policy(judge), *_moves(engine, judge, sleeps=sleeps))
        self._ready: JudgeReady | None = None

    async def serve(self, orders: ReceiveStream[JudgeOrder], reports: SendStream[JudgeEvent], wait_s: float) -> None:
        """One controller, until its orders end; it must come within ``wait_s``. Then the engine is stopped."""
        with suppress(StreamEnded):
            await self._answer(orders, reports, wait_s)
        self._tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._engine.aclose()  # whoever waits for the end of the stream waits for that
            await reports.aclose()

    async def stand_still(self) -> None:
        """Without a controller nothing is sampled: the judge has the cores for itself."""
        self._gate.actor_runs(0.0)

    async def _answer(self, orders: ReceiveStream[JudgeOrder], reports: SendStream[JudgeEvent], wait_s: float) -> None:
        if self._ready is None:
            self._gate.actor_runs((await orders.receive()).share)
            self._ready = await self._start()
        await greet(reports, orders, self._ready, wait_s)
        before = self._gate.report()
        try:
            async with anyio.create_task_group() as told:
                told.start_soon(self._report, before, reports)
                async for order in orders:
                    self._gate.actor_runs(order.share)
                told.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        await reports.send(with_counters(self._gate.report(), before, sign=-1))

    async def _start(self) -> JudgeReady:
        ready = await self._engine.start()
        judge, gate = self._judge, self._gate
        routes = OpenAIRoutes(self._engine.front_end, model_path=judge.model, name=judge.model, gate=gate.question)
        for serving in (self._engine.watch, gate.run, partial(routes.serve, self._socket_path)):
            self._tasks.start_soon(serving)
        await routes.started()
        return JudgeReady(max_model_len=ready.max_model_len)

    async def _report(self, before: JudgeReport, reports: SendStream[JudgeEvent]) -> None:
        last = None
        while True:
            report = with_counters(self._gate.report(), before, sign=-1)
            if report != last:
                await reports.send(report)
                last = report
            await anyio.sleep(REPORT_S)


def _moves(engine: VllmEngine, judge: Judge, *, sleeps: bool) -> tuple[Move, Move]:
    """How it wakes and how it rests. Nobody is inside while it rests, so nothing is aborted."""

    async def pause() -> None:
        await engine.pause(PauseMode.KEEP, clear_cache=False)

    async def sleep() -> None:
        await engine.sleep(_SLEEP_LEVEL)

    async def stay() -> None:
        """It goes on as it is."""

    if judge.when_idle is YieldKind.NEVER:
        return stay, stay
    return (engine.wake, sleep) if sleeps else (engine.resume, pause)
