"""Reasons of the ends of processes, their files ``exit/NAME.json`` in the directory of the run, and the first cause
among several deaths.

A process classifies its own error and writes its file (``run_role``, ``watchdog``); ``exit_monitor`` reads it in the
supervisor's process, which sorts and describes deaths. On a cluster, daemons read it, and ``remote_host`` writes it for
the supervisor."""

from __future__ import annotations

import errno
import signal
from asyncio import CancelledError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from signal import SIGKILL, SIGTERM
from time import monotonic

from anyio import BrokenResourceError
from msgspec import Struct, json

from streamrl.base import errors
from streamrl.base.atomic_files import write_atomic
from streamrl.base.errors import UNDECODABLE, EngineError, EpochLost, ModelRefused, RecipeError, StreamBroken, leaves
from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE, signal_name
from streamrl.recipe.topology import Role
from streamrl.recipe.user_code import LASTING_ERRORS

DISK_FULL_EXIT_CODE = 74
"""Exit code for a full disk, on which no exit file can be written. EX_IOERR of sysexits.h."""
TERMINATED_CODE = 128 + SIGTERM
_LONGEST_MESSAGE = 2000
_LASTING = (ModelRefused, RecipeError, EpochLost)
# Errors that a successor of the controller may not meet. Any other error (wrong input, a damaged journal, a bug) lasts.
_MAY_PASS = (StreamBroken, EngineError, OSError, MemoryError)
# No process ends by these signals because another process has died.
_NEVER_A_CONSEQUENCE = frozenset({SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


class ExitKind(StrEnum):
    """Kind of an end. ``cause``: own failure of the process; ``consequence``: failure after the end of another process;
    ``verdict``: failure that would also end a successor, and therefore ends the run."""

    CAUSE = "cause"
    CONSEQUENCE = "consequence"
    VERDICT = "verdict"


class ExitReason(Struct, frozen=True, kw_only=True):
    """Reason of the end of a process. ``monotonic_s``: time of the end by ``CLOCK_MONOTONIC`` of the host."""

    kind: ExitKind
    message: str
    monotonic_s: float


class Death(Struct, frozen=True, kw_only=True):
    """The end of a process. ``exit_code``: exit code, negative for a signal; None where it is unknown;
    ``detected_s``: monotonic time at which the end was noticed."""

    name: str
    exit_code: int | None
    detected_s: float
    reason: ExitReason | None = None

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: the first cause is the smallest. Fatal signals come first, then own failures by time, then
        consequences. The controller's comes first among consequences: its message names the process that failed, the
        messages of other processes name the controller."""
        time_s = self.reason.monotonic_s if self.reason else self.detected_s
        if self.exit_code is not None and -self.exit_code in _NEVER_A_CONSEQUENCE:
            return 0, time_s
        if self.reason and self.reason.kind is ExitKind.CONSEQUENCE:
            return 2 if self.name == Role.CONTROLLER.value else 3, time_s
        return 1, time_s

    @property
    def is_fatal(self) -> bool:
        """Return whether a restarted process would fail the same way."""
        return self.exit_code == DISK_FULL_EXIT_CODE or (
            self.reason is not None and self.reason.kind is ExitKind.VERDICT
        )

    @property
    def is_consequence(self) -> bool:
        """Return whether another process must have ended before this one."""
        return self.order[0] >= 2

    def describe(self) -> str:
        """One line, e.g. ``engine-0 was killed by SIGKILL``."""
        if self.exit_code is None:
            text = f"{self.name} is gone"
        elif self.exit_code < 0:
            text = f"{self.name} was killed by {signal_name(-self.exit_code)}"
        else:
            text = f"{self.name} ended with exit code {self.exit_code}"
            if self.exit_code == DISK_FULL_EXIT_CODE:
                text += " because the disk is full (free space, then resume the run: what it acknowledged is kept)"
            if self.exit_code == REWARD_RESTART_EXIT_CODE:
                text += " (it asked to be replaced, and no restarts are left)"
        return f"{text}: {self.reason.message}" if self.reason else text


def first_cause(deaths: Iterable[Death]) -> Death:
    """The death that caused the others. ``deaths`` is not empty."""
    return min(deaths, key=lambda death: death.order)


def reason_of(role: Role, error: BaseException) -> ExitReason:
    """Classify the exception that ended a process of ``role``; a group is reduced to its first cause."""
    leaf_errors = list(failures(error)) or [error]
    causes = [leaf for leaf in leaf_errors if not _is_consequence(role, leaf)]
    reported = causes[0] if causes else leaf_errors[0]
    kind = ExitKind.CAUSE if causes else ExitKind.CONSEQUENCE
    lasts = not isinstance(reported, _MAY_PASS) if role is Role.CONTROLLER else isinstance(reported, _LASTING)
    if role in (Role.REWARD, Role.ENVIRONMENT):
        lasts = lasts and isinstance(reported.__cause__, LASTING_ERRORS)
    if causes and lasts:
        kind = ExitKind.VERDICT
    text = f"{type(reported).__name__}: {reported}" if str(reported) else type(reported).__name__
    return ExitReason(kind=kind, message=text[:_LONGEST_MESSAGE], monotonic_s=monotonic())


def exit_code_of(error: BaseException) -> int:
    """Exit code for the exception that ended a process: the code of a ``SystemExit``, of a full disk, or 1."""
    for leaf in failures(error):
        cause: BaseException | None = leaf
        while cause is not None:
            if getattr(cause, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
                return DISK_FULL_EXIT_CODE
            cause = cause.__cause__
        if isinstance(leaf, SystemExit):
            return leaf.code if isinstance(leaf.code, int) else int(leaf.code is not None)
    return 1


def last_lines(path: Path, *, start: int = 0, lines: int = 20) -> list[str]:
    """The last ``lines`` lines of a log written after byte ``start``."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, 2)
            first_byte = start if start <= end else 0  # the log may have been emptied since
            log.seek(max(first_byte, end - 16_384))
            return log.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def notice_of(deaths: Sequence[Death], logs: Mapping[str, tuple[Path, int]], log_directory: Path) -> str:
    """Describe deaths for people: the first cause, its consequences, and the last lines of its log. ``logs``: log of
    each process, and the byte at which this process began to write."""
    first = first_cause(deaths)
    later_names = sorted({death.name for death in deaths if death.name != first.name})
    text = [first.describe()]
    if later_names:
        text.append(f"(after it: {', '.join(later_names)})")
    if first.name in logs:
        path, start = logs[first.name]
        if _is_message_enough(first):
            text.append(f"its log is {path}")
        else:
            tail = last_lines(path, start=start)
            text.append(f"last lines of {path}:" if tail else f"it logged nothing to {path}")
            text += [f"  {line}" for line in tail]
    else:
        text.append(f"logs are in {log_directory}")
    return "\n".join(text)


def _is_message_enough(death: Death) -> bool:
    """Return whether a process ended by an error whose message is for people: a traceback would only hide it."""
    if death.reason is None or not death.is_fatal:
        return False
    return isinstance(getattr(errors, death.reason.message.partition(":")[0], None), type)


def failures(error: BaseException) -> Iterator[BaseException]:
    """The error itself, or all errors of a group, without cancellations."""
    return (leaf for leaf in leaves(error) if not isinstance(leaf, CancelledError))


def _is_consequence(role: Role, error: BaseException) -> bool:
    # In an engine process an EngineError concerns its own vLLM; in the controller it concerns a process that ended.
    # A memory stream breaks when the task at its other end has failed.
    return isinstance(error, StreamBroken | BrokenResourceError) or (
        role is Role.CONTROLLER and isinstance(error, EngineError)
    )


def write_reason(run_directory: Path, name: str, reason: ExitReason) -> None:
    """Write ``exit/<name>.json`` for the supervisor, completely or not at all."""
    path = reason_path(run_directory, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.encode(reason))


def read_reason(run_directory: Path, name: str) -> ExitReason | None:
    """Read the reason that process ``name`` wrote; None where there is none, or it cannot be read."""
    try:
        return read_exit_reason(reason_path(run_directory, name).read_bytes())
    except OSError:
        return None


def read_exit_reason(encoded: bytes) -> ExitReason | None:
    """Decode the content of an exit file; None for any other content."""
    try:
        return json.decode(encoded, type=ExitReason)
    except UNDECODABLE:
        return None


def reason_path(run_directory: Path, name: str) -> Path:
    """Path of a process's exit reason."""
    return run_directory / "exit" / f"{name}.json"
