"""One simulated run: the product's own ``Pipeline``, supervisor, controller, stages, engine hosts and trainer ranks, on
virtual time, a simulated network and simulated processes, with the faults that its seed plants."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import msgspec

from campaigns.faults.fault_plan import Fault, Phase
from campaigns.faults.ledger import MODULUS, Ledger, Violation
from campaigns.faults.patches import patched_product
from campaigns.faults.simulated_machine import Machine, SimulatedPopen
from campaigns.faults.simulated_network import Network
from campaigns.faults.simulated_parts import WORLDS
from campaigns.faults.simulated_trainer import PublishedPart
from campaigns.faults.stamped_engine import stamped_tokens
from campaigns.faults.virtual_time import PROCESS, Clock, NothingCanHappen, VirtualLoop, virtual_clock
from campaigns.faults.world_faults import Faults
from campaigns.faults.world_operator import Operator
from campaigns.faults.world_shape import Shape
from streamrl.base.messages import CloseBatch, SaveCheckpoint
from streamrl.control import events as on
from streamrl.control.machine import Control
from streamrl.recipe.topology import ProcessPlan, Role, Topology

RECOVERY_S = 5.0
LOOK_EVERY_S = 10.0


COLLECTIVE: dict[type, Phase] = {CloseBatch: Phase.TRAIN, SaveCheckpoint: Phase.CHECKPOINT}
"""What ranks do together, and the phase that it is."""


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


class World:
    """``run`` once. ``keep_history``: what happened, line by line."""

    def __init__(self, shape: Shape, plan: list[Fault], *, keep_history: bool = False) -> None:
        self.shape = shape
        self.random = Random(shape.seed)
        self.loop = VirtualLoop()
        self.context = copy_context()
        self.network = Network(self.loop, Random(shape.seed + 1), shape.latency_s)
        self.machine = Machine(self, self._exited)
        self.ledger = Ledger(self.loop.time, shape.recipe.rollout.max_staleness)
        self.network.accepted = self.ledger.accepted
        self.recipe = shape.recipe
        self.faults = Faults(self, plan)
        self.operator = Operator(self)
        self.topology: Topology | None = None
        self.published: dict[str, PublishedPart] = {}
        self.reward_calls = 0
        self.over = False
        self.history: list[str] = []
        self.directory = Path()
        self.sockets = "/simulated"
        self.clock: Clock
        self._rank_hashes: dict[int, dict[int, int]] = defaultdict(dict)
        self._collectives: dict[tuple[int, int], list[tuple[Callable[[], None], Context]]] = defaultdict(list)
        self._progress = (0.0, -1)
        self._trace = hashlib.blake2b(digest_size=8)
        self._keep = keep_history
        self._ended: asyncio.Future[None]

    # ---- what the parts ask ------------------------------------------------------------------------

    def note(self, what: str, *details: object) -> None:
        """One line of the trace."""
        told = " ".join(map(str, details)).replace(str(self.directory), "")  # which has another name each time
        line = f"{self.loop.now:.6f} {what} {told}"
        self._trace.update(line.encode())
        if self._keep:
            self.history.append(line)

    def enter(self, phase: Phase) -> None:
        """Something of ``phase`` begins in the process that says so."""
        process = PROCESS.get()
        if process is not None:
            process.phases[phase] += 1
        self.faults.begin(phase)

    def leave(self, phase: Phase) -> None:
        """It is over."""
        process = PROCESS.get()
        if process is not None:
            process.phases[phase] -= 1
        self.faults.end(phase)

    def computes(self, function: Any, begins: bool) -> None:
        """What the thread of a trainer begins or has done."""
        phase = COLLECTIVE.get(order_type(function))
        if phase is not None:
            (self.enter if begins else self.leave)(phase)

    def together(self, function: Any, run: Callable[[], None]) -> None:
        """A collective of the ranks ends when all have come to it; where one never does, the others stand in it."""
        process = PROCESS.get()
        if process is None or order_type(function) not in COLLECTIVE:
            run()
            return
        number = process.collectives = process.collectives + 1
        there = self._collectives[process.incarnation, number]
        there.append((run, process.context))
        if len(there) == self.shape.ranks:
            for ends, context in self._collectives.pop((process.incarnation, number)):
                self.loop.call_soon(ends, context=context)

    def start_seconds(self, plan: ProcessPlan) -> float:
        """How long a process takes until its first line runs."""
        mean = {Role.ENGINE: self.shape.engine_start_s, Role.TRAINER: 3.0}.get(plan.role, 0.5)
        return self.random.uniform(0.5, 1.5) * mean

    def rank_made(self, rank: int, version: int, state_hash: int) -> None:
        """A rank holds ``version``; the version is there when all do."""
        self._rank_hashes[version][rank] = state_hash
        known = self._rank_hashes[version]
        if len(known) == self.shape.ranks:
            self.ledger.published(version, sum(known.values()) % MODULUS)

    def handled(self, control: Control, event: Any, actions: Any) -> None:
        """Control has handled ``event``."""
        self.note("event", type(event).__name__, *(getattr(event, name, "") for name in ("id", "policy_version")))
        self.ledger.handled(control, event, actions)
        if isinstance(event, on.RunBegan):
            self.faults.over(Phase.START)
        elif isinstance(event, on.StopRequested) and self.operator.asked_to_stop:  # else it is replayed
            self.faults.begin_once(Phase.DRAIN)

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
            stack.enter_context(patched_product(self))
            stack.enter_context(stamped_tokens())
            yield

    async def _live(self) -> None:
        self._ended = self.loop.create_future()
        self.operator.start()
        look = self.loop.call_later(LOOK_EVERY_S, self._look)
        await self._ended
        look.cancel()

    def end(self) -> None:
        """The world is over."""
        if not self._ended.done():
            self._ended.set_result(None)

    def progressed(self) -> None:
        """The wait for progress starts again from now."""
        self._progress = (self.loop.now, self.ledger.max_version)

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


def order_type(function: Any) -> type:
    """Of the order that a rank's thread carries out."""
    return type(function.args[-1] if isinstance(function, partial) else None)
