"""Policy of restarts: when a process that died is started again, and when its death ends the run. Pure.

``exit_monitor`` asks it in the supervisor's process. An engine, a reward worker and the judge are started again alone,
while the other processes continue. The controller and the trainer ranks cannot restart alone: when one of them dies,
the run is resumed from its journal (``RestartPolicy.run``)."""

from __future__ import annotations

from collections.abc import Collection

from streamrl.processes.exit_reason import Death
from streamrl.recipe.topology import Role, Topology

RESUMED = (Role.CONTROLLER, Role.TRAINER)
"""Roles whose death resumes the run."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
SETTLED_AFTER_S = 5.0
"""A process that lived so long did not fail at its start: pauses begin again with the shortest. The budget is not
renewed."""
RENEWED_AFTER_S = 600.0
"""A process that lived so long did not die of the cause of earlier deaths: the budget is renewed."""


class Restarts:
    """Budget of restarts of a process. The pause before a restart doubles while deaths follow each other."""

    def __init__(self, budget: int) -> None:
        self.remaining = self._budget = budget
        self._pause_s = 0.0

    def next_pause(self, uptime_s: float) -> float | None:
        """Count a restart of the process that died after ``uptime_s``, and return the seconds to wait before it; None
        where the budget is spent."""
        if uptime_s >= RENEWED_AFTER_S:
            self.remaining = self._budget
        if uptime_s >= SETTLED_AFTER_S:
            self._pause_s = 0.0
        if not self.remaining:
            return None
        self.remaining -= 1
        pause_s = self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        return pause_s


class RestartPolicy:
    """Budgets of the restarts of a run. ``alone``: budgets of the processes that are started again alone, by name;
    ``run``: budget of resumptions of the run; ``retired``: engines that are not started again, or only when a host
    joins, with their last deaths."""

    def __init__(self, topology: Topology) -> None:
        plans = topology.processes
        self.alone = {
            plan.name: Restarts(plan.restarts) for plan in plans if plan.restarts and plan.role not in RESUMED
        }
        self.run = Restarts(max((plan.restarts for plan in plans if plan.role in RESUMED), default=0))
        self.retired: dict[str, Death] = {}
        self._engines = [plan.name for plan in topology.processes if plan.role is Role.ENGINE]
        self._min_serving = topology.min_serving

    def may_retire(self, name: str, stopped: Collection[str]) -> bool:
        """Return whether enough engines can serve without ``name``, whose budget is spent."""
        gone = {name, *self.retired, *stopped}
        return name in self._engines and len(set(self._engines) - gone) >= self._min_serving
