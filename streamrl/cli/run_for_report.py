"""Runs the coroutine of a command whose stdout is a report: ``eval``, ``try`` and ``reward test``, in the command's own
process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from streamrl.base.printable import log_to
from streamrl.base.run_process import redirected

Result = TypeVar("Result")


def run_for_report(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run ``work()`` to its end and return its result. Warnings and output of engines go to stderr: stdout is the
    report. SIGTERM cancels the coroutine, as Ctrl-C does, so that child processes are ended in order."""
    log_to(sys.stderr, logging.WARNING, "%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work()

    with redirected(1, 2):  # only the report on stdout
        return asyncio.run(cancellable())
