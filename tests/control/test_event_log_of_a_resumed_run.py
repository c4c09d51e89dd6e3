"""The event log of a run with several lives: one log, without a gap and without what the journal does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_world import control_settings

from streamrl.control import events as on
from streamrl.control.actions import Explain
from streamrl.control.event_log import EventLog, LogEntry, read_log
from streamrl.errors import StreamRLError

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
