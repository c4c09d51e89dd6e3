"""The monitor of exits: it decides which ends of processes are deaths, and which processes are started again, and when.

The supervisor polls it, in the process of the command, and carries out its decisions."""

from __future__ import annotations

from logging import getLogger
from pathlib import Path
from signal import SIGTERM
from time import monotonic

from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE
from streamrl.processes.exit_reason import Death, notice_of, read_reason
from streamrl.processes.launcher import ChildProcess
from streamrl.processes.restart_policy import RestartPolicy
from streamrl.recipe.topology import ProcessPlan, Role, Topology

log = getLogger(__name__)

CONSEQUENCE_S = 2.0  # after a consequence of another death: time to notice this death


class ExitMonitor:
    """Exits of the local processes of ``topology``.

    ``replacements``: number of times that reward workers together may ask to be replaced (exit code 75).
    ``others_end_s``: longest time between the ends of the controller and of other processes when a run ends well.
    ``children``: last process of each name. ``stopped``: names of the engines that must not run.
    ``due_s``: monotonic times at which dead processes are started again, by name.
    ``draining``: whether the run was asked to drain. ``finishing``: whether the controller has finished the run."""

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
        """Note that all processes of ``topology`` start now: all budgets but the budget of the run are renewed."""
        self._topology = topology
        for name in self.children.keys() - {plan.name for plan in topology.processes}:
            del self.children[name]  # a rank for which the cluster has no room any more
        run = self.policy.run
        self.policy = RestartPolicy(self._topology)
        self.due_s = {}
        self.policy.run = run
        self.stopped = {plan.name for plan in self._topology.processes if plan.starts_inactive}

    @property
    def controller(self) -> ChildProcess | None:
        """The controller that was started last."""
        return self.children.get(Role.CONTROLLER.value)

    @property
    def overdue(self) -> list[ChildProcess]:
        """Dead processes that must be started again now."""
        now_s = monotonic()
        return [child for name, child in self.children.items() if name in self.due_s and self.due_s[name] <= now_s]

    def stop(self, name: str) -> bool:
        """Note that an engine must not run. False where it never ran, or has died and thereby ends the run."""
        child = self.children.get(name)
        restarts = self.policy.alone.get(name)
        retired = name in self.policy.retired
        if child is None:
            can_stop = retired
        else:
            survives_death = retired or name in self.due_s or (restarts is not None and restarts.remaining > 0)
            can_stop = survives_death or name in self.stopped or not child.exit_code
        if not can_stop:
            return False
        self.stopped.add(name)
        self.due_s.pop(name, None)
        self.policy.retired.pop(name, None)  # a host that joins must not start it
        return True

    def poll(self) -> list[Death]:
        """Deaths that end this life of the run. For other deaths ``due_s`` gets the time of the restart."""
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
                continue  # the cause is about to be noticed
            if self._asks_for_replacement(child):
                self._replacements_left -= 1
                pause_s = 0.0
                remaining = self._replacements_left
                log.warning("%s asked to be replaced (%d replacements left); see %s", name, remaining, child.log)
            elif restarts is not None and not death.is_fatal and (death.exit_code or not self.draining):
                pause_s = restarts.next_pause(child.uptime_s)
                if pause_s is not None:
                    outcome = f"it is started again ({restarts.remaining} restarts left)"
                    log.warning("%s; %s; see %s", death.describe(), outcome, child.log)
                elif self.policy.may_retire(name, self.stopped):
                    log.error("%s; it is not started again, and the other engines go on", death.describe())
                    self.policy.retired[name] = death
                    continue
            if pause_s is None:
                deaths.append(death)
            else:
                self.due_s[name] = monotonic() + pause_s
        return deaths

    def not_started(self, child: ChildProcess, error: OSError) -> None:
        """Note that no successor of ``child`` could be started: another attempt follows."""
        log.error("%s cannot be started again now: %s", child.name, error)
        child.not_replaced()

    def without_host(self, plan: ProcessPlan) -> None:
        """Note that a process has no host. An engine is retired until a host joins, also where too few engines
        serve."""
        if plan.role is Role.ENGINE:
            child = self.children.get(plan.name)
            unknown_death = Death(name=plan.name, exit_code=None, detected_s=monotonic())
            self.policy.retired[plan.name] = self._death_of(child) if child else unknown_death
            self.stopped.discard(plan.name)

    def _death_of(self, child: ChildProcess) -> Death:
        """The death of ``child``, with the reason in its exit file."""
        reason = read_reason(self._run_directory, child.name)
        return Death(name=child.name, exit_code=child.exit_code, detected_s=child.ended_s, reason=reason)

    def _is_missed(self, child: ChildProcess) -> bool:
        """Return whether ``child`` ended and should not have."""
        if child.running or child.name in self.stopped or child.name in self.policy.retired:
            return False
        if child.plan.role is Role.CONTROLLER:
            return not self.has_ended_well()
        if child.exit_code != 0:
            return True
        # A process exits with 0 at the end of its stream, which the controller ends shortly before it ends itself.
        # Some processes also exit with 0 when the stream breaks.
        serves = child.name in self.policy.alone and not self.draining
        limit_s = CONSEQUENCE_S if serves else self._others_end_s
        return child.ended_for_s > limit_s and not self.finishing and not self.has_ended_well()

    def _asks_for_replacement(self, child: ChildProcess) -> bool:
        """Return whether ``child`` is a worker of user code that ended to be replaced, and may be replaced."""
        runs_user_code = child.plan.role in (Role.REWARD, Role.ENVIRONMENT)
        asks = child.exit_code == REWARD_RESTART_EXIT_CODE and runs_user_code
        return asks and self._replacements_left > 0

    def has_ended_well(self) -> bool:
        """Return whether the controller has ended well. SIGTERM kills a controller that does not listen for it yet:
        this is a good end when draining."""
        controller = self.controller
        good_codes = {0, -SIGTERM} if self.draining else {0}
        return controller is None or controller.exit_code in good_codes

    def notice(self, deaths: list[Death]) -> str:
        """Describe deaths for people: the first cause, its consequences, the end of a log."""
        # Engines that were retired count, too: the first cause is their first death, not the death of the last engine.
        retired_deaths = [death for death in self.policy.retired.values() if death.exit_code is not None]
        deaths = [*deaths, *retired_deaths]
        logs = {name: (child.log, child.log_start) for name, child in self.children.items()}
        return notice_of(deaths, logs, self._run_directory / "logs")
