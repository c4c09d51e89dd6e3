"""How long the run waited for what, measured: the shell's side of ``wait_reason``."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.control.model import RunState
from streamrl.observe.report.wait_reason import ShellView, WaitReason, wait_reason


class RunWaits:
    """``shell``: what only the shell knows, now. Between two looks the run counts as waiting for what it waited for at
    the first of them: look whenever control has handled an event, and a few times a second."""

    def __init__(self, clock: Callable[[], float], shell: Callable[[], ShellView]) -> None:
        self._clock = clock
        self._shell = shell
        self._state: RunState | None = None
        self._reason = WaitReason.ENGINE_START
        self._since_s = self._looked_s = clock()
        self._seconds: dict[WaitReason, float] = {}

    def look(self, state: RunState | None = None) -> None:
        """Ask what the run waits for; of the state that was given last where there is none."""
        self._state = state or self._state
        now = self._clock()
        self._count(now)
        if self._state is None:
            return
        reason = wait_reason(self._state, self._shell())
        if reason is not self._reason:
            self._reason, self._since_s = reason, now

    def waits_for(self) -> tuple[WaitReason, float]:
        """What the run waits for, and for how many seconds."""
        return self._reason, max(self._clock() - self._since_s, 0.0)

    def take(self, now_s: float) -> dict[str, float]:
        """Shares of the time since the last call, as metrics; their sum is 1, or there are none where no time passed.
        ``now_s``: by the clock, the moment at which the time ends."""
        self._count(now_s)
        taken, self._seconds = self._seconds, {}
        total = sum(taken.values())
        return {f"util/wait_reason/{reason}": seconds / total for reason, seconds in taken.items()} if total else {}

    def _count(self, now_s: float) -> None:
        self._seconds[self._reason] = self._seconds.get(self._reason, 0.0) + now_s - self._looked_s
        self._looked_s = now_s
