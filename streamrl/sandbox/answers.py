"""What the processes of the sandbox say, taken apart: none of it is trusted. Pure."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from streamrl.base.errors import UNDECODABLE, StreamRLError


class SandboxError(StreamRLError):
    """The sandbox could not run the code: no verdict, and no reward."""


class Verdict(msgspec.Struct, frozen=True):
    """What the judge's process wrote. ``inside``: the test ran in the code's process, by whose word it passed."""

    nonce: str
    verdict: str
    message: str
    inside: bool = False


class ZygoteMessage(msgspec.Struct, frozen=True):
    """How the processes of ``run`` ended, by what they were; a greeting where that is None: which layers hold, and why
    others are missing."""

    run: int | None = None
    reports: dict[str, dict[str, Any]] = {}
    layers: tuple[str, ...] = ()
    missing: dict[str, str] = {}


_REPORTED: dict[str, type | tuple[type, ...]] = {"status": int, "seconds": (int, float), "cpu_seconds": (int, float)}


def read_verdict(content: bytes, nonce: str) -> Verdict | None:
    """The verdict that a file holds, if whoever wrote it knew the nonce."""
    try:
        written = msgspec.json.decode(content, type=Verdict)
    except UNDECODABLE:
        return None
    return written if secrets.compare_digest(written.nonce.encode(), nonce.encode()) else None


def read_zygote_message(content: bytes) -> ZygoteMessage:
    """Its greeting, or how a run ended. Raises ``SandboxError`` for anything else."""
    try:
        message = msgspec.json.decode(content, type=ZygoteMessage)
    except UNDECODABLE as error:
        raise SandboxError(f"the sandbox says what is no message of it: {error}") from error
    if message.run is None:
        return message
    report = message.reports.get("code", {})
    whole = all(isinstance(report.get(field), kind) for field, kind in _REPORTED.items()) and "killed_for" in report
    if not whole and "error" not in report:  # of this run only: others go on
        problem = {"error": f"its report does not say how it ended, only {', '.join(map(repr, report)) or 'nothing'}"}
        return msgspec.structs.replace(message, reports=message.reports | {"code": problem})
    return message
