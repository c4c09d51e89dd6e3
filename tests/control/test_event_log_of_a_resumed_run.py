"""The event log of a run with several lives: one log, without a gap and without what the journal does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_world import control_settings

from streamrl.base.errors import StreamRLError
from streamrl.control import events as on
from streamrl.control.actions import Explain
from streamrl.journal.event_log import EventLog, LogEntry, read_log

EVENTS = [on.RunBegan(), *(on.PromptsDrawn(prompt_ids=(f"p{n}",)) for n in range(5))]


def first_life(path: Path, events: int) -> list[LogEntry]:
    log = EventLog(path, "run", control_settings())
    for number, event in enumerate(EVENTS[:events]):
        log.append(event, float(number))
        log.decided(Explain(subject="s", reason=f"r{number}"), float(number))
    log.close()
    return [LogEntry(n=n, time_s=float(n), event=event) for n, event in enumerate(EVENTS)]


def second_life(path: Path, told: list[LogEntry], count: int) -> list[str]:
    log = EventLog.going_on(path, "run", control_settings(), told, count)
    log.append(on.StopRequested(reason="drained"), 9.0)
    log.close()
    return [type(e.event).__name__ + str(getattr(e.event, "prompt_ids", "")) for e in read_log(path)[1]]


@pytest.mark.parametrize("known", [2, 4, 6])
@pytest.mark.parametrize("written", [2, 4, 6])
@pytest.mark.parametrize("since_base", [0, 1])
def test_the_journal_says_what_was_told(written: int, known: int, since_base: int, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    told = first_life(path, written)[:known]
    events = second_life(path, told[since_base:], known)
    expected = [type(e).__name__ + str(getattr(e, "prompt_ids", "")) for e in EVENTS[:known]]
    assert events == [*expected, "StopRequested"]


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_line_is_written_again(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    told = first_life(path, 4)[:4]
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(second_life(path, told, 4)) == 5


def test_a_gap_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    told = first_life(path, 2)
    with pytest.raises(StreamRLError, match="has 2 events, the journal goes on from 4"):
        EventLog.going_on(path, "run", control_settings(), told[4:6], 6)


def test_a_log_that_is_gone_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    told = first_life(path, 3)[:3]
    path.unlink()
    assert len(second_life(path, told, 3)) == 4


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    """Its beginning may be large: numbers say how many events there are, nobody counts them."""
    path = tmp_path / "events.jsonl"
    told = first_life(path, 6)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"what nobody reads", *lines[5:]]))
    EventLog.going_on(path, "run", control_settings(), told[5:6], 6).close()
    assert path.read_bytes().split(b"\n")[2:] == lines[5:]


@pytest.mark.parametrize("tail", [bytes(4096), bytes(100) + b"\n", b'{"n":4,"time_s"\n' + bytes(50) + b"\n"])
def test_what_a_power_cut_left_at_the_end_is_no_event(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    told = first_life(path, 4)[:4]
    with path.open("ab") as file:
        file.write(tail)
    assert len(second_life(path, told, 4)) == 5
