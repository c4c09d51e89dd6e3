"""One simulated run: the product's own ``Pipeline``, supervisor, controller, stages, engine processes and trainer
ranks, on virtual time, a simulated network and simulated processes, with the faults that its seed plants."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import msgspec

from campaigns.faults.fault_plan import Fault, Phase
from campaigns.faults.ledger import Violation
from campaigns.faults.patches import patched_product
from campaigns.faults.simulated_machine import Machine, SimulatedPopen
from campaigns.faults.simulated_parts import WORLDS
from campaigns.faults.stamped_engine import stamped_tokens
from campaigns.faults.virtual_time import NothingCanHappen, virtual_clock
from campaigns.faults.world_faults import Faults
from campaigns.faults.world_operator import Operator
from campaigns.faults.world_shape import Shape
from campaigns.faults.world_state import WorldState

RECOVERY_S = 5.0
LOOK_EVERY_S = 10.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a world ended. ``kind``: finished, failed, stuck or vacuous; ``fired``: cells, with repetition; ``lives``:
    how often the run was started, the first time included."""

    seed: int
    kind: str
    message: str
    violations: tuple[Violation, ...]
    fired: tuple[str, ...]
    lives: int
    virtual_s: float
    trace: str
    history: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.violations and self.kind != "vacuous"


class World(WorldState):
    """``run`` once. ``keep_history``: what happened, line by line."""

    machine: Machine
    faults: Faults
    operator: Operator

    def __init__(self, shape: Shape, plan: list[Fault], *, keep_history: bool = False) -> None:
        super().__init__(shape, keep_history=keep_history)
        self.machine = Machine(self, self._exited)
        self.faults = Faults(self, self.machine, plan)
        self.operator = Operator(self, self.machine, self.faults)

    def _exited(self, popen: SimulatedPopen) -> None:
        assert popen.process is not None
        for phase, count in popen.process.phases.items():
            self.faults.end(Phase(phase), count)
        popen.process.phases.clear()
        if popen.process.incarnation or popen.code:
            self.faults.begin(Phase.RECOVERY)
            seconds = RECOVERY_S * max(self.shape.pace, 1.0)
            self.loop.call_later(seconds, self.faults.end, Phase.RECOVERY, context=self.context)

    # ---- life --------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until the run has ended or nothing more becomes of it."""
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.directory = Path(tempfile.mkdtemp(prefix="fault-world-", dir=memory))
        gc_was_on = gc.isenabled()
        gc.disable()
        try:
            with self._everything_patched():
                asyncio.set_event_loop(self.loop)
                try:
                    self.loop.run_until_complete(self._live())
                except NothingCanHappen as nothing:
                    self.operator.result = ("stuck", str(nothing))
                finally:
                    self.over = True
                    self.operator.let_go()
                    self.loop.burn()
                    asyncio.set_event_loop(None)
                    self.loop.close()
        finally:
            WORLDS.remove(self)
            shutil.rmtree(self.directory, ignore_errors=True)
            if gc_was_on:
                gc.enable()
        return self._outcome()

    @contextmanager
    def _everything_patched(self) -> Iterator[None]:
        WORLDS.append(self)
        with ExitStack() as stack:
            self.clock = stack.enter_context(virtual_clock(self.loop, self.random))
            self.loop.computes, self.loop.together = self.computes, self.together
            self.loop.compute_s = lambda: self.random.expovariate(1 / self.shape.compute_s)
            stack.enter_context(mock.patch.dict(os.environ))
            stack.enter_context(patched_product(self, self.machine))
            stack.enter_context(stamped_tokens())
            yield

    async def _live(self) -> None:
        self._ended = self.loop.create_future()
        self.operator.start()
        look = self.loop.call_later(LOOK_EVERY_S, self._look)
        await self._ended
        look.cancel()

    def _look(self) -> None:
        """A violation ends the world: what follows from it is noise. So does a run that does nothing any more."""
        since, version = self._progress
        if version != self.ledger.max_version:
            self.progressed()
        elif self.loop.now - max(since, self.faults.last_s) > self.shape.patience_s:
            self.operator.result = ("stuck", f"no step and no fault for {self.shape.patience_s:g} virtual seconds")
            self.end()
        if self.ledger.violations:
            self.end()
        if not self._ended.done():
            self.loop.call_later(LOOK_EVERY_S, self._look)

    def _outcome(self) -> Outcome:
        self.operator.judge_end()
        kind, message = self.operator.result or ("failed", "")
        if not self.faults.fired and self.faults.plan and not self.ledger.violations:
            kind = "vacuous"
        return Outcome(
            seed=self.shape.seed,
            kind=kind,
            message=message,
            violations=tuple(self.ledger.violations),
            fired=tuple(self.faults.fired),
            lives=self.operator.lives,
            virtual_s=self.loop.now,
            trace=self._trace.hexdigest(),
            history=tuple(self.history),
        )
