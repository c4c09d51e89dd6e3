"""Reasons of processes' ends, and the first cause among several deaths. Pure, but for reading the ends of logs."""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from streamrl.base import errors
from streamrl.base.errors import EngineError, EpochLost, ModelRefused, RecipeError, StreamBroken, leaves
from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE, signal_name
from streamrl.processes.exit_files import ExitKind, ExitReason
from streamrl.recipe.topology import Role

DISK_FULL_EXIT_CODE = 74
"""No room on the disk, where no reason can be left either. EX_IOERR of sysexits.h."""
TERMINATED_CODE = 128 + signal.SIGTERM
_LONGEST_MESSAGE = 2000
_LASTING = (ModelRefused, RecipeError, EpochLost)
_MAY_PASS = (StreamBroken, EngineError, OSError, MemoryError)
# Whatever else a controller fails with, wrong input, a damaged journal, a bug of ours, its successor would meet again.
# Never a way in which a process answers the death of another one.
_NEVER_A_CONSEQUENCE = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A process that ended. ``exit_code`` is negative for a signal; None: unknown (not a child of the supervisor)."""

    name: str
    exit_code: int | None
    detected_s: float
    reason: ExitReason | None = None

    @property
    def order(self) -> tuple[int, float]:
        """Sort key: the first cause is the smallest. Fatal signals, then own failures by time, then consequences. Of
        consequences the controller's comes first: it names the part that failed; the others name the controller."""
        when = self.reason.monotonic_s if self.reason else self.detected_s
        if self.exit_code is not None and -self.exit_code in _NEVER_A_CONSEQUENCE:
            return 0, when
        if self.reason and self.reason.kind is ExitKind.CONSEQUENCE:
            return 2 if self.name == Role.CONTROLLER.value else 3, when
        return 1, when

    @property
    def is_fatal(self) -> bool:
        """Return whether a restarted process would fail the same way."""
        return self.exit_code == DISK_FULL_EXIT_CODE or (
            self.reason is not None and self.reason.kind is ExitKind.VERDICT
        )

    @property
    def is_consequence(self) -> bool:
        """Some other process must have ended before it."""
        return self.order[0] >= 2

    def describe(self) -> str:
        """One line, e.g. ``engine-0 was killed by SIGKILL``."""
        if self.exit_code is None:
            how = f"{self.name} is gone"
        elif self.exit_code < 0:
            how = f"{self.name} was killed by {signal_name(-self.exit_code)}"
        else:
            how = f"{self.name} ended with exit code {self.exit_code}"
            if self.exit_code == DISK_FULL_EXIT_CODE:
                how += " because the disk is full (free space, then resume the run: what it acknowledged is kept)"
            if self.exit_code == REWARD_RESTART_EXIT_CODE:
                how += " (it asked to be replaced, and no restarts are left)"
        return f"{how}: {self.reason.message}" if self.reason else how


def first_cause(deaths: Iterable[Death]) -> Death:
    """The death that the others followed from. ``deaths`` is not empty."""
    return min(deaths, key=lambda death: death.order)


def reason_of(role: Role, error: BaseException) -> ExitReason:
    """Classify the exception that ended a process of ``role``; groups are reduced to the leaf that tells most."""
    found = list(failures(error)) or [error]
    causes = [leaf for leaf in found if not _is_consequence(role, leaf)]
    reported = causes[0] if causes else found[0]
    kind = ExitKind.CAUSE if causes else ExitKind.CONSEQUENCE
    lasts = not isinstance(reported, _MAY_PASS) if role is Role.CONTROLLER else isinstance(reported, _LASTING)
    if causes and lasts and role not in (Role.REWARD, Role.ENVIRONMENT):
        kind = ExitKind.VERDICT
    text = f"{type(reported).__name__}: {reported}" if str(reported) else type(reported).__name__
    return ExitReason(kind=kind, message=text[:_LONGEST_MESSAGE], monotonic_s=time.monotonic())


def exit_code_of(error: BaseException) -> int:
    """Exit code for the exception that ended a process: that of a ``SystemExit``, of a full disk, or 1."""
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
            log.seek(max(start if start <= end else 0, end - 16_384))  # it may have been emptied since
            return log.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def notice_of(deaths: Sequence[Death], logs: Mapping[str, tuple[Path, int]], log_directory: Path) -> str:
    """Describe deaths for people: the first cause, what followed from it, and the last that it logged. ``logs``: the
    log of each process, and the byte at which that process began to write."""
    first = first_cause(deaths)
    others = sorted({death.name for death in deaths if death.name != first.name})
    text = [first.describe()]
    if others:
        text.append(f"(after it: {', '.join(others)})")
    if first.name in logs:
        path, start = logs[first.name]
        if _says_all(first):
            text.append(f"its log is {path}")
        else:
            tail = last_lines(path, start=start)
            text.append(f"last lines of {path}:" if tail else f"it logged nothing to {path}")
            text += [f"  {line}" for line in tail]
    else:
        text.append(f"logs are in {log_directory}")
    return "\n".join(text)


def _says_all(death: Death) -> bool:
    """Return whether it ended by an error whose message is for people: a traceback below that would only hide it."""
    if death.reason is None or not death.is_fatal:
        return False
    return isinstance(getattr(errors, death.reason.message.partition(":")[0], None), type)


def failures(error: BaseException) -> Iterator[BaseException]:
    """The error itself, or all in a group, but for those of being cancelled."""
    return (leaf for leaf in leaves(error) if not isinstance(leaf, asyncio.CancelledError))


def _is_consequence(role: Role, error: BaseException) -> bool:
    # In an engine host an EngineError is about its own vLLM; in the controller it is about a host that ended.
    return isinstance(error, StreamBroken) or (role is Role.CONTROLLER and isinstance(error, EngineError))
