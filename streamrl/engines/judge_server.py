"""Serves the run's own judge: an engine that nothing is pushed to, behind a gate, on vLLM's own routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from streamrl.comm.judge_messages import JudgeEvent, JudgeOrder, JudgeReady
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.config.judge import Judge, YieldKind
from streamrl.engines.concurrent_calls import first_error
from streamrl.engines.judge_gate import JudgeGate, gate_policy
from streamrl.engines.vllm_engine import VllmEngine
from streamrl.engines.vllm_openai import OpenAIRoutes
from streamrl.errors import StreamEnded
from streamrl.messages import PauseMode

REPORT_S = 0.5
_SLEEP_LEVEL = 1  # its weights stay in host memory

Move = Callable[[], Awaitable[None]]


async def serve_judge(
    engine: VllmEngine,
    judge: Judge,
    socket_path: Path,
    orders: ReceiveStream[JudgeOrder],
    reports: SendStream[JudgeEvent],
    *,
    sleeps: bool,
) -> None:
    """Load the model when the first order comes, then answer questions at ``socket_path`` until orders end.

    ``sleeps``: the engine can be put to sleep; otherwise it is paused. Raises ``EngineError`` when it died.
    """
    try:
        try:
            first = await orders.receive()
        except StreamEnded:
            return
        ready = await engine.start()
        gate = JudgeGate(gate_policy(judge), *_moves(engine, judge, sleeps=sleeps))
        gate.actor_runs(first.share)
        routes = OpenAIRoutes(engine.front_end, model_path=judge.model, name=judge.model, gate=gate.question)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.watch)
            tasks.start_soon(gate.run)
            tasks.start_soon(routes.serve, socket_path)
            await routes.started()
            await reports.send(JudgeReady(max_context=ready.max_context))
            tasks.start_soon(_report, gate, reports)
            async for order in orders:
                gate.actor_runs(order.share)
            tasks.cancel_scope.cancel()
        await reports.send(gate.report())
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()
    await reports.aclose()


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


async def _report(gate: JudgeGate, reports: SendStream[JudgeEvent]) -> None:
    last = None
    while True:
        report = gate.report()
        if report != last:
            await reports.send(report)
            last = report
        await anyio.sleep(REPORT_S)
