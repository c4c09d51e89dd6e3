"""One supervisor for one run directory at a time: the lock of a process that was killed is free."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from streamrl.base.errors import RecipeError

LOCK_FILE = "lock"


class RunLock:
    """Held until ``release``, or until this process ends, however it ends."""

    def __init__(self, run_directory: Path) -> None:
        """Raises ``RecipeError`` while another process runs this run."""
        path = run_directory / LOCK_FILE
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise RecipeError(
                [f"{run_directory} runs already (process {holder}): drain or end that one first"]
            ) from None
        except BaseException:  # of a full disk, too: nobody has this lock to let it go
            self.release()
            raise

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
