"""Whose deaths are forgiven, how often, and for whom there is no other start. Pure, but for the clock that is asked.

Three kinds: an engine (the others serve on), the judge, and the *core*: the controller and the trainer ranks, which are
started again together, as far as it must be.
"""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.plan.topology import ProcessPlan, Role, Topology
from streamrl.supervise.exit_reason import Death
from streamrl.supervise.restarts import Restarts

CORE = (Role.CONTROLLER, Role.TRAINER)


class Forgiveness:
    """Budgets of the local processes of ``topology``."""

    def __init__(self, topology: Topology) -> None:
        plans = [plan for plan in topology.processes if plan.local]
        self.each = {
            plan.name: Restarts(plan.restarts, at_once=plan.role is not Role.JUDGE)
            for plan in plans
            if plan.restarts and plan.role not in CORE
        }
        self.core = Restarts(max((plan.restarts for plan in plans if plan.role in CORE), default=0), at_once=True)
        self.retired: dict[str, Death] = {}
        """Engines that are not started any more, by name, with the death that was one too many."""
        self._engines = [plan.name for plan in plans if plan.role is Role.ENGINE]
        self._others = sum(plan.role is Role.ENGINE and not plan.local for plan in topology.processes)
        self._min_serving = topology.min_serving

    def forgives(self, plan: ProcessPlan) -> bool:
        """Whether a death of this process is none of the run."""
        if plan.role in CORE:
            return self.core.forgive
        return plan.name in self.retired or (plan.name in self.each and self.each[plan.name].forgive)

    def may_retire(self, name: str, resting: Sequence[str]) -> bool:
        """Whether enough engines are left to serve without ``name``, which was forgiven as often as may be."""
        if name not in self.each or name not in self._engines:
            return False  # no death of an engine is forgiven here, or it is none
        left = [one for one in self._engines if one != name and one not in self.retired and one not in resting]
        return len(left) + self._others >= self._min_serving
