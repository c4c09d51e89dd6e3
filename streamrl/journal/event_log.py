"""The versioned event log: what control was told, in order. From it the control state can be rebuilt.

One JSON object a line. The first is ``{"schema", "run_id", "settings"}``, every other one ``{"n", "time_s", "event"}``:
``n`` counts from 0, ``time_s`` is since the start (for people and the simulator; control itself has no clock). Between
them, for people, ``{"decision", "time_s"}``: why control did what it did after the event before.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Self

import msgspec

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.whole_files import append_whole
from streamrl.control.actions import Explain
from streamrl.control.events import EVENT_SCHEMA, ControlEvent
from streamrl.control.settings import ControlSettings
from streamrl.control.state import ControlState


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


class _Numbered(msgspec.Struct, frozen=True):
    """As much of a ``LogEntry`` as says which one it is."""

    n: int


_DECISION = b'{"decision"'


class EventLog:
    """Appends events to ``path``. Lines are complete in the file before control acts on them: one that the disk does
    not take whole is not there, and ``OSError`` is raised."""

    def __init__(self, path: Path, run_id: str, settings: ControlSettings) -> None:
        self._file: IO[bytes] = path.open("wb", buffering=0)
        self._count = 0
        self._write(LogHeader(schema=EVENT_SCHEMA, run_id=run_id, settings=settings))

    @classmethod
    def going_on(cls, path: Path, run_id: str, settings: ControlSettings, told: Sequence[LogEntry], count: int) -> Self:
        """Of a run that an earlier life began: ``count`` events are known to have been told, ``told`` are the last of
        them. What the file has beyond them is cut off; what it lacks of them is written.

        Raises ``StreamRLError`` where events are missing that are not among ``told``.
        """
        found = _cut_after(path, count) if path.exists() else -1
        first = count - len(told)
        if max(found, 0) < first:
            raise StreamRLError(f"{path} has {max(found, 0)} events, the journal goes on from {first}: some are gone")
        if found < 0:
            log = cls(path, run_id, settings)
            found = 0
        else:
            log = cls.__new__(cls)
            log._file = path.open("ab", buffering=0)
        log._count = found
        for entry in told[found - first :]:
            log.append(entry.event, entry.time_s)
        return log

    def append(self, event: ControlEvent, time_s: float) -> None:
        """Write one event."""
        self._write(LogEntry(n=self._count, time_s=round(time_s, 4), event=event))
        self._count += 1

    def decided(self, decision: Explain, time_s: float) -> None:
        """Write why control decided as it did."""
        self._write(LogDecision(decision=decision, time_s=round(time_s, 4)))

    def flush(self) -> None:
        """Bring it to the disk. Blocking."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: LogHeader | LogEntry | LogDecision) -> None:
        append_whole(self._file, msgspec.json.encode(line) + b"\n")


def _cut_after(path: Path, count: int) -> int:
    """Leave the header and the first ``count`` events, with what was decided after each. How many there are; -1: not
    even a header. From its end on: the log of a run of days is long, and its controller is to be back in seconds."""
    if not path.stat().st_size:
        return -1
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            last, end = -1, text.rfind(b"\n") + 1
            place = end
            while place and last < 0:
                begin = text.rfind(b"\n", 0, place - 1) + 1
                if text[begin : begin + len(_DECISION)] != _DECISION:
                    known = _events_with(text[begin:place]) if begin else 0
                    if known is None or known > count:
                        end = begin
                    else:
                        last = known
                place = begin
        file.truncate(end)
    return last


def _events_with(line: bytes) -> int | None:
    """How many events there are up to and with this line; None for one that a power cut left damaged."""
    try:
        return msgspec.json.decode(line, type=_Numbered).n + 1
    except UNDECODABLE:
        return None


def read_log(path: Path) -> tuple[LogHeader, Iterator[LogEntry]]:
    """Header and entries of a log. Raises ``StreamRLError`` for another schema, a gap, or a damaged line.

    A last line without its newline (a killed run) is left out.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        raise StreamRLError(f"{path} is empty: not an event log")
    try:
        header = msgspec.json.decode(lines[0], type=LogHeader)
    except UNDECODABLE as error:
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
        except UNDECODABLE as error:
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
