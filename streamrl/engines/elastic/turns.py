"""Turns of engines and trainer ranks on the same GPUs (``engines.gpu_sharing``).

``launch.processes`` makes them in the controller, ``Controller`` and ``Resumption`` take them. The ranks hold their
state on the GPU only from the order of a step to its last report (``learning.state.host_memory``), so the engines must
sleep before the order, and may wake after the report. An engine that dies asleep is started again with the next turn of
the engines; a vLLM that starts needs its share of the memory free."""

from __future__ import annotations

from collections.abc import Callable, Collection

from anyio import current_time

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Metrics
from streamrl.contracts import Turns
from streamrl.engines.elastic.engine_processes import EngineProcesses


class EngineTurns(Turns):
    """Has the engines ``names`` sleep and wake.

    ``ranks_hold_memory``: function that returns whether a rank may have its state on the GPU"""

    def __init__(
        self, processes: EngineProcesses, names: Collection[str], ranks_hold_memory: Callable[[], bool]
    ) -> None:
        self._processes = processes
        self._names = names
        self._ranks_hold_memory = ranks_hold_memory
        self._sleep_s = 0.0
        self._wake_s = 0.0
        self.of_engines = True
        """Whether it is the turn of the engines."""

    @property
    def figures(self) -> Metrics:
        """Metrics of the last switches."""
        return {"time/engines_sleep_s": self._sleep_s, "time/engines_wake_s": self._wake_s}

    async def train(self) -> None:
        if not self.of_engines:
            return
        began_s = current_time()
        self.of_engines = False
        await self._processes.sleep_all()
        self._sleep_s = current_time() - began_s

    async def sample(self) -> None:
        if self._ranks_hold_memory():
            raise StreamRLError("engines were to wake while trainer ranks hold the memory of the GPU")
        if self.of_engines:
            return
        began_s = current_time()
        await self._processes.use(self._names)
        self.of_engines = True
        self._wake_s = current_time() - began_s
