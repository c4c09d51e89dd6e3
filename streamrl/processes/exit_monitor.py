"""Monitor of exits: which ends of processes are deaths, which of the dead are started again, and when."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path

from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE
from streamrl.processes.exit_files import read_reason
from streamrl.processes.exit_reason import Death, notice_of
from streamrl.processes.launcher import ChildProcess
from streamrl.processes.restart_policy import RestartPolicy
from streamrl.recipe.topology import ProcessPlan, Role, Topology

log = logging.getLogger(__name__)

CONSEQUENCE_S = 2.0  # after a death that must have a cause elsewhere: time for the cause to show


class ExitMonitor:
    """Exits of the local processes of ``topology``. ``children``: the last one that was started of each name;
    ``stopped``: engines that are meant not to run; ``due_s``: when (monotonic) those that died are started again.

    ``replacements``: how often reward workers may ask to be replaced (exit code 75), together. ``others_end_s``: how
    far apart the ends of the controller and of the others may be when a run ends well."""

    def __init__(self, topology: Topology, run_directory: Path, *, replacements: int, others_end_s: float) -> None:
        self.children: dict[str, ChildProcess] = {}
        self.stopped: set[str] = set()
        self.due_s: dict[str, float] = {}
        self.policy = RestartPolicy(topology)
        self.draining = False
        self.finishing = False
        self._topology = topology
        self._run_directory = run_directory
        self._replacements_left = replacements
        self._others_end_s = others_end_s

    def begin_life(self, topology: Topology) -> None:
        """All processes of ``topology`` are started: budgets are whole again, but for that of the run."""
        self._topology = topology
        for name in self.children.keys() - {plan.name for plan in topology.processes}:
            del self.children[name]  # a rank for which a cluster has no room any more
        run = self.policy.run
        self.policy = RestartPolicy(self._topology)
        self.due_s = {}
        self.policy.run = run
        self.stopped = {plan.name for plan in self._topology.processes if plan.local and plan.starts_inactive}

    @property
    def controller(self) -> ChildProcess | None:
        """The last one that was started here."""
        return self.children.get(Role.CONTROLLER.value)

    @property
    def overdue(self) -> list[ChildProcess]:
        """Dead processes whose time to be started again has come."""
        now_s = time.monotonic()
        return [child for name, child in self.children.items() if name in self.due_s and self.due_s[name] <= now_s]

    def stop(self, name: str) -> bool:
        """Note that an engine is not to run. False: it never did, or has died, which ends the run."""
        child = self.children.get(name)
        restarts = self.policy.alone.get(name)
        retired = name in self.policy.retired
        survived = retired or name in self.due_s or (restarts is not None and restarts.left > 0)
        if not (retired if child is None else survived or name in self.stopped or not child.exit_code):
            return False
        self.stopped.add(name)
        self.due_s.pop(name, None)
        self.policy.retired.pop(name, None)  # a host that joins starts it no more
        return True

    def poll(self) -> list[Death]:
        """Deaths that end this life of the run. For others it is noted when the process is started again."""
        deaths = []
        for name, child in self.children.items():
            if name in self.due_s or not self._is_missed(child):
                continue
            death = self._death_of(child)
            restarts = self.policy.alone.get(name)
            pause_s = None
            if self.finishing or self.has_ended_well():
                deaths.append(death)
                continue
            if restarts is not None and death.is_consequence and child.ended_for_s < CONSEQUENCE_S:
                continue  # of what is about to be seen
            if self._asks(child):
                self._replacements_left -= 1
                pause_s = 0.0
                left = self._replacements_left
                log.warning("%s asked to be replaced (%d replacements left); see %s", name, left, child.log)
            elif restarts is not None and not death.is_fatal and (death.exit_code or not self.draining):
                pause_s = restarts.next_pause(child.uptime_s)
                if pause_s is not None:
                    how = f"it is started again ({restarts.left} restarts left)"
                    log.warning("%s; %s; see %s", death.describe(), how, child.log)
                elif self.policy.may_retire(name, self.stopped):
                    log.error("%s; it is not started again, and the other engines go on", death.describe())
                    self.policy.retired[name] = death
                    continue
            if pause_s is None:
                deaths.append(death)
            else:
                self.due_s[name] = time.monotonic() + pause_s
        return deaths

    def not_started(self, child: ChildProcess, error: OSError) -> None:
        """Note that no successor could be started: another try follows."""
        log.error("%s cannot be started again now: %s", child.name, error)
        child.not_replaced()

    def without_host(self, plan: ProcessPlan) -> None:
        """Note that a process has no host: an engine is retired until one joins, however few are left."""
        if plan.role is Role.ENGINE:
            child = self.children.get(plan.name)
            last = Death(name=plan.name, exit_code=None, detected_s=time.monotonic())
            self.policy.retired[plan.name] = self._death_of(child) if child else last
            self.stopped.discard(plan.name)

    def _death_of(self, child: ChildProcess) -> Death:
        """Return its end, with the reason that it left behind."""
        reason = read_reason(self._run_directory, child.name)
        return Death(name=child.name, exit_code=child.exit_code, detected_s=child.ended_s, reason=reason)

    def _is_missed(self, child: ChildProcess) -> bool:
        """Return whether it ended and should not have."""
        if child.running or child.name in self.stopped or child.name in self.policy.retired:
            return False
        if child.plan.role is Role.CONTROLLER:
            return not self.has_ended_well()
        if child.exit_code != 0:
            return True
        # 0 is the right answer to the end of a stream, which the controller ends shortly before itself; some take a
        # broken stream for it.
        serves = child.name in self.policy.alone and not self.draining
        limit_s = CONSEQUENCE_S if serves else self._others_end_s
        return child.ended_for_s > limit_s and not self.finishing and not self.has_ended_well()

    def _asks(self, child: ChildProcess) -> bool:
        """Return whether it is a worker of user code that ended to be replaced."""
        of_users = child.plan.role in (Role.REWARD, Role.ENVIRONMENT)
        asks = child.exit_code == REWARD_RESTART_EXIT_CODE and of_users
        return asks and self._replacements_left > 0

    def has_ended_well(self) -> bool:
        """Return whether the controller has. Before it listens for SIGTERM it dies of it: when draining that is well,
        too."""
        controller = self.controller
        return controller is None or controller.exit_code in ({0, -signal.SIGTERM} if self.draining else {0})

    def notice(self, deaths: list[Death]) -> str:
        """Describe deaths for people: the first cause, what followed from it, the end of a log."""
        # The last engine is not the first cause, but the first of them.
        deaths = [*deaths, *(one for one in self.policy.retired.values() if one.exit_code is not None)]
        logs = {name: (child.log, child.log_start) for name, child in self.children.items()}
        return notice_of(deaths, logs, self._run_directory / "logs")
