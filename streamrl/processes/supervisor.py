"""The parent of every process of a run: starts them, starts some again when they die, resumes the run, ends them all.

An engine, a reward worker and the judge are started again alone. When the controller or a trainer rank dies, all
processes are ended and started again, told to go on from the journal: the same as ``streamrl resume``. Any other death
ends the run with its first cause. Nothing here imports torch or vllm. Children are polled, which works in any thread.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
import msgspec

from streamrl.base.atomic_files import write_atomic
from streamrl.base.errors import ProcessDied, StreamRLError
from streamrl.base.run_process import ensure_home
from streamrl.observe.follow.file_sizes import most_bytes
from streamrl.processes.exit_files import reason_path
from streamrl.processes.exit_monitor import CONSEQUENCE_S, ExitMonitor
from streamrl.processes.exit_reason import Death, first_cause
from streamrl.processes.followers import FINISH_S, Followers
from streamrl.processes.launcher import POLL_S, ChildProcess, Launcher, NoHost, ended_within
from streamrl.processes.local import ENTRY, LocalLauncher
from streamrl.processes.log_files import LogFiles
from streamrl.processes.restart_policy import RESUMED
from streamrl.recipe.sections import Metrics
from streamrl.recipe.topology import TOPOLOGY_FILE, ProcessPlan, Topology, local_engine

log = logging.getLogger(__name__)

OWN_SOCKETS = "control"  # names of sockets that the parent binds (and those of the controller) begin so
_SETTLE_S = 0.3  # after a death: time for others that died in the same moment to be seen


class Supervisor:
    """Starts, watches and ends the local processes of ``topology``.

    ``socket_directory`` is removed at the end. ``entry``: what ``python`` runs, before the role's arguments.
    ``restarts``: how often reward workers may ask (exit code 75) to be replaced, together; for deaths the topology says
    how many are survived. ``others_end_s``: how far apart the ends of the controller and of the others may be when a
    run ends well. ``resumes``: the run goes on where an earlier life of it ended. ``metrics``: its trackers, and the
    size of its logs. What is in ``before_resume`` is awaited when all processes have ended and before they are started
    again: streams to this process are bound anew. ``children``: the last process of each name; ``starts``: how often
    each was started. ``launcher``: what starts the processes and ends them (None: on this host)."""

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
        self._opened = False
        self._one_end = anyio.Lock()

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
        ensure_home()  # of its processes, also where it was started from Python
        for folder in ("logs", "exit"):
            (self.run_directory / folder).mkdir(parents=True, exist_ok=True)
        self.socket_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._launcher.open()
        self._opened = True
        await self._start_all(resumes=self._resumes)

    async def watch(self) -> None:
        """Return when the controller has ended well and the others after it, or when ``kill`` was called meanwhile.
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
            await anyio.sleep(POLL_S)
            await self._logs.poll()
        await ended_within(self._others_end_s, *self.children.values(), unless=self._nobody_ends_them)
        for death in [] if self._ending else self._exits.poll():
            log.warning("after the run had finished, %s", death.describe())

    def run_finished(self) -> None:
        """The controller has said that all is done: a death from now on is only logged."""
        self._exits.finishing = True

    def request_drain(self) -> None:
        """SIGTERM to the controller: it finishes what it is doing, ends the streams, and ends itself."""
        self._exits.draining = True
        if (controller := self.controller) is not None and controller.running:
            controller.process.send_signal(signal.SIGTERM)

    async def kill(self, grace_s: float = 1.0) -> None:
        """End everything now: SIGTERM, ``grace_s`` later SIGKILL; leave nothing behind. Idempotent, never cancelled."""
        self._ending = True
        with anyio.CancelScope(shield=True):
            async with self._one_end:
                await self._end_all(grace_s)
                await self._followers.finish(FINISH_S if grace_s else 0.0)
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(self.socket_directory, ignore_errors=True))
                self.children.clear()
                if self._opened:
                    self._launcher.close()
                    self._opened = False

    @property
    def retired(self) -> list[str]:
        """Names of the engines that were given up."""
        return list(self._exits.policy.retired)

    @property
    def controller(self) -> ChildProcess | None:
        """The last one that was started here."""
        return self._exits.controller

    # ---- engines, on the controller's order --------------------------------------------------------

    def engine_host(self, name: str) -> ChildProcess | None:
        """The process of a local engine; None where it was never started. Raises ``StreamRLError`` for no such one."""
        local_engine(self.topology, name)
        return self.children.get(name)

    async def stop_engine(self, name: str, grace_s: float = 10, *, patience_s: float = 0, sleeps: bool = False) -> None:
        """End one engine host and what it started while the run goes on; its end is no death. See ``start_engine``.

        The controller has ended its orders: it has ``patience_s`` to end by itself, while that one lives, then
        ``grace_s`` from SIGTERM to SIGKILL. One that ``sleeps`` is not ended. One that had died before, and is not
        started again, is left to ``watch``. Raises ``StreamRLError`` for no local engine."""
        child = self.engine_host(name)
        if self._ending or not self._exits.stop(name) or child is None:  # before it ends: the watch must see no death
            return
        if sleeps:
            self._asleep.add(name)
            return
        controller = self.controller
        with anyio.CancelScope(shield=True):
            await ended_within(patience_s, child, unless=lambda: controller is None or not controller.running)
            child.process.terminate()
            await ended_within(grace_s, child)
            await self._end_rest_of(child)

    def start_engine(self, name: str) -> None:
        """Start an engine host that does not run, after ``stop_engine`` or because its set was chosen, with the weights
        of the model directory; one that sleeps wakes by itself. Raises ``StreamRLError`` unless it was stopped."""
        if self._ending:
            return
        plan = local_engine(self.topology, name)
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
        # Only now: where nobody can be started, the reason of the one before is still the reason.
        reason_path(self.run_directory, plan.name).unlink(missing_ok=True)

    async def _start_all(self, *, resumes: bool) -> None:
        """Give the processes their hosts and start them. Raises ``StreamRLError`` where there is no room for them."""
        self.topology = await self._launcher.place(self.topology)
        if self._ending:  # while that waited for a host
            return
        write_atomic(self.run_directory / TOPOLOGY_FILE, msgspec.json.encode(self.topology))
        self._exits.begin_life(self.topology)
        for plan in self.topology.processes:
            if plan.local and not plan.starts_inactive:
                self._start(plan, resumes=resumes)

    async def _replace(self, child: ChildProcess) -> None:
        await self._end_rest_of(child)
        if self._exits.due_s.pop(child.name, None) is None or self._ending:
            return  # it was stopped meanwhile
        try:
            self._start(child.plan)
        except OSError as error:
            self._exits.not_started(child, error)

    async def _settled(self, deaths: list[Death]) -> list[Death]:
        """Wait until the first cause can be distinguished from what followed from it."""
        began_s = time.monotonic()
        while not self._ending:
            await anyio.sleep(POLL_S)
            deaths = self._exits.poll() or deaths
            patience_s = CONSEQUENCE_S if first_cause(deaths).is_consequence else _SETTLE_S
            if time.monotonic() >= began_s + patience_s:
                return deaths
        return []

    async def _resume(self, first: Death) -> bool:
        """End every process and start the run again from its journal. False: this death is not survived so."""
        child = self.children[first.name]
        if self._exits.draining or first.is_fatal or child.plan.role not in RESUMED:
            return False
        if (pause_s := self._exits.policy.run.next_pause(child.uptime_s)) is None:
            return False
        log.warning("%s; %s", first.describe(), _resumed_notice(self, self._exits.policy.run.left))
        self._exits.policy.retired.clear()  # a host that joins meanwhile must not start them twice
        await self._end_all(0.0)
        await anyio.to_thread.run_sync(_remove_stale_sockets, self.socket_directory)
        for prepare in self.before_resume:
            await prepare()
        await anyio.sleep(pause_s)
        if self._ending:
            return True
        try:
            await self._start_all(resumes=True)
        except StreamRLError as error:
            raise ProcessDied(f"{first.describe()}\n{error}") from error
        except OSError as error:
            log.error("the run cannot be resumed now: %s", error)
            for one in self.children.values():
                if not one.running:
                    one.not_replaced()
        if self._exits.draining:
            self.request_drain()  # the controller was gone when that was asked for
        return True

    async def _end_rest_of(self, child: ChildProcess) -> None:
        """Kill what is left of its session and every orphan of the run."""
        left = await self._launcher.end_left_behind(child)
        child.exit_code  # noqa: B018 - reaps it
        if left:
            log.error("processes %s of %s survived SIGKILL; look at them with ps", left, child.name)

    async def _end_all(self, grace_s: float) -> None:
        children = list(self.children.values())
        for child in children if grace_s else ():
            child.process.terminate()
        await ended_within(grace_s, *children)
        if left := await self._launcher.end_all():
            log.error("processes %s of the run survived SIGKILL; look at them with ps", left)
        await ended_within(1.0, *children)

    def _nobody_ends_them(self) -> bool:
        """Return whether the controller died before it ended the streams of the others, or ``kill`` ends all."""
        controller = self.controller
        return self._ending or controller is None or controller.exit_code not in (None, 0)


def _resumed_notice(run: Supervisor, left: int) -> str:
    """Say that the run is resumed, with ``left`` restarts after this one, and who has to start what again for it."""
    by_hand = ", ".join(plan.name for plan in run.topology.processes if not plan.local)
    again = f"start them again by `streamrl serve engine|trainer {run.run_directory}`"
    waits = f"; the run waits for {by_hand}, whose streams are broken: {again}" if by_hand else ""
    return f"the run is resumed ({left} of its restarts left){waits}"


def _remove_stale_sockets(directory: Path) -> None:
    """Remove all but the sockets of this process, also files by which ranks met and engines shared weights."""
    with suppress(FileNotFoundError):  # ``kill`` removes the whole directory meanwhile
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not path.name.startswith(OWN_SOCKETS):
                path.unlink(missing_ok=True)
