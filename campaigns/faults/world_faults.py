"""What makes the faults of a plan happen: when their phase is on, to what they name, in the world that runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random

from campaigns.faults.fault_plan import Fault, Phase
from campaigns.faults.simulated_machine import Machine
from campaigns.faults.simulated_network import Link, Wire
from campaigns.faults.virtual_time import SimulatedProcess
from campaigns.faults.world_state import WorldState
from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE
from streamrl.comm.stream_protocol import Kind
from streamrl.comm.wire import parse_header

CHECKED_BYTES = 6
"""Of the header: who made it, and which version of it."""
HELD_BACK_S = 1.0
"""A message that is to come after the next one waits no longer for it: connections lose nothing."""
NO_MESSAGE_S = 0.5
"""A connection that is silent for so long is not the one whose next message is twisted: any other of that process."""
CLOCK_JUMPS_S = (-3600.0, 3600.0, -1.0, 86400.0)
SLOW_FLUSH_S = 3.0
FIRST_TRY_AGAIN_S = 0.01
TRIES = 10
"""To hit what is not there yet while the phase is on, each time after twice as long; then the next time it begins."""

PROCESSES = ("controller", "engine", "trainer", "reward")
Twist = Callable[[list[bytes]], list[list[bytes]]]


class Faults:
    """The faults of one world. ``fired``: cells, in order; ``suspects``: the processes that they hit."""

    def __init__(self, world: WorldState, machine: Machine, plan: list[Fault]) -> None:
        self.plan = plan
        self.fired: list[str] = []
        self.suspects: set[str] = set()
        self.last_s = 0.0
        self.slow_flush_s = 0.0
        self._world = world
        self._machine = machine
        self._active: Counter[Phase] = Counter()
        self._begun: Counter[Phase] = Counter()
        self._at: dict[tuple[Phase, int], list[Fault]] = defaultdict(list)
        self._next: dict[Phase, list[Fault]] = defaultdict(list)
        self._asked: dict[str, list[Fault]] = defaultdict(list)
        for fault in plan:
            self._at[fault.phase, fault.nth].append(fault)

    # ---- phases ------------------------------------------------------------------------------------

    def begin(self, phase: Phase) -> None:
        """Something of ``phase`` begins: faults that waited for it may."""
        self._active[phase] += 1
        self._begun[phase] += 1
        due = self._at.pop((phase, self._begun[phase]), [])
        for fault in due:
            self._later(fault.delay_s, self._due, fault, 0)
        for fault in self._next.pop(phase, []):
            self._due(fault, 0)

    def end(self, phase: Phase, count: int = 1) -> None:
        """``count`` of it are over."""
        self._active[phase] -= count

    def over(self, phase: Phase) -> None:
        """All of it is."""
        self._active[phase] = 0

    def begin_once(self, phase: Phase) -> None:
        """It is on, if it was not."""
        if not self._active[phase]:
            self.begin(phase)

    # ---- what parts of the world ask -----------------------------------------------------------------

    def take(self, component: str, *kinds: str) -> str:
        """Which of ``kinds`` a part is to do wrong now, if any. That is when it counts."""
        pending = self._asked.get(component, ())
        for fault in pending:
            if fault.kind in kinds:
                self._asked[component].remove(fault)
                self._did(fault, component)
                return fault.kind
        return ""

    # ---- firing --------------------------------------------------------------------------------------

    def _due(self, fault: Fault, tries: int) -> None:
        if self._world.over:
            return
        if not self._active[fault.phase]:
            self._next[fault.phase].append(fault)
        elif not self._do(fault):
            if tries < TRIES:
                self._later(FIRST_TRY_AGAIN_S * 2**tries, self._due, fault, tries + 1)
            else:
                self._next[fault.phase].append(fault)

    def _later(self, seconds: float, function: Callable[..., None], *arguments: object) -> None:
        self._world.loop.call_later(seconds, function, *arguments, context=self._world.context)

    def _target(self, fault: Fault) -> str:
        shape = self._world.shape
        count = {"engine": shape.engines, "trainer": shape.ranks, "reward": shape.workers}
        if fault.component not in count:
            return fault.component
        return f"{fault.component}-{fault.seed % count[fault.component]}"

    def _did(self, fault: Fault, name: str) -> None:
        self.fired.append(fault.cell)
        self.suspects.add(name)
        self.last_s = self._world.loop.now
        self._world.ledger.faulted(fault.seconds)
        self._world.note("fault", fault.cell, name, f"{fault.seconds:.3f}")

    def _do(self, fault: Fault) -> bool:
        """Whether it is done, or will be as soon as it can be noticed."""
        name = self._target(fault)
        process = self._machine.living(name)
        if process is None and fault.component in PROCESSES:
            return False
        match fault.kind:
            case "partition" | "disconnect":
                done = self._cut(fault, name)
            case "duplicate" | "reorder" | "corrupt":
                return self._twist(fault, name)
            case "crash" | "stop" | "restart":
                done = self._end_something(fault, name)
            case "hang" | "slow" | "clock_jump" | "latency" | "slow_flush":
                done = self._take_time(fault, process)
            case _:
                self._asked[name if fault.component == "engine" else fault.component].append(fault)
                return True
        if done:
            self._did(fault, name)
        return done

    def _end_something(self, fault: Fault, name: str) -> bool:
        world = self._world
        if fault.kind == "stop":
            return world.operator.ask_to_stop()
        if fault.kind == "restart":  # a worker finds that it is stuck, and asks to be replaced
            self._machine._left(self._machine.lives[name], REWARD_RESTART_EXIT_CODE)
            return True
        return world.operator.kill_everything() if name == "tree" else self._machine.kill(name)

    def _take_time(self, fault: Fault, process: SimulatedProcess | None) -> bool:
        world = self._world
        match fault.kind:
            case "clock_jump":
                world.clock.jump_s += CLOCK_JUMPS_S[fault.seed % len(CLOCK_JUMPS_S)]
            case "latency":
                world.network.slow += 1
                self._later(fault.seconds * 4, self._quick_network)
            case "slow_flush":
                self.slow_flush_s += SLOW_FLUSH_S
                self._later(fault.seconds * 2, self._quick_disk)
            case "hang":
                assert process is not None
                world.loop.hang(process, fault.seconds)
            case _:
                assert process is not None
                self._slow(process, fault.seconds, Random(fault.seed))
        return True

    def _slow(self, process: SimulatedProcess, seconds: float, random: Random) -> None:
        """It has a tenth of its time for a while."""
        at, until = 0.0, seconds * 4
        while at < until:
            pause = random.uniform(0.05, 0.5)
            self._later(at, self._world.loop.hang, process, pause)
            at += pause * 1.1

    def _quick_disk(self) -> None:
        self.slow_flush_s -= SLOW_FLUSH_S

    def _quick_network(self) -> None:
        self._world.network.slow -= 1

    # ---- connections ---------------------------------------------------------------------------------

    def _links(self, name: str) -> list[Link]:
        prefix = f"{self._world.sockets}/{name}."
        links = self._world.network.links
        return [link for link in links if link.binder.endpoint.removeprefix("ipc://").startswith(prefix)]

    def _cut(self, fault: Fault, name: str) -> bool:
        links = self._links(name)
        network = self._world.network
        for link in links if fault.kind == "partition" else links[fault.seed % max(len(links), 1) :][:1]:
            if fault.kind == "disconnect":
                network.disconnect(link)
            for wire in link.wires.values():
                wire.blocked_until = self._world.loop.now + fault.seconds
        return bool(links)

    def _twist(self, fault: Fault, name: str) -> bool:
        """The next message of one direction of one connection; it counts when that message comes. Where none does, the
        next message of any connection of that process."""
        links = self._links(name)
        free = [(link, wire) for link in links for wire in link.wires.values() if wire.twist is None]
        if not free:
            return False
        twisted = _Twisted(self, fault, name)
        twisted.put_on([Random(fault.seed).choice(free)])
        self._later(NO_MESSAGE_S, self._widen, twisted)
        return True

    def _widen(self, twisted: _Twisted) -> None:
        if twisted.done or self._world.over:
            return
        links = self._links(twisted.name)
        twisted.put_on([(link, wire) for link in links for wire in link.wires.values() if wire.twist is None])
        self._later(10 * NO_MESSAGE_S, self._widen, twisted)


class _Twisted:
    """One message that is to come twice, too late, or wrong."""

    def __init__(self, faults: Faults, fault: Fault, name: str) -> None:
        self.name = name
        self.done = False
        self._faults = faults
        self._fault = fault
        self._on: list[Wire] = []

    def put_on(self, places: list[tuple[Link, Wire]]) -> None:
        """Whatever comes first in one of ``places``."""
        for link, wire in places:
            wire.twist = self._twist_for(link, wire)
            self._on.append(wire)

    def _take_off(self, but: Wire | None = None) -> None:
        for wire in self._on:
            if wire is not but:
                wire.twist = None
        self._on = [but] if but is not None else []

    def _twist_for(self, link: Link, wire: Wire) -> Twist:
        held: list[list[bytes]] = []

        def let_go() -> None:
            if held and link.open:  # nothing came that it could be behind of
                world = self._faults._world
                self._take_off()
                world.network.send(next(end for end in link.wires if link.wires[end] is wire), link, held.pop())

        def twist(message: list[bytes]) -> list[list[bytes]]:
            if self._fault.kind == "reorder" and parse_header(message[0]).kind <= Kind.READY:
                return [message]  # what is not numbered yet is in order: that is what ZeroMQ promises
            if self._fault.kind == "reorder" and not held:
                self.done = True
                self._take_off(but=wire)
                held.append(message)
                self._faults._later(HELD_BACK_S, let_go)
                return []
            self.done = True
            self._take_off()
            self._faults._did(self._fault, self.name)
            match self._fault.kind:
                case "reorder":
                    return [message, held.pop()]
                case "corrupt":
                    random = Random(self._fault.seed)
                    if random.random() < 0.5 and parse_header(message[0]).kind > Kind.READY:
                        return [corrupted(message, random)]
                    self._faults._world.network.disconnect(link)
                    return []
                case _:
                    return [message, message]

        return twist


def corrupted(message: list[bytes], random: Random) -> list[bytes]:
    """One bit of what says that this is a message of the product is another. Nothing else of a message is ever changed:
    within a machine no bits are, and between machines CURVE refuses the message, which ends the connection."""
    header = bytearray(message[0])
    bit = random.randrange(8 * CHECKED_BYTES)
    header[bit // 8] ^= 1 << bit % 8
    return [bytes(header), *message[1:]]
