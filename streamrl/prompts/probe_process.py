"""A throw-away process that imports the user's code, so that whoever checks a recipe neither does nor waits for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence


def answer_of(module: str, arguments: Sequence[str], timeout_s: float) -> tuple[bytes, int] | None:
    """What ``python -m module`` wrote, and its exit code; None where it was late. Nothing of its group is left."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            start_new_session=True,
        )
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        return None if child.returncode == -signal.SIGALRM else (output.read(), child.returncode)
