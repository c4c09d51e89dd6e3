"""Telling whoever waits to look again. Costs next to nothing while nobody waits, which is the usual case under load."""

from __future__ import annotations

import anyio


class Wakeup:
    """Condition without a lock: a coroutine that found nothing to do waits, and looks again after ``notify``."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        """Let everyone who waits look again."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Until the next ``notify``. Between looking and waiting the caller must not wait for anything else."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


class Turns:
    """When a coroutine that never has to wait should let the event loop turn: whatever is always ready would starve
    all others. ``QUICK`` operations cost one turn of the loop instead of one each."""

    QUICK = 64

    def __init__(self) -> None:
        self._quick = 0

    def due(self) -> bool:
        """Counts an operation that may be over at once. True: let the loop turn before it, so that whoever is
        cancelled meanwhile has not begun."""
        self._quick += 1
        if self._quick < self.QUICK:
            return False
        self._quick = 0
        return True

    def waited(self) -> None:
        """The operation had to wait, so others had their turn."""
        self._quick = 0
