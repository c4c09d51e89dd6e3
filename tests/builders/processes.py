"""Processes that tests watch."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import psutil


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Return once ``condition`` holds; pytest's timeout ends a wait for nothing."""
    while not condition():
        await anyio.sleep(0.01)
