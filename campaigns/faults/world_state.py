"""State that the parts of a simulated world share: clock, network, ledger, recipe, and the parts themselves as far as
the others call them. ``world.World`` is the only subclass; the parts import this file and never that one."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Protocol

import msgspec

from campaigns.faults.fault_plan import Phase
from campaigns.faults.ledger import MODULUS, Ledger
from campaigns.faults.simulated_network import Network
from campaigns.faults.virtual_time import PROCESS, Clock, VirtualLoop
from campaigns.faults.world_shape import Shape
from streamrl.base.messages import CloseBatch, SaveCheckpoint
from streamrl.control import events as on
from streamrl.control.machine import Control
from streamrl.recipe.topology import ProcessPlan, Role, Topology

COLLECTIVE: dict[type, Phase] = {CloseBatch: Phase.TRAIN, SaveCheckpoint: Phase.CHECKPOINT}
"""What ranks do together, and the phase that it is."""


class PublishedPart(msgspec.Struct, frozen=True):
    """One rank's part of a version, as bytes would be: what it makes of ``base`` (None: of anything)."""

    base: int | None
    content: int
    life: object


class FaultsOfAWorld(Protocol):
    """Faults as the other parts of a world see them: ``world_faults.Faults``."""

    suspects: set[str]
    slow_flush_s: float

    def begin(self, phase: Phase) -> None: ...

    def end(self, phase: Phase) -> None: ...

    def over(self, phase: Phase) -> None: ...

    def begin_once(self, phase: Phase) -> None: ...

    def take(self, component: str, *kinds: str) -> str: ...


class KillingMachine(Protocol):
    """The machine as the disk sees it: ``simulated_machine.Machine``."""

    def kill(self, name: str) -> bool: ...


class OperatorOfARun(Protocol):
    """The operator as faults see it: ``world_operator.Operator``."""

    asked_to_stop: bool

    def ask_to_stop(self) -> bool: ...

    def kill_everything(self) -> bool: ...


class WorldState:
    """What is the same for all parts of a world; ``World`` makes the parts."""

    faults: FaultsOfAWorld
    machine: KillingMachine
    operator: OperatorOfARun
    clock: Clock
    _ended: asyncio.Future[None]

    def __init__(self, shape: Shape, *, keep_history: bool) -> None:
        self.shape = shape
        self.random = Random(shape.seed)
        self.loop = VirtualLoop()
        self.context = copy_context()
        self.network = Network(self.loop, Random(shape.seed + 1), shape.latency_s)
        self.ledger = Ledger(self.loop.time, shape.recipe.rollout.max_staleness)
        self.network.accepted = self.ledger.accepted
        self.recipe = shape.recipe
        self.topology: Topology | None = None
        self.published: dict[str, PublishedPart] = {}
        self.reward_calls = 0
        self.over = False
        self.history: list[str] = []
        self.directory = Path()
        self.sockets = "/simulated"
        self._rank_hashes: dict[int, dict[int, int]] = defaultdict(dict)
        self._collectives: dict[tuple[int, int], list[tuple[Callable[[], None], Context]]] = defaultdict(list)
        self._progress = (0.0, -1)
        self._trace = hashlib.blake2b(digest_size=8)
        self._keep = keep_history

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

    def end(self) -> None:
        """The world is over."""
        if not self._ended.done():
            self._ended.set_result(None)

    def progressed(self) -> None:
        """The wait for progress starts again from now."""
        self._progress = (self.loop.now, self.ledger.max_version)


def order_type(function: Any) -> type:
    """Of the order that a rank's thread carries out."""
    return type(function.args[-1] if isinstance(function, partial) else None)
