"""Runs the coroutine of a command whose stdout is a report: ``eval``, ``try`` and ``reward test``, in the command's own
process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from streamrl.base.printable import log_to

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

    with _only_the_report_on_stdout():
        return asyncio.run(cancellable())


@contextlib.contextmanager
def _only_the_report_on_stdout() -> Iterator[None]:
    """Redirect stdout to stderr for the block: vLLM logs to stdout, in several processes."""
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)
