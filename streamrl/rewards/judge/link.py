"""The controller's side of the run's own judge: it hears how busy the actor is, and reports what it did."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import anyio
import msgspec

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
PATIENCE_S = 20.0  # for vLLM to stop; the supervisor ends what takes longer

E = TypeVar("E")

log = logging.getLogger(__name__)


class JudgeLink:
    """One judge after another (see ``Supervisor``), or none where the recipe has none. ``run`` beside everything."""

    def __init__(self, judge: Judge, topology: Topology) -> None:
        self._topology = topology
        self._there = bool(judge.model)
        self._share: Callable[[], float] = lambda: 0.0
        # Two engines that look at the same device's free memory at the same time mistake each other's for theirs.
        self._may_load = anyio.Event()
        if installed_device() == "cpu":
            self._may_load.set()
        self._ready = anyio.Event()
        self._retired = False
        self._connected = False
        self._serving = anyio.CancelScope()
        self._telling = anyio.CancelScope()
        self._past = self._now = JudgeReport()

    async def run(self) -> None:
        """Serve until retired and the judge has ended; a judge that died has a successor, or ends the run."""
        while self._there:
            try:
                with anyio.CancelScope() as self._serving:
                    await self._serve()
                return
            except StreamBroken as broken:
                if self._retired:
                    return  # nobody waits for a successor
                log.warning("%s is gone; the questions that it had are asked again: %s", JUDGE, broken)
                self._past = self._now.after(self._past)
                self._now = JudgeReport()
                self._connected = False

    async def ready(self, load: Callable[[], EngineLoad], capacity: int) -> None:
        """The actor's engines are there (``capacity``: requests that they run at once): wait for the judge."""

        def share() -> float:
            now = load()
            return round(min((now.running + now.waiting) / max(capacity, 1), 1.0), 2)

        self._share = share
        self._may_load.set()
        if self._there:
            await self._ready.wait()

    def retire(self) -> None:
        """Retire the judge: no question comes any more."""
        self._retired = True
        self._telling.cancel()

    def measured(self, event: E) -> E:
        """A step with what the judge did until then; any other event as it is."""
        if not self._there or not isinstance(event, StepFinished):
            return event
        report = self._now.after(self._past)
        figures = {
            "judge/questions_total": float(report.questions),
            "judge/batches_total": float(report.batches),
            "judge/waited_mean_s": report.waited_s / max(report.questions, 1),
            "judge/awake_s_total": report.awake_s,
        }
        return msgspec.structs.replace(event, metrics=event.metrics | figures)

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
        with anyio.CancelScope() as self._telling:
            while not self._retired:
                if (share := self._share()) != last:
                    await orders.send(ActorLoad(share=share))  # waits for a judge that is being started again
                    last = share
                await anyio.sleep(SEND_LOAD_S)
        # One that is just being started again has nothing to end.
        self._serving.deadline = anyio.current_time() + (PATIENCE_S if self._connected else 0.0)
        await orders.aclose()

    async def _receive_reports(self, reports: ReceiveStream[JudgeEvent]) -> None:
        async for event in reports:
            if isinstance(event, JudgeReady):
                self._connected = True
                self._ready.set()
            else:
                self._now = event
