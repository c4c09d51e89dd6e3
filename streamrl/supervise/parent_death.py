"""Dying with the parent. Standard library only: it runs before anything heavy is imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID = "STREAMRL_PARENT_PID"
RUN_MARKER = "STREAMRL_RUN_MARKER"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent named in ``STREAMRL_PARENT_PID`` dies. Without the variable: nothing.

    It is done by the child itself and not by ``preexec_fn``, which can deadlock in a parent that has threads. The
    signal follows the parent's *thread* that started this process, so the supervisor starts processes only from the
    thread of its event loop. Elsewhere than on Linux the guardian alone ends orphans.
    """
    expected = os.environ.get(PARENT_PID)
    if expected is None or sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the call: then no signal will ever come.
    if os.getppid() != int(expected):
        os._exit(1)
