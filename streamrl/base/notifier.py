"""Waiting coroutines of one event loop: a condition that wakes every waiter, and a gate for one operation at a time.
The streams (``comm``) and the stages of the controller use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from anyio import Event, Lock
from anyio.lowlevel import checkpoint


class Notifier:
    """Condition without a lock: a coroutine waits, and checks its own condition again after ``notify``. Costs next to
    nothing while nobody waits, which is the usual case under load."""

    def __init__(self) -> None:
        self._event: Event | None = None

    def notify(self) -> None:
        """Wake all waiting coroutines."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Wait for the next ``notify``. The caller must not await anything else between the check of its condition and
        this call."""
        if self._event is None:
            self._event = Event()
        await self._event.wait()


class SerialGate:
    """Admits one operation at a time at one end of a stream, in the order of the calls of ``take``.

    ``changed``: coroutine function that returns when the condition of an operation should be checked again.

    An operation that need not wait does not yield to the event loop, except each ``QUICK``-th one, so that many quick
    operations cost little and other coroutines are not starved."""

    QUICK = 64

    def __init__(self, changed: Callable[[], Awaitable[None]]) -> None:
        self._changed = changed
        self._lock = Lock(fast_acquire=True)
        self._quick = 0

    async def take(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready`` returns True, in the order of the calls. Raises the exceptions of ``ready``. The caller
        must begin its operation before it awaits anything else."""
        self._quick += 1
        if self._quick >= self.QUICK:
            self._quick = 0
            await checkpoint()
        if self._lock.locked() or not ready():  # otherwise the operation begins at once
            async with self._lock:
                while not ready():
                    try:
                        await self._changed()
                    finally:
                        self._quick = 0  # other coroutines ran meanwhile
