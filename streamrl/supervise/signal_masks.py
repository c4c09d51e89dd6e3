"""What the kernel says about the signals of a process (Linux): those that wait for it, and those it catches."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Literal

Mask = Literal["SigPnd", "ShdPnd", "SigCgt"]
"""Fields of ``/proc/PID/status``, see proc(5): pending for the thread, for the process, and caught by a handler."""


def in_mask(pid: int, number: signal.Signals, *masks: Mask) -> bool:
    """Whether the signal is in one of the masks of ``pid``. Raises ``OSError``: no such process, or not Linux."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = [int(line.split()[1], 16) for line in status.splitlines() if line.partition(":")[0] in masks]
    return any(mask >> (number - 1) & 1 for mask in found)
