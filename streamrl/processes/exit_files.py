"""The exit file of a process, with the reason of its end: ``exit/NAME.json`` in the directory of the run.

A process writes it when it fails (``child``, ``watchdog``); ``exit_monitor`` reads it in the supervisor's process. On a
cluster, agents read it and ``remote`` writes it for the supervisor."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from streamrl.base.atomic_files import write_atomic
from streamrl.base.errors import UNDECODABLE


class ExitKind(StrEnum):
    """Kind of an end. ``cause``: own failure of the process; ``consequence``: failure after the end of another process;
    ``verdict``: failure that would also end a successor, and therefore ends the run."""

    CAUSE = "cause"
    CONSEQUENCE = "consequence"
    VERDICT = "verdict"


class ExitReason(msgspec.Struct, frozen=True, kw_only=True):
    """Reason of the end of a process. ``monotonic_s``: time of the end by ``CLOCK_MONOTONIC`` of the host."""

    kind: ExitKind
    message: str
    monotonic_s: float


def write_reason(run_directory: Path, name: str, reason: ExitReason) -> None:
    """Write ``exit/<name>.json`` for the supervisor, completely or not at all."""
    path = reason_path(run_directory, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(reason))


def read_reason(run_directory: Path, name: str) -> ExitReason | None:
    """Read the reason that process ``name`` wrote; None where there is none, or it cannot be read."""
    try:
        return read_exit_reason(reason_path(run_directory, name).read_bytes())
    except OSError:
        return None


def read_exit_reason(encoded: bytes) -> ExitReason | None:
    """Decode the content of an exit file; None for any other content."""
    try:
        return msgspec.json.decode(encoded, type=ExitReason)
    except UNDECODABLE:
        return None


def reason_path(run_directory: Path, name: str) -> Path:
    """Path of a process's exit reason."""
    return run_directory / "exit" / f"{name}.json"
