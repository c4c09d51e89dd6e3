"""The controller's side of the run's own judge: it sends the load of the actor to the judge's process, and adds the
judge's counters to the metrics of steps. ``launch.run_controller`` runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
from msgspec.structs import replace

from streamrl.base.errors import StreamBroken
from streamrl.base.messages import EngineLoad
from streamrl.base.run_events import StepFinished
from streamrl.comm.stream import ReceiveStream, SendStream, converse
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.engines.vllm.options import installed_device
from streamrl.recipe.judge import Judge
from streamrl.recipe.topology import JUDGE, Topology
from streamrl.rewards.judge.gate import ActorLoad, JudgeEvent, JudgeOrder, JudgeReady, JudgeReport

SEND_LOAD_S = 0.1
PATIENCE_S = 20.0  # limit of the wait for vLLM to stop; afterwards the supervisor ends the process

AnyEvent = TypeVar("AnyEvent")

log = logging.getLogger(__name__)


class JudgeLink:
    """Link to the judge's process and to its successors, which the ``Supervisor`` starts. Without a judge in the recipe
    it does nothing. ``run`` must run as long as the run needs its judge."""

    def __init__(self, judge: Judge, topology: Topology) -> None:
        self._topology = topology
        self._has_judge = bool(judge.model)
        self._share: Callable[[], float] = lambda: 0.0
        # On a shared device the judge loads after the actor: an engine measures the free memory of its device when it
        # starts, and another engine that loads at the same time would distort the measurement.
        self._may_load = anyio.Event()
        if installed_device() == "cpu":
            self._may_load.set()
        self._ready = anyio.Event()
        self._retired = False
        self._connected = False
        self._serving = anyio.CancelScope()
        self._sending_load = anyio.CancelScope()
        self._past_report = self._report = JudgeReport()

    async def run(self) -> None:
        """Serve until the judge is retired and has ended. A judge that died has a successor, or its end ends the
        run."""
        while self._has_judge:
            try:
                with anyio.CancelScope() as self._serving:
                    await self._serve()
                return
            except StreamBroken as broken:
                if self._retired:
                    return  # no successor is needed
                log.warning("%s is gone; the questions that it had are asked again: %s", JUDGE, broken)
                self._past_report = self._report.after(self._past_report)
                self._report = JudgeReport()
                self._connected = False

    async def ready(self, load: Callable[[], EngineLoad], capacity: int) -> None:
        """Let the judge load, and wait until it is ready. To be called when the actor's engines are ready. ``load``:
        function that returns their load; ``capacity``: number of requests that they run at once."""

        def share() -> float:
            engine_load = load()
            return round(min((engine_load.running + engine_load.waiting) / max(capacity, 1), 1.0), 2)

        self._share = share
        self._may_load.set()
        if self._has_judge:
            await self._ready.wait()

    def retire(self) -> None:
        """Retire the judge: no more questions come."""
        self._retired = True
        self._sending_load.cancel()

    def measured(self, event: AnyEvent) -> AnyEvent:
        """``event`` with the judge's metrics where it is a finished step; any other event as it is."""
        if not self._has_judge or not isinstance(event, StepFinished):
            return event
        report = self._report.after(self._past_report)
        figures = {
            "judge/questions_total": float(report.questions),
            "judge/batches_total": float(report.batches),
            "judge/waited_mean_s": report.waited_s / max(report.questions, 1),
            "judge/awake_s_total": report.awake_s,
        }
        return replace(event, metrics=event.metrics | figures)

    async def _serve(self) -> None:
        orders_at, reports_at = (self._topology.endpoint(JUDGE, stream) for stream in ("orders", "reports"))
        async with (
            zmq_sender(JudgeOrder, orders_at, bind=True, name=f"{JUDGE}.orders") as orders,
            zmq_receiver(JudgeEvent, reports_at, bind=True, name=f"{JUDGE}.reports") as reports,
        ):
            await converse(partial(self._send_load, orders), partial(self._receive_reports, reports))

    async def _send_load(self, orders: SendStream[JudgeOrder]) -> None:
        await self._may_load.wait()
        last: float | None = None
        with anyio.CancelScope() as self._sending_load:
            while not self._retired:
                share = self._share()
                if share != last:
                    await orders.send(ActorLoad(share=share))  # waits for a judge that is being restarted
                    last = share
                await anyio.sleep(SEND_LOAD_S)
        # A judge that is just being restarted has nothing to finish, so no wait for its end is needed.
        self._serving.deadline = anyio.current_time() + (PATIENCE_S if self._connected else 0.0)
        await orders.aclose()

    async def _receive_reports(self, reports: ReceiveStream[JudgeEvent]) -> None:
        async for event in reports:
            if isinstance(event, JudgeReady):
                self._connected = True
                self._ready.set()
            else:
                self._report = event
