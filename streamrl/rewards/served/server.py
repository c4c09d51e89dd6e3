"""The process of a judge or teacher: a vLLM engine that gets no pushed weights, behind a gate, with OpenAI-compatible
routes on a unix socket. ``launch.roles`` runs ``serve_model`` in it; ``link`` in the controller sends the orders."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import StreamEnded
from streamrl.base.messages import PauseMode
from streamrl.comm.stream import ReceiveStream, SendStream, send_hello
from streamrl.recipe.served_models import ServedModel, YieldKind
from streamrl.rewards.served.gate import ModelEvent, ModelOrder, ModelReady, QuestionBatcher

if TYPE_CHECKING:
    from streamrl.engines.vllm.engine import RunEngine

REPORT_S = 0.5

Move = Callable[[], Awaitable[None]]


async def serve_model(
    engine: RunEngine,
    settings: ServedModel,
    socket_path: Path,
    orders: ReceiveStream[ModelOrder],
    reports: SendStream[ModelEvent],
    *,
    sleeps: bool,
) -> None:
    """Load the model when the first order comes, then answer questions at ``socket_path`` until orders end.

    ``sleeps``: an idle engine is put to sleep; otherwise it is paused. Raises ``EngineError`` when the engine died, and
    ``StreamBroken`` when the controller is gone."""
    try:
        async with anyio.create_task_group() as tasks:
            server = _ModelServer(engine, settings, socket_path, tasks, sleeps=sleeps)
            with suppress(StreamEnded):
                await server.serve(orders, reports)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        with anyio.CancelScope(shield=True):
            await engine.aclose()
    await reports.aclose()  # the controller waits for the end of the stream, which shows that the engine has stopped


class _ModelServer:
    """The engine with its gate and routes."""

    def __init__(
        self, engine: RunEngine, settings: ServedModel, socket_path: Path, tasks: TaskGroup, *, sleeps: bool
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._socket_path = socket_path
        self._tasks = tasks
        self._gate = QuestionBatcher(settings, *_moves(engine, settings, sleeps=sleeps))

    async def serve(self, orders: ReceiveStream[ModelOrder], reports: SendStream[ModelEvent]) -> None:
        """Serve until orders end. Raises ``StreamEnded`` where they end before the first order."""
        self._gate.actor_runs((await orders.receive()).share)
        await send_hello(reports, orders, await self._start())
        try:
            async with anyio.create_task_group() as reporting:
                reporting.start_soon(self._report, reports)
                async for order in orders:
                    self._gate.actor_runs(order.share)
                reporting.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        await reports.send(self._gate.report())

    async def _start(self) -> ModelReady:
        from streamrl.engines.vllm.openai_form import OpenAIRoutes

        ready = await self._engine.start()
        settings = self._settings
        gate = self._gate
        routes = OpenAIRoutes(
            self._engine.front_end, model_path=settings.model, name=settings.model, gate=gate.question
        )
        for task in (self._engine.watch, gate.run, partial(routes.serve, self._socket_path)):
            self._tasks.start_soon(task)
        await routes.started()
        return ModelReady(max_model_len=ready.max_model_len)

    async def _report(self, reports: SendStream[ModelEvent]) -> None:
        last = None
        while True:
            report = self._gate.report()
            if report != last:
                await reports.send(report)
                last = report
            await anyio.sleep(REPORT_S)


def _moves(engine: RunEngine, settings: ServedModel, *, sleeps: bool) -> tuple[Move, Move]:
    """Return the functions that wake the model and put it to rest. They are called while it answers no question,
    so no request is aborted."""

    async def do_nothing() -> None:
        """Keep the model as it is."""

    if settings.when_idle is YieldKind.NEVER:
        return do_nothing, do_nothing
    pause = partial(engine.pause, PauseMode.KEEP, clear_cache=False)

    async def wake() -> None:
        await engine.wake()
        await engine.resume()

    return (wake, engine.sleep) if sleeps else (engine.resume, pause)
