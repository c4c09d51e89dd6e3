"""Serves the run's own judge: an engine that nothing is pushed to, behind a gate, on vLLM's own routes."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from streamrl.comm.judge_messages import JudgeEvent, JudgeOrder, JudgeReady, JudgeReport
from streamrl.comm.stream import ReceiveStream, SendStream, greet
from streamrl.config.judge import Judge, YieldKind
from streamrl.config.topology import RECONNECT_S
from streamrl.engines.concurrent_calls import first_error
from streamrl.engines.judge_gate import JudgeGate, gate_policy
from streamrl.engines.vllm_engine import VllmEngine
from streamrl.engines.vllm_openai import OpenAIRoutes
from streamrl.errors import NobodyCame, StreamBroken, StreamEnded
from streamrl.messages import PauseMode

log = logging.getLogger(__name__)

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
    server, wait_s = _JudgeServer(engine, judge, socket_path, sleeps=sleeps), math.inf
    try:
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    async with open_controller() as (orders, reports):
                        await server.serve(tasks, orders, reports, wait_s)
                        tasks.cancel_scope.cancel()
                        with anyio.CancelScope(shield=True):
                            await engine.aclose()  # whoever waits for the end of the stream waits for that
                            await reports.aclose()
                    return
                except NobodyCame:
                    raise
                except StreamBroken as broken:
                    log.warning("the controller is gone (%s); waiting for the next one", broken)
                wait_s = reconnect_s
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()


class _JudgeServer:
    """The engine with its gate and routes, which outlive controllers."""

    def __init__(self, engine: VllmEngine, judge: Judge, socket_path: Path, *, sleeps: bool) -> None:
        self._engine, self._judge, self._socket_path = engine, judge, socket_path
        self._gate = JudgeGate(gate_policy(judge), *_moves(engine, judge, sleeps=sleeps))
        self._ready: JudgeReady | None = None

    async def serve(
        self,
        tasks: TaskGroup,
        orders: ReceiveStream[JudgeOrder],
        reports: SendStream[JudgeEvent],
        wait_s: float,
    ) -> None:
        """One controller, until its orders end; it must come within ``wait_s``. ``tasks``: for what outlives it."""
        if self._ready is None:
            try:
                self._gate.actor_runs((await orders.receive()).share)
            except StreamEnded:
                return
            self._ready = await self._start(tasks)
        await greet(reports, orders, self._ready, wait_s)
        before = self._gate.report()
        try:
            async with anyio.create_task_group() as told:
                told.start_soon(self._report, before, reports)
                async for order in orders:
                    self._gate.actor_runs(order.share)
                told.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            self._gate.actor_runs(0.0)  # without a controller nothing is sampled
            raise first_error(errors) from None
        await reports.send(_since(before, self._gate.report()))

    async def _start(self, tasks: TaskGroup) -> JudgeReady:
        ready = await self._engine.start()
        judge, gate = self._judge, self._gate
        routes = OpenAIRoutes(self._engine.front_end, model_path=judge.model, name=judge.model, gate=gate.question)
        tasks.start_soon(self._engine.watch)
        tasks.start_soon(gate.run)
        tasks.start_soon(routes.serve, self._socket_path)
        await routes.started()
        return JudgeReady(max_context=ready.max_context)

    async def _report(self, before: JudgeReport, reports: SendStream[JudgeEvent]) -> None:
        last = None
        while True:
            report = _since(before, self._gate.report())
            if report != last:
                await reports.send(report)
                last = report
            await anyio.sleep(REPORT_S)


def _since(before: JudgeReport, now: JudgeReport) -> JudgeReport:
    """Counters from ``before`` on; what waits and is inside now."""
    return JudgeReport(
        questions=now.questions - before.questions,
        batches=now.batches - before.batches,
        waited_s=now.waited_s - before.waited_s,
        awake_s=now.awake_s - before.awake_s,
        waiting=now.waiting,
        inside=now.inside,
    )


def _moves(engine: VllmEngine, judge: Judge, *, sleeps: bool) -> tuple[Move, Move]:
    """How it wakes and how it rests. Nobody is inside while it rests, so nothing is aborted."""

    async def pause() -> None:
        await engine.pause(PauseMode.KEEP, clear_cache=False)

    async def sleep() -> None:
        await engine.sleep(_SLEEP_LEVEL)

    async def stay() -> None:
        """It goes on as it is."""

    if judge.yields is YieldKind.NEVER:
        return stay, stay
    return (engine.wake, sleep) if sleeps else (engine.resume, pause)
