"""The logs of the processes of a run: the supervisor shortens them, in the process of the command, while the processes
write them."""

from __future__ import annotations

import shutil
from logging import getLogger
from pathlib import Path
from time import monotonic

from anyio import to_thread

from streamrl.base.line_file import older

log = getLogger(__name__)

INTERVAL_S = 10.0


class LogFiles:
    """The logs in ``folder``, which together may have ``most_bytes``, and the same for their older parts."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._due_s = monotonic() + INTERVAL_S

    async def poll(self) -> None:
        """Shorten logs every ``INTERVAL_S``, in a thread: a file system that hangs must not block the supervisor, which
        renews the leases of hosts."""
        if monotonic() >= self._due_s:
            self._due_s = monotonic() + INTERVAL_S
            try:
                await to_thread.run_sync(self.shorten, abandon_on_cancel=True)
            except OSError as error:
                log.warning("logs were not shortened: %s", error)

    def shorten(self) -> None:
        """Copy the end of each log that is too large to ``older-NAME``, which is replaced, and empty the log: its
        process goes on writing into the same file. Lines written between the copy and the emptying are lost. Raises
        ``OSError``."""
        logs = [path for path in self._folder.glob("*.log") if not path.name.startswith("older-")]
        bytes_per_log = self._most_bytes // max(len(logs), 1)
        for path in logs:
            if path.stat().st_size > bytes_per_log:
                with path.open("r+b") as source, older(path).open("wb") as target:
                    source.seek(-bytes_per_log, 2)
                    source.readline()  # the end of a line
                    shutil.copyfileobj(source, target, 1 << 20)
                    source.truncate(0)
