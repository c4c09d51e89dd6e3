"""The supervisor of a run, in the process of the command (``launch.pipeline.Pipeline``): the parent of every process of
the run. It starts them, starts some again when they die, resumes the run, and ends them all.

An engine, a reward worker and the judge are started again alone. When the controller or a trainer rank dies, all
processes are ended and started again with ``--resume``, and go on from the journal as after ``streamrl resume``. Any
other death ends the run with its first cause. This file imports neither torch nor vllm. Children are polled, which
works in any thread."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from signal import SIGTERM
from time import monotonic
from typing import Self

from anyio import CancelScope, Lock, sleep, to_thread
from msgspec import json

from streamrl.base.atomic_files import write_atomic
from streamrl.base.errors import ProcessDied, StreamRLError
from streamrl.base.run_process import ensure_home
from streamrl.observe.run_files.file_sizes import most_bytes
from streamrl.processes.exit_monitor import CONSEQUENCE_S, ExitMonitor
from streamrl.processes.exit_reason import Death, first_cause, reason_path
from streamrl.processes.launcher import POLL_S, ChildProcess, Launcher, NoHost, ended_within
from streamrl.processes.local_launcher import ENTRY, LocalLauncher
from streamrl.processes.log_files import LogFiles
from streamrl.processes.restart_policy import RESUMED
from streamrl.processes.tracker_processes import FINISH_S, Followers
from streamrl.recipe.sections import Metrics
from streamrl.recipe.topology import TOPOLOGY_FILE, ProcessPlan, Topology, planned_engine

log = getLogger(__name__)

OWN_SOCKETS = "control"
"""First letters of the names of sockets that this process or the controller binds."""
_SETTLE_S = 0.3  # after a death: time to notice other deaths of the same moment


class Supervisor:
    """Starts, watches and ends the local processes of ``topology``.

    ``socket_directory``: directory of sockets, removed at the end.
    ``entry``: arguments of ``python`` before the arguments of a role.
    ``restarts``: number of times that reward workers together may ask (exit code 75) to be replaced. The topology has
    the numbers of restarts after deaths.
    ``others_end_s``: longest time between the ends of the controller and of the other processes when a run ends well.
    ``resumes``: whether the run goes on where an earlier life of it ended.
    ``metrics``: settings of trackers and of the size of logs.
    ``launcher``: launcher that starts and ends the processes (None: on this host).
    ``before_resume``: coroutine functions awaited when all processes have ended, before they are started again: they
    bind streams to this process again.
    ``children``: last process of each name. ``starts``: number of starts of each name."""

    def __init__(
        self,
        topology: Topology,
        run_directory: Path,
        socket_directory: Path,
        python: str = sys.executable,
        *,
        entry: Sequence[str] = ENTRY,
        restarts: int = 20,
        others_end_s: float = 30.0,
        resumes: bool = False,
        metrics: Metrics = Metrics(),  # noqa: B008 - frozen
        launcher: Launcher | None = None,
    ) -> None:
        self.topology = topology
        self.run_directory = run_directory
        self.socket_directory = socket_directory
        self.before_resume: list[Callable[[], Awaitable[None]]] = []
        self._others_end_s = others_end_s
        self._resumes = resumes
        self._launcher = launcher or LocalLauncher((python, *entry), run_directory, socket_directory)
        self._exits = ExitMonitor(topology, run_directory, replacements=restarts, others_end_s=others_end_s)
        self.children = self._exits.children
        self.starts: Counter[str] = Counter()
        self._followers = Followers(metrics.report_to, run_directory)
        self._logs = LogFiles(run_directory / "logs", most_bytes(metrics.most_mib, "logs"))
        self._asleep: set[str] = set()
        self._ending = False
        self._launcher_is_open = False
        self._one_end = Lock()

    # ---- life ------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start every local process. ``run_directory`` holds ``recipe.toml`` already; ``topology.json`` is written."""
        try:
            await self._begin()
        except BaseException:
            await self.kill(0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def _begin(self) -> None:
        ensure_home()  # for the processes of the run, also where a Python program starts it
        for folder in ("logs", "exit"):
            (self.run_directory / folder).mkdir(parents=True, exist_ok=True)
        self.socket_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._launcher.open()
        self._launcher_is_open = True
        await self._start_all(resumes=self._resumes)

    async def watch(self) -> None:
        """Return when the controller and after it the other processes have ended well, or when ``kill`` was called.
        Raises ``ProcessDied``, which names the first cause."""
        while not self._ending and not self._exits.has_ended_well():
            self._followers.poll()
            deaths = self._exits.poll()
            if deaths and not self._exits.finishing:
                deaths = await self._settled(deaths)
            if deaths and self._exits.finishing:
                break
            if deaths and not self._exits.has_ended_well() and not await self._resume(first_cause(deaths)):
                raise ProcessDied(self._exits.notice(deaths))
            for child in self._exits.overdue:
                await self._replace(child)
            await sleep(POLL_S)
            await self._logs.poll()
        await ended_within(self._others_end_s, *self.children.values(), unless=self._nobody_ends_them)
        if self._ending:
            return
        for death in self._exits.poll():
            log.warning("after the run had finished, %s", death.describe())

    def run_finished(self) -> None:
        """Note that the controller has finished the run: a death from now on is only logged."""
        self._exits.finishing = True

    def request_drain(self) -> None:
        """Send SIGTERM to the controller: it finishes the open step, ends the streams, and ends itself."""
        self._exits.draining = True
        if (controller := self.controller) is not None and controller.running:
            controller.process.send_signal(SIGTERM)

    async def kill(self, grace_s: float = 1.0) -> None:
        """End all processes now: SIGTERM, ``grace_s`` later SIGKILL; clean up. Idempotent, never cancelled."""
        self._ending = True
        with CancelScope(shield=True):
            async with self._one_end:
                await self._end_all(grace_s)
                await self._followers.finish(FINISH_S if grace_s else 0.0)
                await to_thread.run_sync(lambda: shutil.rmtree(self.socket_directory, ignore_errors=True))
                self.children.clear()
                if self._launcher_is_open:
                    self._launcher.close()
                    self._launcher_is_open = False

    @property
    def retired(self) -> list[str]:
        """Names of the engines that are not started again."""
        return list(self._exits.policy.retired)

    @property
    def controller(self) -> ChildProcess | None:
        """The controller that was started last."""
        return self._exits.controller

    # ---- engines, on the controller's order --------------------------------------------------------

    def engine_process(self, name: str) -> ChildProcess | None:
        """The process of a local engine; None where it was never started. Raises ``StreamRLError`` where ``name`` is no
        local engine."""
        planned_engine(self.topology, name)
        return self.children.get(name)

    async def stop_engine(self, name: str, grace_s: float = 10, *, patience_s: float = 0, sleeps: bool = False) -> None:
        """End one engine process and its descendants while the run goes on; this end is no death. See ``start_engine``.

        The controller has ended the engine's orders: the engine has ``patience_s`` to end by itself while the
        controller lives, then ``grace_s`` from SIGTERM to SIGKILL. An engine that ``sleeps`` is not ended. An engine
        that had died before and is not started again is handled by ``watch``. Raises ``StreamRLError`` where ``name``
        is no local engine."""
        child = self.engine_process(name)
        # ``stop`` before the engine ends: ``watch`` must count no death.
        if self._ending or not self._exits.stop(name) or child is None:
            return
        if sleeps:
            self._asleep.add(name)
            return
        controller = self.controller
        with CancelScope(shield=True):
            await ended_within(patience_s, child, unless=lambda: controller is None or not controller.running)
            child.process.terminate()
            await ended_within(grace_s, child)
            await self._end_rest_of(child)

    def start_engine(self, name: str) -> None:
        """Start an engine process that does not run, after ``stop_engine`` or because its set was chosen, with the
        weights of the model directory; an engine that sleeps wakes by itself. Raises ``StreamRLError`` unless the
        engine was stopped."""
        if self._ending:
            return
        plan = planned_engine(self.topology, name)
        retired = self._exits.policy.retired
        if name not in self._exits.stopped and name not in retired:
            raise StreamRLError(f"{name} was not stopped; stop_engine comes before start_engine")
        if not (name in self._asleep and self.children[name].running):
            self._start(plan)
        self._asleep.discard(name)
        self._exits.stopped.discard(name)
        retired.pop(name, None)

    # ---- inside ----------------------------------------------------------------------------------

    def _start(self, plan: ProcessPlan, *, resumes: bool = False) -> None:
        self.starts[plan.name] += 1
        try:
            self.children[plan.name] = self._launcher.start(plan, resumes=resumes)
        except NoHost:
            self._exits.without_host(plan)
            raise
        # Only now: where the process cannot be started, the exit file of its predecessor still has the reason.
        reason_path(self.run_directory, plan.name).unlink(missing_ok=True)

    async def _start_all(self, *, resumes: bool) -> None:
        """Give the processes their hosts and start them. Raises ``StreamRLError`` where there is no room for them."""
        self.topology = await self._launcher.place(self.topology)
        if self._ending:  # ``kill`` was called while the launcher waited for a host
            return
        write_atomic(self.run_directory / TOPOLOGY_FILE, json.encode(self.topology))
        self._exits.begin_life(self.topology)
        for plan in self.topology.processes:
            if not plan.starts_inactive:
                self._start(plan, resumes=resumes)

    async def _replace(self, child: ChildProcess) -> None:
        await self._end_rest_of(child)
        if self._exits.due_s.pop(child.name, None) is None or self._ending:
            return  # ``stop_engine`` was called meanwhile
        try:
            self._start(child.plan)
        except OSError as error:
            self._exits.not_started(child, error)

    async def _settled(self, deaths: list[Death]) -> list[Death]:
        """Wait until the first cause can be distinguished from its consequences. Returns all deaths by then."""
        began_s = monotonic()
        while not self._ending:
            await sleep(POLL_S)
            deaths = self._exits.poll() or deaths
            patience_s = CONSEQUENCE_S if first_cause(deaths).is_consequence else _SETTLE_S
            if monotonic() >= began_s + patience_s:
                return deaths
        return []

    async def _resume(self, first: Death) -> bool:
        """End every process and start the run again from its journal. False where the run cannot survive this death."""
        child = self.children[first.name]
        if self._exits.draining or first.is_fatal or child.plan.role not in RESUMED:
            return False
        if (pause_s := self._exits.policy.run.next_pause(child.uptime_s)) is None:
            return False
        log.warning(
            "%s; the run is resumed (%d of its restarts left)", first.describe(), self._exits.policy.run.remaining
        )
        self._exits.policy.retired.clear()  # a host that joins meanwhile must not start them twice
        await self._end_all(0.0)
        await to_thread.run_sync(_remove_stale_sockets, self.socket_directory)
        for prepare in self.before_resume:
            await prepare()
        await sleep(pause_s)
        if self._ending:
            return True
        try:
            await self._start_all(resumes=True)
        except StreamRLError as error:
            raise ProcessDied(f"{first.describe()}\n{error}") from error
        except OSError as error:
            log.error("the run cannot be resumed now: %s", error)
            for waiting_child in self.children.values():
                if not waiting_child.running:
                    waiting_child.not_replaced()
        if self._exits.draining:
            self.request_drain()  # ``request_drain`` found no controller meanwhile
        return True

    async def _end_rest_of(self, child: ChildProcess) -> None:
        """Kill the remaining processes of the session of ``child`` and every orphan of the run."""
        survivors = await self._launcher.end_left_behind(child)
        child.exit_code  # noqa: B018 - reaps the child
        if survivors:
            log.error("processes %s of %s survived SIGKILL; look at them with ps", survivors, child.name)

    async def _end_all(self, grace_s: float) -> None:
        children = list(self.children.values())
        if grace_s:
            for child in children:
                child.process.terminate()
        await ended_within(grace_s, *children)
        if survivors := await self._launcher.end_all():
            log.error("processes %s of the run survived SIGKILL; look at them with ps", survivors)
        await ended_within(1.0, *children)

    def _nobody_ends_them(self) -> bool:
        """Return whether the controller died before it ended the streams of other processes, or ``kill`` ends all."""
        controller = self.controller
        return self._ending or controller is None or controller.exit_code not in (None, 0)


def _remove_stale_sockets(directory: Path) -> None:
    """Remove the sockets of ended processes, and files by which ranks connected and engines shared weights."""
    with suppress(FileNotFoundError):  # ``kill`` removes the whole directory meanwhile
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not path.name.startswith(OWN_SOCKETS):
                path.unlink(missing_ok=True)
