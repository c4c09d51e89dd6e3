"""The parent of everything: starts the processes of a run, starts again those whose deaths are forgiven (engines and
reward workers alone, the controller to go on, a rank with all ranks and the controller), names the first cause when
another one dies, ends all of them. Nothing here imports torch or vllm. Children are polled, which works in any thread.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
import msgspec

from streamrl.base.errors import ProcessDied, StreamRLError
from streamrl.plan.topology import RENDEZVOUS_FILE, TOPOLOGY_FILE, ProcessPlan, Role, Topology, local_engine
from streamrl.plan.used_memory import UsedMemory
from streamrl.processes.engine_orders import EngineOrders
from streamrl.rewards.exit_codes import REWARD_RESTART_EXIT_CODE
from streamrl.supervise.child_process import (
    FORKLESS_S,
    POLL_S,
    ChildProcess,
    ended_within,
    start_child,
)
from streamrl.supervise.exit_reason import Death, first_cause, notice_of
from streamrl.supervise.forgiveness import CORE, Forgiveness
from streamrl.supervise.guarded_sessions import GuardedSessions
from streamrl.supervise.supervisor_orders import SupervisorOrder
from streamrl.supervise.sweep import end_session, sweep, traces_of_new_run

log = logging.getLogger(__name__)

_SETTLE_S = 0.3  # after a death: time for others that died in the same moment to be seen
_CONSEQUENCE_S = 2.0  # after a death that must have a cause elsewhere: time for the cause to show


class Supervisor:
    """Starts, watches and ends the local processes of ``topology``.

    ``socket_directory`` is removed at the end. ``entry``: what ``python`` runs, before the role's arguments.
    ``restarts``: how often reward workers may ask (exit code 75) to be replaced, together; for other roles the topology
    says how often they may die. ``others_end_s``: how far apart the ends of the controller and of the others may be
    when a run ends well. What is in ``before_controller_start`` is awaited before a controller is started again: its
    streams to this process are broken then, and must be bound anew. ``resumes``: the run goes on where it ended.
    """

    def __init__(
        self,
        topology: Topology,
        run_directory: Path,
        socket_directory: Path,
        python: str = sys.executable,
        *,
        entry: Sequence[str] = ("-P", "-m", "streamrl.processes"),
        restarts: int = 20,
        others_end_s: float = 30.0,
        resumes: bool = False,
    ) -> None:
        self.topology = topology
        self.run_directory = run_directory
        self.socket_directory = socket_directory
        self._command = (python, *entry)
        self._restarts_left = restarts
        self._others_end_s = others_end_s
        self._resumes = resumes
        self._children: dict[str, ChildProcess] = {}
        self._resting: set[str] = set()
        self._forgiveness = Forgiveness(topology)
        self.before_controller_start: list[Callable[[], Awaitable[None]]] = []
        self._draining = self._finishing = self._ending = False
        self._one_end = anyio.Lock()
        self._traces = traces_of_new_run(socket_directory)
        self.memory = UsedMemory(self._traces)
        self._guarded = GuardedSessions(python, run_directory, self._traces)
        self._orders = EngineOrders(self, topology, self._resting)

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every local process. ``run_directory`` holds ``recipe.toml`` already; ``topology.json`` is written."""
        for folder in ("logs", "exit"):
            (self.run_directory / folder).mkdir(parents=True, exist_ok=True)
        self.socket_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.run_directory / TOPOLOGY_FILE).write_bytes(msgspec.json.encode(self.topology))
        self._guarded.open()
        for plan in self.topology.processes:
            if plan.local and plan.resting:
                self._resting.add(plan.name)
            elif plan.local:
                self._start_child(plan, resumes=self._resumes)

    async def watch(self) -> None:
        """Return when the controller has ended well and the others after it, or when ``kill`` was called meanwhile.
        Raises ``ProcessDied``, which names the first cause."""
        until_s = math.inf  # how long the others may take after the controller
        while not self._ending:
            self._guarded.tend()
            began_s = time.monotonic()
            await self._restart_reward_workers()
            await self._start_dead_again()
            await self._start_core_again()
            if until_s == math.inf:
                deaths = self._deaths(before_s=began_s)  # later ones were not asked yet whether they are forgiven
                if deaths and not (self._finishing or self._ending):
                    raise await self._died()
                if deaths or self._finished():
                    until_s = time.monotonic() + self._others_end_s
            elif self._nobody_is_left() or time.monotonic() > until_s:
                for death in self._deaths():
                    log.warning("after the run had finished, %s", death.describe())
                return
            if self.memory.due:
                self.memory.record({child.process.pid: name for name, child in self._children.items()})
            await anyio.sleep(POLL_S)

    async def stop(self, deadline_s: float = 60.0) -> None:
        """Drain, then end everything; ``deadline_s`` later kill."""
        self.request_drain()
        try:
            with anyio.move_on_after(deadline_s):
                await self.watch()
        finally:
            await self.kill()

    def run_finished(self) -> None:
        """The controller has said that all is done: a death from now on is only logged."""
        self._finishing = True

    def request_drain(self) -> None:
        """SIGTERM to the controller: it finishes what it is doing, ends the streams, and ends itself."""
        self._draining = True
        controller = self._children.get(Role.CONTROLLER.value)
        if controller is not None and controller.running:
            controller.process.send_signal(signal.SIGTERM)

    async def obey(self, order: SupervisorOrder) -> None:
        """Carry out what the controller wants of an engine's process (``EngineOrders``)."""
        await self._orders.obey(order)

    def engine_host(self, name: str) -> ChildProcess | None:
        """The process of a local engine; None where it was never started. Raises ``StreamRLError`` for no such one."""
        local_engine(self.topology, name)
        return self._children.get(name)

    async def stop_engine(self, name: str, grace_s: float = 10.0, *, patience_s: float = 0.0) -> None:
        """End one engine host and what it started while the run goes on; its end is no death. See ``start_engine``.

        The controller has ended its orders: it has ``patience_s`` to end by itself, while that one lives, then
        ``grace_s`` from SIGTERM to SIGKILL. One that had died before is left to ``watch``. Raises ``StreamRLError``
        for no local engine.
        """
        if self._ending or (child := self.engine_host(name)) is None:
            return
        if name not in self._resting and not child.running and child.exit_code != 0 and not self._forgiven(child):
            return
        self._resting.add(name)  # before anything ends: the watch must not take it for a death
        if name in self._forgiveness.each:
            self._forgiveness.each[name].forget()
        with anyio.CancelScope(shield=True):
            await ended_within(patience_s, child, unless=lambda: bool(self._dead_of_core()))
            if child.running:
                child.process.terminate()
            await ended_within(grace_s, child)
            await self._end_what_it_started(child)
        if child.running:  # the kernel does not let it go; the sweep at the end of the run looks for it again
            del self._children[name]

    def start_engine(self, name: str) -> None:
        """Start an engine host that rests, after ``stop_engine`` or because its set was chosen, with the weights of the
        model directory. Raises ``StreamRLError`` unless it was stopped."""
        if self._ending:
            return
        plan, child = local_engine(self.topology, name), self._children.get(name)
        if name not in self._resting or (child is not None and child.running):
            raise StreamRLError(f"{name} was not stopped; stop_engine comes before start_engine")
        self._start_child(plan)
        self._resting.discard(name)

    async def kill(self, grace_s: float = 1.0) -> None:
        """End everything now: SIGTERM, ``grace_s`` later SIGKILL; leave nothing behind. Idempotent, never cancelled."""
        self._ending = True
        with anyio.CancelScope(shield=True):
            async with self._one_end:
                await self._end_all(grace_s)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.kill(0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    # ---- inside ----------------------------------------------------------------------------------

    async def _end_all(self, grace_s: float) -> None:
        children = list(self._children.values())
        for child in children:
            if child.running:
                child.process.terminate()
        await ended_within(grace_s, *children)
        if survivors := await anyio.to_thread.run_sync(sweep, self._traces):
            log.error("processes %s of the run survived SIGKILL; look at them with ps", survivors)
        for child in children:
            child.close()
        self._guarded.close()
        self._children = {}

    def _start_child(self, plan: ProcessPlan, *, resumes: bool = False) -> None:
        child = start_child(plan, self._command, self.run_directory, self._traces, resumes=resumes)
        self._children[plan.name] = self._guarded.add(child)

    async def _restart_reward_workers(self) -> None:
        for child in filter(self._asks, list(self._children.values())):
            self._restarts_left -= 1
            log.warning(
                "%s asked to be replaced (%d restarts left); see %s", child.name, self._restarts_left, child.log
            )
            await self._start_in_place_of(child)

    def _asks(self, child: ChildProcess) -> bool:
        """Whether it is a reward worker that ended to be replaced."""
        asks = child.exit_code == REWARD_RESTART_EXIT_CODE and self._restarts_left > 0
        return asks and child.plan is not None and child.plan.role is Role.REWARD

    async def _start_in_place_of(self, child: ChildProcess) -> None:
        await self._end_what_it_started(child)
        await self._start_again([child])

    async def _start_again(self, dead: Sequence[ChildProcess], *, resumes: bool = False) -> None:
        """Successors, but of engines that were told to rest meanwhile. One that the system has no room for counts as
        one that died at once: it is tried again as often as that is forgiven."""
        for child in dead:
            if child.plan is None or self._ending or child.name in self._resting:
                continue
            try:
                self._start_child(child.plan, resumes=resumes)
            except OSError as error:
                log.error("%s cannot be started again now: %s", child.name, error)
                child.has_no_successor()
                await anyio.sleep(FORKLESS_S)

    async def _start_dead_again(self) -> None:
        """Processes whose death is forgiven so and so often, each after a pause that grows."""
        for name, restarts in self._forgiveness.each.items():
            child = self._children.get(name)
            if child is None or child.plan is None or not self._is_missed(child):
                continue
            restarts.served(child.lived_s)
            if restarts.due(time.monotonic()):
                death = child.death(self.run_directory).describe()
                log.warning("%s; it is started again (%d restarts left); see %s", death, restarts.left, child.log)
                await self._start_in_place_of(child)
            elif not restarts.forgive and self._forgiveness.may_retire(name, tuple(self._resting)):
                death_of_it = self._forgiveness.retired[name] = child.death(self.run_directory)
                log.error("%s; it is not started again, and the other engines go on", death_of_it.describe())
                await self._end_what_it_started(child)

    def _is_missed(self, child: ChildProcess) -> bool:
        """It ended while the run goes on. With 0, too: some do when they took a broken stream for the end."""
        away = child.name in self._resting or child.name in self._forgiveness.retired
        if child.running or away or self._asks(child) or self._finishing or self._finished():
            return False
        if child.death(self.run_directory).is_verdict:
            return False  # a successor would end the same way
        serves = child.plan is not None and child.plan.role in (Role.ENGINE, Role.REWARD)
        return bool(child.exit_code) or (serves and not self._draining and child.ended_for_s > _CONSEQUENCE_S)

    async def _start_core_again(self) -> None:
        """The controller; where a rank died, all ranks with it: none can go on alone. So does one that stands in a
        collective of which another one was never told before their controller died: it ends by itself."""
        restarts = self._forgiveness.core
        dead = self._dead_of_core()
        if not dead or self._draining or self._finishing or self._finished():
            return
        restarts.served(max(child.lived_s for child in dead))  # first: it may make a spent budget whole again
        if any(self._is_death(child) for child in dead):
            return
        first = first_cause([child.death(self.run_directory) for child in dead])
        unclear = first.is_consequence or any(child.is_ending for child in self._of_core())
        if unclear and time.monotonic() < first.detected_s + _CONSEQUENCE_S:
            return  # of what, or who died beside it, is about to be seen
        if not restarts.due(time.monotonic()):
            return
        ranks = any(child.name != Role.CONTROLLER and not child.running for child in self._of_core())
        what = "the trainer ranks and the controller are" if ranks else "it is"
        log.warning("%s; %s started again (%d restarts left)", first.describe(), what, restarts.left)
        again = list(self._of_core()) if ranks else dead
        for child in [child for child in again if child.running]:
            child.process.kill()
        for child in again:
            await self._end_what_it_started(child)
        if ranks:
            (self.socket_directory / RENDEZVOUS_FILE).unlink(missing_ok=True)
        for prepare in self.before_controller_start:
            await prepare()
        await self._orders.start_first_engines()
        await self._start_again(again, resumes=True)
        if self._draining and not self._ending:
            self.request_drain()  # its predecessor was gone when that was asked for

    def _dead_of_core(self) -> list[ChildProcess]:
        """Those that died. A rank that ended with 0 answered the end of its stream, and begins with the next one."""
        ended = [child for child in self._of_core() if not child.running]
        return [child for child in ended if child.exit_code != 0 or child.lacks_successor]

    def _of_core(self) -> list[ChildProcess]:
        """Controller and ranks that were started here, the ranks last."""
        return [child for child in self._children.values() if child.plan is not None and child.plan.role in CORE]

    async def _end_what_it_started(self, child: ChildProcess) -> None:
        """Kill what is left of its session, which it led, and forget it."""
        if survivors := await anyio.to_thread.run_sync(end_session, self._traces, child.process.pid):
            log.error("processes %s of %s survived SIGKILL; look at them with ps", survivors, child.name)
        else:
            self._guarded.forget(child)
        await anyio.to_thread.run_sync(child.close)  # one that the kernel holds keeps nobody else waiting
        self.memory.forget(child.name)

    def _finished(self) -> bool:
        # ``kill`` has ended it. Before it listens for SIGTERM it dies of it: when draining that is an end like another.
        ends = {0, -signal.SIGTERM} if self._draining else {0}
        controller = self._children.get(Role.CONTROLLER.value)
        return controller is None or controller.exit_code in ends

    def _nobody_is_left(self) -> bool:
        """Or nobody tells them to end: the controller died of SIGTERM before it listened for it."""
        running = any(child.running for child in self._children.values())
        return not running or self._children[Role.CONTROLLER.value].exit_code not in (None, 0)

    def _deaths(self, before_s: float = math.inf) -> list[Death]:
        """Ends that should not have been; of children, those that were noticed before then."""
        ended = [child for child in self._children.values() if child.ended_before(before_s)]
        dead = [child.death(self.run_directory) for child in ended if self._is_death(child)]
        dead += self._guarded.loss()
        for tracker, owner in self.memory.gone():
            child = self._children.get(owner)
            if child is None or not child.running or owner in self._resting:
                continue
            if self._forgiven(child):
                child.process.kill()  # what it shares with the processes that it started would be left behind
                continue
            name = f"the multiprocessing resource tracker of {owner} (pid {tracker.pid})"
            dead.append(Death(name=name, exit_code=None, detected_s=time.monotonic()))
        return dead

    def _is_death(self, child: ChildProcess) -> bool:
        if child.running or child.name in self._resting or self._asks(child):
            return False
        if child.exit_code and self._forgiven(child):
            return False
        if child.plan is not None and child.plan.role is Role.CONTROLLER:
            return not self._finished()
        # Ending with 0 is the right answer to the end of a stream: the controller ends streams shortly before itself.
        return child.exit_code != 0 or (child.ended_for_s > self._others_end_s and not self._finished())

    def _forgiven(self, child: ChildProcess) -> bool:
        """Whether it is started again when it dies, or need not be. Not the core of a run that is about to end, and not
        whoever ended the run on purpose."""
        if child.plan is None or not self._forgiveness.forgives(child.plan):
            return False
        ends = child.plan.role in CORE and (self._draining or self._finishing)
        return not ends and (child.running or not child.death(self.run_directory).is_verdict)

    async def _died(self) -> ProcessDied:
        """Wait until the first cause can be told from what followed from it."""
        began = time.monotonic()
        deaths = self._deaths()
        while not self._ending:
            await anyio.sleep(POLL_S)
            deaths = self._deaths() or deaths
            patience_s = _CONSEQUENCE_S if first_cause(deaths).is_consequence else _SETTLE_S
            if time.monotonic() >= began + patience_s:
                break
        deaths += self._forgiveness.retired.values()  # the last engine is not the first cause, but the first of them
        children = [*self._children.values(), *filter(None, [self._guarded.guardian])]
        logs = {child.name: (child.log, child.log_start) for child in children}
        return ProcessDied(notice_of(deaths, logs, self.run_directory / "logs"))
