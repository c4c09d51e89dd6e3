"""A child process for code that the caller must not import or wait for, such as user code, Hub downloads and a measured
training step. It has a time limit and is killed with all processes that it started. The dry run and the controller use
it; ``answer_parent`` runs in the child."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, BinaryIO, NamedTuple

from streamrl.base.run_process import die_with, end_session, last_line, start_session
from streamrl.base.types import TextMapping


class ThrowawayAnswer(NamedTuple):
    """Answer of the child process.

    ``written``: bytes that it wrote to its answers;
    ``failure``: failure that may have kept it from writing all, such as ``late`` or ``exit code 3, ImportError: x``
    (empty: it succeeded);
    ``late``: whether it reached its time limit;
    ``seconds``: time that it took."""

    written: bytes
    failure: str
    late: bool
    seconds: float


def run_throwaway(
    module: str, arguments: Sequence[str], timeout_s: float, *, variables: TextMapping | None = None
) -> ThrowawayAnswer:
    """Run ``python -m module TIMEOUT_S PARENT``, whose ``main`` must call ``answer_parent``. All processes of its
    process group have ended when this returns. ``arguments``: texts that the process reads from stdin, since they may
    be secrets (options of a reward) and every user of the host sees the arguments of a process; ``variables``:
    environment variables of the process (None: the caller's)."""
    with stdin_of(arguments) as stdin, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        started = time.monotonic()
        command = [sys.executable, "-P", "-m", module, str(timeout_s), str(os.getpid())]
        child = start_session(command, stdin=stdin, stdout=output, stderr=errors, env=variables)
        late = not end_session(child, timeout_s) or child.returncode == -signal.SIGALRM
        seconds = time.monotonic() - started
        output.seek(0)
        written = output.read()
        if late:
            return ThrowawayAnswer(written, "late", True, seconds)
        failure = ""
        if child.returncode:
            failure = ", ".join(filter(None, [f"exit code {child.returncode}", last_line(errors.fileno())]))
        return ThrowawayAnswer(written, failure, False, seconds)


@contextmanager
def stdin_of(arguments: Sequence[str]) -> Iterator[IO[bytes]]:
    """Yield the stdin of a process that calls ``answer_parent``: a file with ``arguments``."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(list(arguments)).encode())
        file.seek(0)
        yield file


def answer_parent(work: Callable[[BinaryIO, Sequence[str]], None]) -> None:
    """Run ``work(answers, arguments)`` in the child process, then end the process. ``answers``: file for the parent;
    all other output goes to stderr."""
    timeout_s, parent = sys.argv[1:]
    die_with(int(parent))
    with os.fdopen(os.dup(0), "rb") as arguments_file:
        arguments = json.load(arguments_file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # for code of the user that reads stdin
    # The default action of SIGALRM ends the process even while the interpreter lock is held, or the parent is dead.
    signal.alarm(math.ceil(float(timeout_s)) + 1)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    work(answers, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of the user's module must not keep this process
