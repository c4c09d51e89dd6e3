"""The small file in which a process leaves the reason of its end: ``exit/NAME.json`` in the directory of the run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from streamrl.base.atomic_files import write_atomic
from streamrl.base.errors import UNDECODABLE


class ExitKind(StrEnum):
    """Kind of an end: of itself, or because another process had ended. ``verdict``: it ended the run on purpose, and a
    successor would come to the same."""

    CAUSE = "cause"
    CONSEQUENCE = "consequence"
    VERDICT = "verdict"


class ExitReason(msgspec.Struct, frozen=True, kw_only=True):
    """Reason of its end that a process left behind. ``monotonic_s``: ``CLOCK_MONOTONIC`` of its host."""

    kind: ExitKind
    message: str
    monotonic_s: float


def write_reason(run_directory: Path, name: str, reason: ExitReason) -> None:
    """Leave ``exit/<name>.json`` for the supervisor; whole or not at all."""
    path = reason_path(run_directory, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(reason))


def read_reason(run_directory: Path, name: str) -> ExitReason | None:
    """Read the reason that the process wrote; None when it had no time to write, or it cannot be read."""
    try:
        return read_exit_reason(reason_path(run_directory, name).read_bytes())
    except OSError:
        return None


def read_exit_reason(encoded: bytes) -> ExitReason | None:
    """Decode the content of such a file; None for anything else."""
    try:
        return msgspec.json.decode(encoded, type=ExitReason)
    except UNDECODABLE:
        return None


def reason_path(run_directory: Path, name: str) -> Path:
    """Path of a process's exit reason."""
    return run_directory / "exit" / f"{name}.json"
