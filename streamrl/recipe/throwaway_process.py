"""A process that runs what the caller may neither import nor wait for, and is killed with all that it started."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from streamrl.base.run_process import die_with


class ThrowawayAnswer(NamedTuple):
    """``failure``: why ``written`` may lack something, such as ``late`` or ``exit code 3, ImportError: x``; empty: the
    process ended well. ``seconds``: that it had."""

    written: bytes
    failure: str
    late: bool
    seconds: float


def run_throwaway(
    module: str, arguments: Sequence[str], timeout_s: float, *, environment: Mapping[str, str] | None = None
) -> ThrowawayAnswer:
    """Run ``python -m module TIMEOUT_S PARENT ARGUMENTS...``, whose ``main`` is to call ``answer_parent``. Nothing of
    its process group is left afterwards."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        started = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(timeout_s), str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            env=environment,
        )
        late = False
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        seconds = time.monotonic() - started
        output.seek(0)
        written = output.read()
        late = late or child.returncode == -signal.SIGALRM
        if late:
            return ThrowawayAnswer(written, "late", True, seconds)
        failure = f"exit code {child.returncode}{_last_line(errors)}" if child.returncode else ""
        return ThrowawayAnswer(written, failure, False, seconds)


def _last_line(errors: BinaryIO) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 4096))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f", {lines[-1][:200]}" if lines else ""


def answer_parent(work: Callable[[BinaryIO, Sequence[str]], None]) -> None:
    """Run ``work(answers, arguments)`` in the child process, then end it. Everything else that is printed goes to
    stderr."""
    timeout_s, parent, *arguments = sys.argv[1:]
    die_with(int(parent))
    # The default action of SIGALRM ends the process even while the interpreter lock is held, or the parent is dead.
    signal.alarm(math.ceil(float(timeout_s)) + 1)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    work(answers, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread that the user's module left behind must not keep this process
