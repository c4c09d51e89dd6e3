"""The parent of everything: starts the processes of a run, names the first cause when one dies, ends all of them.

Nothing here imports torch or vllm. The supervisor polls its children rather than waiting for each: that works in any
thread and under any event loop, and costs a few system calls twenty times a second.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
import msgspec
import psutil

from streamrl.config.topology import TOPOLOGY_FILE, ProcessPlan, Role, Topology
from streamrl.errors import ProcessDied, StreamRLError
from streamrl.processes.child_process import ChildProcess, open_guardian, start_child
from streamrl.processes.exit_reason import Death, first_cause, last_lines
from streamrl.processes.guardian import Done, Session
from streamrl.processes.restarts import Restarts
from streamrl.processes.sweep import (
    RunTraces,
    end_session,
    is_resource_tracker,
    members,
    record_segments,
    session_of,
    sweep,
)
from streamrl.rewards.exit_codes import REWARD_RESTART_EXIT_CODE

log = logging.getLogger(__name__)

_POLL_S = 0.05
_SETTLE_S = 0.3  # after a death: time for others that died in the same moment to be seen
_CONSEQUENCE_S = 2.0  # after a death that must have a cause elsewhere: time for the cause to show
_SCAN_S = 2.0
GUARDIAN = "guardian"


class Supervisor:
    """Starts, watches and ends the local processes of ``topology``.

    ``socket_directory`` is removed at the end. ``entry``: what ``python`` runs, before the role's arguments.
    ``restarts``: how often reward workers may ask (exit code 75) to be replaced, together; for other roles the topology
    says how often they may die. ``others_end_s``: how far
    apart the ends of the controller and of the others may be when a run ends well.
    """

    def __init__(
        self,
        topology: Topology,
        run_directory: Path,
        socket_directory: Path,
        python: str = sys.executable,
        *,
        entry: Sequence[str] = ("-m", "streamrl.processes"),
        restarts: int = 20,
        others_end_s: float = 30.0,
    ) -> None:
        self.topology = topology
        self.run_directory = run_directory
        self.socket_directory = socket_directory
        self._command = (python, *entry)
        self._restarts_left = restarts
        self._others_end_s = others_end_s
        self._children: dict[str, ChildProcess] = {}
        self.resource_trackers: dict[psutil.Process, str] = {}
        self._resting: set[str] = set()
        self._restarts = {plan.name: Restarts(plan.restarts) for plan in topology.processes if plan.restarts}
        self._draining = False
        self._ending = False
        self._one_end = anyio.Lock()
        self._traces = RunTraces(marker=uuid.uuid4().hex, since=time.time(), socket_directory=str(socket_directory))

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every local process. ``run_directory`` holds ``recipe.toml`` already; ``topology.json`` is written."""
        for folder in ("logs", "exit"):
            (self.run_directory / folder).mkdir(parents=True, exist_ok=True)
        self.socket_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.run_directory / TOPOLOGY_FILE).write_bytes(msgspec.json.encode(self.topology))
        self._children[GUARDIAN] = open_guardian(self._command[0], self.run_directory, self._traces)
        for plan in self.topology.processes:
            if plan.local and plan.resting:
                self._resting.add(plan.name)
            elif plan.local:
                self._start_child(plan)

    async def watch(self) -> None:
        """Return when the controller has ended well and the others after it, or when ``kill`` was called meanwhile.

        Raises ``ProcessDied``, which names the first cause.
        """
        next_scan = time.monotonic()
        finished_s: float | None = None
        while not self._ending:
            self._restart_reward_workers()
            await self._start_dead_again()
            deaths = self._deaths()
            if finished_s is None and deaths:
                raise await self._died()
            if finished_s is None and self._finished():
                finished_s = time.monotonic()
            if finished_s is not None and (self._all_ended() or time.monotonic() > finished_s + self._others_end_s):
                for death in deaths:
                    log.warning("after the run had finished, %s", death.describe())
                return
            if time.monotonic() >= next_scan:
                self._record_what_is_used()
                next_scan = time.monotonic() + _SCAN_S
            await anyio.sleep(_POLL_S)

    async def stop(self, deadline_s: float = 60.0) -> None:
        """Drain, then end everything: SIGTERM to the controller, which ends the streams; ``deadline_s`` later kill."""
        self.request_drain()
        try:
            with anyio.move_on_after(deadline_s):
                await self.watch()
        finally:
            await self.kill()

    def request_drain(self) -> None:
        """SIGTERM to the controller: it finishes what it is doing, ends the streams, and ends itself."""
        self._draining = True
        controller = self._children.get(Role.CONTROLLER.value)
        if controller is not None and controller.running:
            controller.process.send_signal(signal.SIGTERM)

    async def stop_engine(self, name: str, grace_s: float = 10.0, *, patience_s: float = 0.0) -> None:
        """End one engine host and what it started while the run goes on; its end is no death. See ``start_engine``.

        The controller has drained it, left it out of pushes, and ended its orders: it has ``patience_s`` to end by
        itself, then ``grace_s`` from SIGTERM to SIGKILL. One that had died before is left to ``watch``. Raises
        ``StreamRLError`` unless ``name`` is a local engine.
        """
        if self._ending:
            return
        self._engine(name)
        child = self._children.get(name)
        if child is None:
            return  # it was never started
        if name not in self._resting and not child.running and child.exit_code != 0:
            return
        self._resting.add(name)  # before anything ends: the watch must not take it for a death
        with anyio.CancelScope(shield=True):
            await _ended_within(patience_s, child)
            if child.running:
                child.process.terminate()
            await _ended_within(grace_s, child)
            await self._end_what_it_started(child)

    def start_engine(self, name: str) -> None:
        """Start an engine host that rests: after ``stop_engine``, under the same name and endpoints, or because its set
        of engines was chosen.

        It holds the weights of the model directory: the controller brings it to the live version. Raises
        ``StreamRLError`` unless it was stopped.
        """
        if self._ending:
            return
        plan, child = self._engine(name), self._children.get(name)
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
        children = [child for name, child in self._children.items() if name != GUARDIAN]
        for child in children:
            if child.running:
                child.process.terminate()
        await _ended_within(grace_s, *children)
        survivors = await anyio.to_thread.run_sync(sweep, self._traces)
        if survivors:
            log.error("processes %s of the run survived SIGKILL; look at them with ps", survivors)
        for child in children:
            child.close()
        if guardian := self._children.get(GUARDIAN):
            guardian.tell(Done())
            guardian.close()
        self._children = {}

    def _engine(self, name: str) -> ProcessPlan:
        engines = {p.name: p for p in self.topology.processes if p.role is Role.ENGINE and p.local}
        if name not in engines:
            raise StreamRLError(f"{name} is no engine of this host; it has {', '.join(engines) or 'none'}")
        return engines[name]

    def _start_child(self, plan: ProcessPlan) -> None:
        child = start_child(plan, self._command, self.run_directory, self._traces)
        self._children[plan.name] = child
        self._traces.sessions[child.process.pid] = child.created
        self._children[GUARDIAN].tell(Session(sid=child.process.pid, created=child.created))

    def _restart_reward_workers(self) -> None:
        for child in list(self._children.values()):
            plan = child.plan
            if (
                plan is None
                or plan.role is not Role.REWARD
                or child.exit_code != REWARD_RESTART_EXIT_CODE
                or not self._restarts_left
            ):
                continue
            self._restarts_left -= 1
            log.warning("%s asked to be replaced (%d restarts left); see %s", plan.name, self._restarts_left, child.log)
            child.close()
            self._start_child(plan)

    async def _start_dead_again(self) -> None:
        """Processes whose death the topology forgives so and so often, each after a pause that grows."""
        for name, restarts in self._restarts.items():
            child = self._children.get(name)
            if child is None or child.plan is None or child.running or not child.exit_code or self._finished():
                continue
            if restarts.due(time.monotonic()):
                death = child.death(self.run_directory).describe()
                log.warning("%s; it is started again (%d restarts left); see %s", death, restarts.left, child.log)
                await self._end_what_it_started(child)
                if not self._ending:
                    self._start_child(child.plan)

    async def _end_what_it_started(self, child: ChildProcess) -> None:
        """Kill what is left of its session, which it led, and forget it."""
        survivors = await anyio.to_thread.run_sync(end_session, self._traces, child.process.pid)
        if survivors:
            log.error("processes %s of %s survived SIGKILL; look at them with ps", survivors, child.name)
        child.close()
        self.resource_trackers = {t: owner for t, owner in self.resource_trackers.items() if owner != child.name}

    def _finished(self) -> bool:
        controller = self._children[Role.CONTROLLER.value]
        # Before the controller listens for SIGTERM it dies of it: when draining that is an end like another.
        return controller.exit_code == 0 or (self._draining and controller.exit_code == -signal.SIGTERM)

    def _all_ended(self) -> bool:
        return not any(child.running for name, child in self._children.items() if name != GUARDIAN)

    def _deaths(self) -> list[Death]:
        """Ends that should not have been."""
        dead = [child.death(self.run_directory) for child in self._children.values() if self._is_death(child)]
        gone = [(tracker, owner) for tracker, owner in self.resource_trackers.items() if not _lives(tracker)]
        for tracker, owner in gone:
            if self._children[owner].running and owner not in self._resting:
                name = f"the multiprocessing resource tracker of {owner} (pid {tracker.pid})"
                dead.append(Death(name=name, exit_code=None, detected_s=time.monotonic()))
        return dead

    def _is_death(self, child: ChildProcess) -> bool:
        if child.running or child.name in self._resting:
            return False
        if child.exit_code and child.name in self._restarts and self._restarts[child.name].forgive:
            return False
        if child.plan is None:
            return True  # the guardian never ends by itself
        if child.plan.role is Role.CONTROLLER:
            return not self._finished()
        # Ending with 0 is the right answer to the end of a stream: the controller ends streams shortly before itself.
        return child.exit_code != 0 or (child.ended_for_s > self._others_end_s and not self._finished())

    async def _died(self) -> ProcessDied:
        """Wait until the first cause can be told from what followed from it."""
        began = time.monotonic()
        deaths = self._deaths()
        while not self._ending:
            await anyio.sleep(_POLL_S)
            deaths = self._deaths() or deaths
            patience_s = _CONSEQUENCE_S if first_cause(deaths).is_consequence else _SETTLE_S
            if time.monotonic() >= began + patience_s:
                break
        first = first_cause(deaths)
        others = sorted(death.name for death in deaths if death.name != first.name)
        text = [first.describe()]
        if others:
            text.append(f"(after it: {', '.join(others)})")
        if child := self._children.get(first.name):
            tail = last_lines(child.log, start=child.log_start)
            text.append(f"last lines of {child.log}:" if tail else f"it logged nothing to {child.log}")
            text += [f"  {line}" for line in tail]
        else:
            text.append(f"logs are in {self.run_directory / 'logs'}")
        return ProcessDied("\n".join(text))

    def _record_what_is_used(self) -> None:
        """Remember the shared memory in use, and resource trackers: a killed one would leave it behind unseen."""
        owners = {child.process.pid: name for name, child in self._children.items()}
        found = members(self._traces)
        record_segments(self._traces, found)
        for process in found:
            if process not in self.resource_trackers and is_resource_tracker(process):
                owner = owners.get(session_of(process))
                if owner is not None:
                    self.resource_trackers[process] = owner


async def _ended_within(seconds: float, *children: ChildProcess) -> None:
    with anyio.move_on_after(seconds):
        while any(child.running for child in children):  # noqa: ASYNC110 - ends of processes are polled
            await anyio.sleep(_POLL_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
