"""Logs of the processes of a run, kept within a bound while the processes write them."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import anyio.to_thread

from streamrl.base.line_file import older

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


class LogFiles:
    """The logs in ``folder``, which together may have ``most_bytes``, and their older parts as much."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._due_s = time.monotonic() + INTERVAL_S

    async def poll(self) -> None:
        """Look at them now and then, in a thread: a file system that hangs must not keep the run from its hosts."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + INTERVAL_S
            try:
                await anyio.to_thread.run_sync(self.cut, abandon_on_cancel=True)
            except OSError as error:
                log.warning("logs were not cut: %s", error)

    def cut(self) -> None:
        """Copy the end of each that is too large to ``older-NAME``, in place of the one before, and empty it: a process
        goes on in the file that it has open. What is written between the two is lost. Raises ``OSError``."""
        logs = [path for path in self._folder.glob("*.log") if not path.name.startswith("older-")]
        most = self._most_bytes // max(len(logs), 1)
        for path in logs:
            if path.stat().st_size > most:
                with path.open("r+b") as source, older(path).open("wb") as target:
                    source.seek(-most, 2)
                    source.readline()  # a part of one
                    shutil.copyfileobj(source, target, 1 << 20)
                    source.truncate(0)
