"""Policy of restarts: when a process that died is started again, and when its death ends the run. Pure. An engine, a
reward worker and the judge are started again alone, while the others continue. The controller and the trainer ranks
cannot: when one of them dies, the whole run is resumed from its journal (``RestartPolicy.run``)."""

from __future__ import annotations

from collections.abc import Collection

from streamrl.processes.exit_reason import Death
from streamrl.recipe.topology import Role, Topology

RESUMED = (Role.CONTROLLER, Role.TRAINER)
"""Roles whose death is a resume of the run."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
SETTLED_AFTER_S = 5.0
"""A process that lived so long did not die of being started: pauses start again from the shortest. The budget does
not."""
RENEWED_AFTER_S = 600.0
"""A process that lived so long did not die of what its predecessors died of: the budget is whole again."""


class Restarts:
    """Budget of restarts of a process. The pause before a restart doubles while deaths follow each other."""

    def __init__(self, budget: int) -> None:
        self.left = self._budget = budget
        self._pause_s = 0.0

    def next_pause(self, uptime_s: float) -> float | None:
        """Seconds to wait before the process that died after ``uptime_s`` is started again, which is counted; None:
        the budget is spent."""
        if uptime_s >= RENEWED_AFTER_S:
            self.left = self._budget
        if uptime_s >= SETTLED_AFTER_S:
            self._pause_s = 0.0
        if not self.left:
            return None
        self.left -= 1
        pause_s = self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        return pause_s


class RestartPolicy:
    """``alone``: budgets of the processes that are started again alone, by name. ``run``: how often the run is resumed.
    ``retired``: engines that are not started any more, or until a host joins, with their last deaths."""

    def __init__(self, topology: Topology) -> None:
        plans = [plan for plan in topology.processes if plan.local]
        self.alone = {
            plan.name: Restarts(plan.restarts) for plan in plans if plan.restarts and plan.role not in RESUMED
        }
        self.run = Restarts(max((plan.restarts for plan in plans if plan.role in RESUMED), default=0))
        self.retired: dict[str, Death] = {}
        self._engines = [plan.name for plan in topology.processes if plan.role is Role.ENGINE]
        self._min_serving = topology.min_serving

    def may_retire(self, name: str, stopped: Collection[str]) -> bool:
        """Return whether enough engines are left to serve without ``name``, whose budget is spent."""
        gone = {name, *self.retired, *stopped}
        return name in self._engines and len(set(self._engines) - gone) >= self._min_serving
