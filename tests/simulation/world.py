"""One simulated run: the product's own ``Pipeline``, supervisor, controller, stages, engine hosts and trainer ranks, on
virtual time, a simulated network and simulated processes, with the faults that its seed plants."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import msgspec
import simulated_parts as parts
from fault_plan import Fault, Phase
from ledger import MODULUS, Ledger, Violation
from patches import patched_product
from simulated_machine import Machine, SimulatedPopen
from simulated_network import Link, Network
from virtual_time import PROCESS, Clock, NothingCanHappen, SimulatedProcess, VirtualLoop, virtual_clock
from world_shape import Shape

from streamrl.config.topology import JOURNAL_DIRECTORY, ProcessPlan, Role, Topology
from streamrl.control.state import ControlState
from streamrl.messages import CloseBatch, SaveCheckpoint
from streamrl.run import Pipeline

HELD_BACK_S = 1.0
"""A message that is to come after the next one waits no longer for it: connections lose nothing."""
CLOCK_JUMPS_S = (-3600.0, 3600.0, -1.0, 86400.0)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a world ended. ``kind``: finished, drained, failed, stuck or vacuous; ``fired``: cells, with repetition."""

    seed: int
    kind: str
    message: str
    violations: tuple[Violation, ...]
    fired: tuple[str, ...]
    virtual_s: float
    steps: int
    trained: int
    trace: str
    events: int
    history: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.violations and self.kind != "vacuous"


