"""The versioned event log: what control was told, in order. From it the control state can be rebuilt.

One JSON object a line. The first is ``{"schema", "run_id", "settings"}``, every other ``{"n", "time_s", "event"}``:
``n`` counts from 0, ``time_s`` is since the start (for people and the simulator; control itself has no clock). Between
them, for people, ``{"decision", "time_s"}``: why control did what it did after the event before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from streamrl.control.actions import Explain
from streamrl.control.events import EVENT_SCHEMA, ControlEvent
from streamrl.control.settings import ControlSettings
from streamrl.control.state import ControlState
from streamrl.errors import StreamRLError


class LogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a log."""

    schema: int
    run_id: str
    settings: ControlSettings


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One event."""

    n: int
    time_s: float
    event: ControlEvent


class LogDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and its reason. Not needed to replay."""

    decision: Explain
    time_s: float


_DECISION = b'{"decision"'


class EventLog:
    """Appends events to ``path``. Lines are complete in the file before control acts on them."""

    def __init__(self, path: Path, run_id: str, settings: ControlSettings) -> None:
        self._file: IO[bytes] = path.open("wb", buffering=0)
        self._count = 0
        self._write(LogHeader(schema=EVENT_SCHEMA, run_id=run_id, settings=settings))

    def append(self, event: ControlEvent, time_s: float) -> None:
        """Write one event."""
        self._write(LogEntry(n=self._count, time_s=round(time_s, 4), event=event))
        self._count += 1

    def decided(self, decision: Explain, time_s: float) -> None:
        """Write why control decided as it did."""
        self._write(LogDecision(decision=decision, time_s=round(time_s, 4)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: LogHeader | LogEntry | LogDecision) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")


def read_log(path: Path) -> tuple[LogHeader, Iterator[LogEntry]]:
    """Header and entries of a log. Raises ``StreamRLError`` for another schema, a gap, or a damaged line.

    A last line without its newline (a killed run) is left out.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        raise StreamRLError(f"{path} is empty: not an event log")
    try:
        header = msgspec.json.decode(lines[0], type=LogHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StreamRLError(f"{path}: the first line is not the header of an event log: {error}") from error
    if header.schema != EVENT_SCHEMA:
        raise StreamRLError(f"{path}: event schema {header.schema}, this streamrl reads {EVENT_SCHEMA}")
    return header, _entries(path, lines[1:])


def _entries(path: Path, lines: list[bytes]) -> Iterator[LogEntry]:
    number = -1
    for place, line in enumerate(lines):
        if line.startswith(_DECISION):
            continue
        number += 1
        try:
            entry = msgspec.json.decode(line, type=LogEntry)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StreamRLError(f"{path}, line {place + 2}: not an event: {error}") from error
        if entry.n != number:
            raise StreamRLError(f"{path}, line {place + 2}: event {entry.n} where {number} is due")
        yield entry


def replay(path: Path, *, until: int | None = None) -> ControlState:
    """The control state after the first ``until`` events of a log (all of them by default)."""
    header, entries = read_log(path)
    state = ControlState(header.settings)
    for entry in entries:
        if until is not None and entry.n >= until:
            break
        state.handle(entry.event)
    return state
