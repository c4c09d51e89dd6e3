"""Processes that stand by, of roles that import for seconds: the supervisor's side of ``stand_by``."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from streamrl.config.topology import Role, Topology
from streamrl.processes.child_process import ChildProcess

log = logging.getLogger(__name__)

QUIET_S = 5.0
IMPORTING_S = {Role.ENGINE: 30.0, Role.TRAINER: 8.0}
"""Whoever was just started needs the cores more than one that will only wait: what is left of so long on two cores."""
_ATTEMPTS = 3


class Standbys:
    """``open_one`` starts a process that stands by for a role. One that dies while it waits, or cannot be started, is
    nobody's death: it is said, and after three of a role there are no more."""

    def __init__(self, topology: Topology, open_one: Callable[[Role], ChildProcess]) -> None:
        self._open = open_one
        self._wanted = Counter(topology.standby)
        self._attempts = dict.fromkeys(topology.standby, _ATTEMPTS)
        self._waiting: defaultdict[Role, list[ChildProcess]] = defaultdict(list)
        self._due_s = time.monotonic() + topology.standby_after_s

    @property
    def children(self) -> list[ChildProcess]:
        """Those that wait now."""
        return [child for waiting in self._waiting.values() for child in waiting]

    def replenish(self) -> None:
        """Start those that are missing, when it is time."""
        for role, waiting in self._waiting.items():
            for child in [child for child in waiting if not child.running]:
                waiting.remove(child)
                self._lost(role, child)
        if time.monotonic() < self._due_s:
            return
        for role in self._wanted - Counter({role: len(waiting) for role, waiting in self._waiting.items()}):
            if self._attempts[role] <= 0:
                continue
            try:
                self._waiting[role].append(self._open(role))
            except OSError as error:
                self._attempts[role] -= 1
                log.warning("no process can stand by for the role %s now: %s", role.value, error)
                self._rest(QUIET_S)

    def take(self, role: Role) -> ChildProcess | None:
        """One that becomes a process of ``role``; None where none waits. Ask whenever one is started."""
        waiting = self._waiting[role]
        child = waiting.pop(0) if waiting else None
        if child is not None and not child.running:
            self._lost(role, child)
            child = None
        self._rest(max(QUIET_S, IMPORTING_S.get(role, 0.0) - (child.lived_s if child is not None else 0.0)))
        return child

    def _lost(self, role: Role, child: ChildProcess) -> None:
        self._attempts[role] -= 1
        log.warning("%s ended with exit code %s while it waited; see %s", child.name, child.exit_code, child.log)
        child.close()

    def _rest(self, seconds: float) -> None:
        self._due_s = max(self._due_s, time.monotonic() + seconds)