class World:
    """``run`` once. ``keep_history``: what happened, line by line, for people; ``stacks_at``: and where
    every task is at that time."""

    def __init__(
        self, shape: Shape, faults: list[Fault], *, keep_history: bool = False, stacks_at: float = 0.0
    ) -> None:
        self._stacks_at = stacks_at
        self.shape = shape
        self.faults = faults
        self.random = Random(shape.seed)
        self.loop = VirtualLoop()
        self.context = copy_context()
        self.network = Network(self.loop, Random(shape.seed + 1), shape.latency_s)
        self.machine = Machine(self, self._exited)
        self.ledger = Ledger(self.loop.time, shape.recipe.rollout.max_staleness)
        self.recipe = shape.recipe
        self.topology: Topology | None = None
        self.shelf: dict[str, parts.PublishedPart] = {}
        self.reward_calls = 0
        self.fired: list[str] = []
        self.mischief: dict[str, list[str]] = defaultdict(list)
        self.slow_flush_s = 0.0
        self.twisted: list[Fault] = []
        self._rank_hashes: dict[int, dict[int, int]] = defaultdict(dict)
        self._entered: Counter[Phase] = Counter()
        self._active: Counter[Phase] = Counter()
        self._waiting: dict[tuple[Phase, int], list[Fault]] = defaultdict(list)
        for fault in faults:
            self._waiting[fault.phase, fault.nth].append(fault)
        self._trace = hashlib.blake2b(digest_size=8)
        self._keep = keep_history
        self._result: tuple[str, str] | None = None
        self.over = False
        self._stopped = False
        self.suspects: set[str] = set()
        self.history: list[str] = []
        self.parent: Pipeline
        self._ended: asyncio.Future[None]
        self.clock: Clock
        self.error: BaseException | None = None

    # ---- what the parts ask ------------------------------------------------------------------------

    def note(self, what: str, *details: object) -> None:
        """One line of the trace."""
        line = f"{self.loop.now:.6f} {what} {' '.join(map(str, details))}"
        self._trace.update(line.encode())
        if self._keep:
            self.history.append(line)

    def enter(self, phase: Phase) -> None:
        """Something of ``phase`` begins: its faults may begin."""
        process = PROCESS.get()
        if process is not None:
            process.phases[phase] += 1
        self._begins(phase)

    def _begins(self, phase: Phase) -> None:
        self._active[phase] += 1
        if self._active[phase] == 1:
            self._entered[phase] += 1
            for fault in self._waiting.pop((phase, self._entered[phase]), []):
                self.loop.call_later(fault.delay_s, self._fire, fault, context=self.context)

    def leave(self, phase: Phase) -> None:
        process = PROCESS.get()
        if process is not None:
            process.phases[phase] -= 1
        self._active[phase] -= 1

    def computes(self, function: Any, begins: bool) -> None:
        """What the thread of a trainer begins or has done."""
        order = next(iter(function.__defaults__ or ()), None)
        phase = {CloseBatch: Phase.TRAIN, SaveCheckpoint: Phase.CHECKPOINT}.get(type(order))
        if phase is not None:
            (self.enter if begins else self.leave)(phase)

    def take_mischief(self, component: str) -> str:
        """What a part is to do wrong now, if anything."""
        pending = self.mischief[component]
        return pending.pop(0) if pending else ""

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

    def handled(self, state: ControlState, event: Any, actions: Any) -> None:
        self.note("event", type(event).__name__, *(getattr(event, name, "") for name in ("id", "policy_version")))
        self.ledger.handled(state, event, actions)
        kind = type(event).__name__
        if kind == "RunBegan":
            self._active[Phase.START] = 0
        if kind == "StopRequested":
            self._begins(Phase.DRAIN)

    def _exited(self, popen: SimulatedPopen) -> None:
        assert popen.process is not None
        for phase, count in popen.process.phases.items():
            self._active[Phase(phase)] -= count
        popen.process.phases.clear()
        if popen.process.incarnation or popen.code:
            self._begins(Phase.RECOVERY)
            self.loop.call_later(5.0, self.leave, Phase.RECOVERY, context=self.context)

    # ---- faults --------------------------------------------------------------------------------------

    def _target(self, fault: Fault) -> str:
        count = {"engine": self.shape.engines, "trainer": self.shape.ranks, "reward": self.shape.workers}
        if fault.component not in count:
            return fault.component
        return f"{fault.component}-{fault.seed % count[fault.component]}"

    def _fire(self, fault: Fault) -> None:
        if self.over:
            return
        name = self._target(fault)
        process = self.machine.living(name)
        if process is None and fault.component in ("controller", "engine", "trainer", "reward"):
            return
        if self._do(fault, name, process):
            self._did(fault, name)

    def _did(self, fault: Fault, name: str) -> None:
        self.fired.append(fault.cell)
        self.suspects.add(name)
        self.note("fault", fault.cell, name, f"{fault.seconds:.3f}")

    def _do(self, fault: Fault, name: str, process: SimulatedProcess | None) -> bool:
        match fault.kind:
            case "crash":
                return self._kill_tree() if name == "tree" else self.machine.kill(name)
            case "hang":
                assert process is not None
                self.loop.hang(process, fault.seconds)
            case "slow":
                assert process is not None
                self._slow(process, fault.seconds, Random(fault.seed))
            case "clock_jump":
                self.clock.jump_s += CLOCK_JUMPS_S[fault.seed % len(CLOCK_JUMPS_S)]
            case "stop":
                self._stopped = True
                if self.machine.living("parent") is None or not hasattr(self.parent, "_supervisor"):
                    return False
                self.parent.drain()
            case "latency":
                self._slow_network(fault)
            case "slow_flush":
                self._slow_disk(fault)
            case "disk_full" | "write_error" | "torn_write":
                self.mischief["disk"].append(fault.kind)
            case "restart":
                return self._end_reward_worker(name)
            case "partition" | "disconnect":
                return self._cut(fault, name)
            case "duplicate" | "reorder" | "corrupt":
                return self._twist(fault, name)
            case _:
                self.mischief["reward" if fault.component == "reward" else name].append(fault.kind)
        return True

    def _slow(self, process: SimulatedProcess, seconds: float, random: Random) -> None:
        """It has a tenth of its time for a while."""
        at, until = 0.0, seconds * 4
        while at < until:
            pause = random.uniform(0.05, 0.5)
            self.loop.call_later(at, self.loop.hang, process, pause, context=self.context)
            at += pause * 1.1

    def _slow_disk(self, fault: Fault) -> None:
        self.slow_flush_s += 1.0
        self.loop.call_later(fault.seconds * 2, self._quick_disk, context=self.context)

    def _quick_disk(self) -> None:
        self.slow_flush_s -= 1.0

    def _kill_tree(self) -> bool:
        """SIGKILL to everything at once; a while later somebody says ``streamrl resume``."""
        if self.over or self.machine.living("parent") is None:
            return False
        for popen in list(self.machine.lives.values()):
            popen.kill()
        resumes = (self.directory / "run" / JOURNAL_DIRECTORY).is_dir()  # otherwise there is nothing to go on from
        self.loop.call_later(self.random.uniform(0.5, 5.0), self._start_parent, resumes, context=self.context)
        return True

    def _slow_network(self, fault: Fault) -> None:
        self.network.slow += 1
        self.loop.call_later(fault.seconds * 4, self._quick_network, context=self.context)

    def _quick_network(self) -> None:
        self.network.slow -= 1

    def _end_reward_worker(self, name: str) -> bool:
        """It finds that it is stuck, and asks to be replaced."""
        popen = self.machine.lives[name]
        self.machine._left(popen, 75)
        return True

    def _links(self, name: str) -> list[Link]:
        prefix = f"{self.sockets}/{name}."
        return [link for link in self.network.links if link.binder.endpoint.removeprefix("ipc://").startswith(prefix)]

    def _cut(self, fault: Fault, name: str) -> bool:
        links = self._links(name)
        for link in links if fault.kind == "partition" else links[fault.seed % max(len(links), 1) :][:1]:
            if fault.kind == "disconnect":
                self.network.disconnect(link)
            for wire in link.wires.values():
                wire.blocked_until = self.loop.now + fault.seconds
        return bool(links)

    def _twist(self, fault: Fault, name: str) -> bool:
        """The next message of one direction of one connection; it counts when that message comes."""
        links = self._links(name)
        if not links:
            return False
        random = Random(fault.seed)
        link = random.choice(links)
        wire = link.wires[random.choice((link.binder, link.connector))]
        held: list[list[bytes]] = []

        def let_go() -> None:
            if wire.twist is twist and link.open:  # nothing came that it could be behind of
                wire.twist = None
                self.network.send(next(end for end in link.wires if link.wires[end] is wire), link, held[0])

        def twist(message: list[bytes]) -> list[list[bytes]]:
            if fault.kind == "reorder" and not held:
                held.append(message)
                self.loop.call_later(HELD_BACK_S, let_go, context=self.context)
                return []
            wire.twist = None
            self._did(fault, name)
            if fault.kind == "reorder":
                return [message, held[0]]
            if fault.kind == "corrupt":
                return [_corrupted(message, random)]
            return [message, message]

        wire.twist = twist
        return False

    # ---- life --------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until the run has ended or its time is over."""
        directory = Path(
            tempfile.mkdtemp(prefix="streamrl-sim-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        )
        self.directory = directory
        self.sockets = "/simulated"
        gc_was_on = gc.isenabled()
        gc.disable()
        try:
            with self._everything_patched():
                asyncio.set_event_loop(self.loop)
                try:
                    self.loop.run_until_complete(self._live())
                except NothingCanHappen as nothing:
                    self._result = ("stuck", str(nothing))
                finally:
                    self.over = True
                    self.loop.burn()
                    asyncio.set_event_loop(None)
                    self.loop.close()
        finally:
            parts.WORLDS.remove(self)
            shutil.rmtree(directory, ignore_errors=True)
            if gc_was_on:
                gc.enable()
        return self._outcome()

    @contextmanager
    def _everything_patched(self) -> Iterator[None]:
        parts.WORLDS.append(self)
        with ExitStack() as stack:
            self.clock = stack.enter_context(virtual_clock(self.loop, self.random))
            self.loop.computes = self.computes
            self.loop.compute_s = lambda: self.random.expovariate(1 / self.shape.compute_s)
            stack.enter_context(mock.patch.dict(os.environ))
            stack.enter_context(patched_product(self))
            stack.enter_context(parts.stamped_tokens())
            yield

    async def _live(self) -> None:
        self._begins(Phase.START)
        self._ended = over = self.loop.create_future()
        self._start_parent(False)
        if self._stacks_at:
            self.loop.call_at(self._stacks_at, self._write_stacks)
        limit = self.loop.call_later(self.shape.limit_s, self._end)
        look = self.loop.call_later(10.0, self._look, over)
        await over
        limit.cancel()
        look.cancel()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _write_stacks(self) -> None:
        for popen in self.machine.lives.values():
            if popen.code is not None or popen.process is None:
                continue
            for task in sorted(popen.process.tasks, key=hash):
                frames = [f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in waiting_frames(task)]
                self.history.append(f"  {popen.process}: {' > '.join(frames)}")

    def _start_parent(self, resumes: bool) -> None:
        async def main() -> int:
            self._result = await self._parent(resumes)
            self.loop.call_soon(self._end, context=self.context)
            return 0

        self.machine.spawn("parent", main)

    def _look(self, over: asyncio.Future[None]) -> None:
        """A violation ends the world: what follows from it is noise."""
        if self.ledger.violations and not over.done():
            over.set_result(None)
        elif not over.done():
            self.loop.call_later(10.0, self._look, over)

    async def _parent(self, resumes: bool) -> tuple[str, str]:
        """What ``streamrl train`` does, or ``streamrl resume``."""
        reason = ""
        try:
            pipeline = Pipeline.of_run(self.directory / "run") if resumes else Pipeline(self.recipe)
            async with pipeline as self.parent:
                async for event in self.parent.events():
                    self.note("told", type(event).__name__)
                    if type(event).__name__ == "RunFinished":
                        reason = event.reason  # type: ignore[union-attr]
        except Exception as error:  # noqa: BLE001 - how a run fails is what is looked at
            return "failed", f"{type(error).__name__}: {error}"
        return ("drained" if reason == "drained" else "finished"), reason

    def _outcome(self) -> Outcome:
        kind, message = self._result or ("stuck", f"not over after {self.shape.limit_s:g} virtual seconds")
        self._judge(kind, message)
        if not self.fired and self.faults and not self.ledger.violations:
            kind = "vacuous"
        return Outcome(
            seed=self.shape.seed,
            kind=kind,
            message=message,
            violations=tuple(self.ledger.violations),
            fired=tuple(self.fired),
            virtual_s=self.loop.now,
            steps=self.ledger.max_version,
            trained=len(self.ledger.control.trained),
            trace=self._trace.hexdigest(),
            events=self.ledger.events,
            history=tuple(self.history),
        )

    def _judge(self, kind: str, message: str) -> None:
        ledger = self.ledger
        if ledger.violations:
            return
        if kind == "stuck":
            ledger.violated("I13", f"the run is stuck: {message}")
        elif kind in ("finished", "drained"):
            exhausted = message not in ("finished", "drained")
            ledger.check_end(None if self._stopped or exhausted else self.recipe.run.steps)
        elif kind == "failed":
            self._judge_failure(message)

    def _judge_failure(self, message: str) -> None:
        """A run may fail of what was done to it where nothing is started again, and then it says so."""
        if not message.partition(":")[2].strip():
            self.ledger.violated("I20", f"the run failed and does not say why: {message!r}")
        ends = {fault.kind for fault in self.faults if f"{fault.cell}" in self.fired and fault.ends_runs}
        if not self.recipe.run.restarts or ends & {"disk_full", "write_error"}:
            if not any(suspect in message for suspect in (*self.suspects, "disk", "journal")):
                self.ledger.violated("I20", f"nothing was done to what the run blames: {message}")
            if not ends:
                self.ledger.violated("I13", f"no fault that ends a run fired, and it failed: {message}")
            return
        self.ledger.violated("I13", f"deaths are forgiven, and the run failed: {message}")


def waiting_frames(task: asyncio.Task[Any]) -> Iterator[Any]:
    """From the task's own coroutine to the innermost that waits."""
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None:
            yield frame
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)


def _corrupted(message: list[bytes], random: Random) -> list[bytes]:
    """One bit of one frame is another."""
    frame = random.randrange(len(message))
    if not message[frame]:
        return message
    content = bytearray(message[frame])
    bit = random.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    return [bytes(content) if place == frame else other for place, other in enumerate(message)]
