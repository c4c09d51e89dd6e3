"""How often a process that died is started again, and when. Pure."""

from __future__ import annotations

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Restarts:
    """``left``: how often. Before each start it pauses, twice as long as before the last one."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._pause_s = FIRST_PAUSE_S
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
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if now_s < self._due_s:
            return False
        self._due_s = None
        return True
