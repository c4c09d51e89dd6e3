"""How often processes that died are started again, and when. Pure."""

from __future__ import annotations

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
SETTLED_AFTER_S = 5.0
"""Who lived so long did not die of being started: pauses, which are for those, begin anew. The budget does not."""
RENEWED_AFTER_S = 600.0
"""Who served so long did not die of what its predecessors died of: the budget counts anew."""


class Restarts:
    """``left``: how often. Before each start it pauses, twice as long as before the last one, unless that one lived for
    long; not before the first where ``at_once``."""

    def __init__(self, left: int, *, at_once: bool = False) -> None:
        self.left = self._budget = left
        self._at_once = at_once
        self._pause_s = 0.0 if at_once else FIRST_PAUSE_S
        self._due_s: float | None = None

    @property
    def forgive(self) -> bool:
        """Whether its death is none of the run: it is about to be started again."""
        return self.left > 0 or self._due_s is not None

    def due(self, now_s: float) -> bool:
        """Whether to start it now. Ask while it is dead; the first time begins the pause."""
        if self._due_s is None:
            if not self.left:
                return False
            self.left -= 1
            self._due_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        if now_s < self._due_s:
            return False
        self._due_s = None
        return True

    def served(self, seconds: float) -> None:
        """Who died had lived so long."""
        if self._due_s is not None:
            return
        if seconds >= RENEWED_AFTER_S:
            self.left = self._budget
        if seconds >= SETTLED_AFTER_S:
            self._pause_s = 0.0 if self._at_once else FIRST_PAUSE_S

    def forget(self) -> None:
        """It is not to be started any more, but when somebody orders it."""
        self._due_s = None
