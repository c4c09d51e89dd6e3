"""Wake every waiter, to look again. Costs next to nothing while nobody waits, which is the usual case under load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel


class Notifier:
    """Condition without a lock: a coroutine that found nothing to do waits, and looks again after ``notify``."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        """Let everyone who waits look again."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Wait for the next ``notify``. Between checking its condition and this call the caller must not await anything
        else."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


class SerialGate:
    """One operation after another at one end of a stream: each begins when ``ready`` says that it need not wait.

    ``changed`` waits until it is worth looking again. A caller that never has to wait yields to the event loop now and
    then: ``QUICK`` operations cost one turn of it instead of one each, and nobody is starved."""

    QUICK = 64

    def __init__(self, changed: Callable[[], Awaitable[None]]) -> None:
        self._changed = changed
        self._one = anyio.Lock(fast_acquire=True)
        self._quick = 0

    async def take(self, ready: Callable[[], bool]) -> None:
        """Wait for ``ready`` in the order of the calls. An exception of ``ready`` is raised here; cancelled, nothing
        has begun. The caller acts at once, before it awaits anything else."""
        self._quick += 1
        if self._quick >= self.QUICK:
            self._quick = 0
            await anyio.lowlevel.checkpoint()
        if self._one.locked() or not ready():  # otherwise nobody has to be waited for
            async with self._one:
                while not ready():
                    try:
                        await self._changed()
                    finally:
                        self._quick = 0  # the others had their turn
