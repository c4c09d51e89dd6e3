"""What SIGINT (Ctrl-C, which reaches every process of a terminal) and SIGTERM mean to the parent of a run."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable

import anyio

log = logging.getLogger(__name__)


async def obey_signals(drain: Callable[[], None], end_now: Callable[[], None]) -> None:
    """The first signal calls ``drain``, the second ``end_now`` and ends this coroutine; a child of the nursery.

    Outside of the main thread there are no signals to take, and it waits for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        await anyio.sleep_forever()
    draining = False
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            if draining:
                log.warning("%s again: ending at once", number.name)
                end_now()
                return
            log.warning("%s: finishing what is under way; once more to end at once", number.name)
            draining = True
            drain()
