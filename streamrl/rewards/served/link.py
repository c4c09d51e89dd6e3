"""The controller's side of a model that the run serves: it sends the load of the actor to the process of the model, and
adds the counters of the model to the metrics of steps. ``launch.run_controller`` runs it."""

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
from streamrl.engines.vllm.visible_gpus import installed_device
from streamrl.recipe.topology import Role, Topology, served_name
from streamrl.rewards.served.gate import ActorLoad, ModelEvent, ModelOrder, ModelReady, ModelReport

SEND_LOAD_S = 0.1
PATIENCE_S = 20.0  # limit of the wait for vLLM to stop; afterwards the supervisor ends the process

AnyEvent = TypeVar("AnyEvent")

log = logging.getLogger(__name__)


class ServedModelLink:
    """Link to the process of a judge or teacher and to its successors, which the ``Supervisor`` starts. ``run`` must
    run as long as the run needs the model."""

    def __init__(self, role: Role, topology: Topology) -> None:
        self._role = role
        self._name = served_name(role)
        self._topology = topology
        self._share: Callable[[], float] = lambda: 0.0
        # On a shared device the model loads after the actor: an engine measures the free memory of its device when it
        # starts, and another engine that loads at the same time would distort the measurement.
        self._may_load = anyio.Event()
        if installed_device() == "cpu":
            self._may_load.set()
        self._ready = anyio.Event()
        self._retired = False
        self._connected = False
        self._serving = anyio.CancelScope()
        self._sending_load = anyio.CancelScope()
        self._past_report = self._report = ModelReport()

    async def run(self) -> None:
        """Serve until the model is retired and its process has ended. A process that died has a successor, or its end
        ends the run."""
        while True:
            try:
                with anyio.CancelScope() as self._serving:
                    await self._serve()
                return
            except StreamBroken as broken:
                if self._retired:
                    return  # no successor is needed
                log.warning("%s is gone; the questions that it had are asked again: %s", self._name, broken)
                self._past_report = self._report.after(self._past_report)
                self._report = ModelReport()
                self._connected = False

    async def ready(self, load: Callable[[], EngineLoad], capacity: int) -> None:
        """Let the model load, and wait until it is ready. To be called when the actor's engines are ready. ``load``:
        function that returns their load; ``capacity``: number of requests that they run at once."""

        def share() -> float:
            engine_load = load()
            return round(min((engine_load.running + engine_load.waiting) / max(capacity, 1), 1.0), 2)

        self._share = share
        self._may_load.set()
        await self._ready.wait()

    def retire(self) -> None:
        """Retire the model: no more questions come."""
        self._retired = True
        self._sending_load.cancel()

    def measured(self, event: AnyEvent) -> AnyEvent:
        """``event`` with the metrics of the model where it is a finished step; any other event as it is."""
        if not isinstance(event, StepFinished):
            return event
        report = self._report.after(self._past_report)
        figures = {
            f"{self._role}/questions_total": float(report.questions),
            f"{self._role}/batches_total": float(report.batches),
            f"{self._role}/waited_mean_s": report.waited_s / max(report.questions, 1),
            f"{self._role}/awake_s_total": report.awake_s,
        }
        return replace(event, metrics=event.metrics | figures)

    async def _serve(self) -> None:
        orders_at, reports_at = (self._topology.endpoint(self._name, stream) for stream in ("orders", "reports"))
        async with (
            zmq_sender(ModelOrder, orders_at, bind=True, name=f"{self._name}.orders") as orders,
            zmq_receiver(ModelEvent, reports_at, bind=True, name=f"{self._name}.reports") as reports,
        ):
            await converse(partial(self._send_load, orders), partial(self._receive_reports, reports))

    async def _send_load(self, orders: SendStream[ModelOrder]) -> None:
        await self._may_load.wait()
        last = None
        with anyio.CancelScope() as self._sending_load:
            while not self._retired:
                share = self._share()
                if share != last:
                    await orders.send(ActorLoad(share=share))  # waits for a model that is being restarted
                    last = share
                await anyio.sleep(SEND_LOAD_S)
        # A model that is just being restarted has nothing to finish, so no wait for its end is needed.
        self._serving.deadline = anyio.current_time() + (PATIENCE_S if self._connected else 0.0)
        await orders.aclose()

    async def _receive_reports(self, reports: ReceiveStream[ModelEvent]) -> None:
        async for event in reports:
            if isinstance(event, ModelReady):
                self._connected = True
                self._ready.set()
            else:
                self._report = event
