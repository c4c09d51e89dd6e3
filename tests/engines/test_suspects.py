"""Who is blamed for the death of an engine, and who only stood by; and when an engine is taken for dead."""

from __future__ import annotations

import pytest

from streamrl.engines.progress_watch import ProgressWatch
from streamrl.engines.suspects import TRIAL_S, Suspects


def test_of_many_only_the_one_that_was_just_sent_is_blamed() -> None:
    suspects, engine = Suspects(3), object()
    for now in (0.0, 1.0):
        assert [suspects.died(whole, engine, now) for whole in "abc"] == [0, 0, 0]
    assert suspects.wait_s("a", 2.0) == 0.0
    suspects.sent("a", engine, 2.0)
    assert suspects.wait_s("a", 2.0) == 0.0, "its own next part need not wait for it"
    assert suspects.wait_s("b", 2.25) == TRIAL_S - 0.25 and suspects.wait_s("new", 2.25) == 0.0
    suspects.answered("a", complete=True)
    assert suspects.wait_s("b", 2.25) == 0.0
    suspects.sent("b", engine, 3.0)
    assert [suspects.died(whole, engine, 3.5) for whole in ("new", "b", "c")] == [0, 3, 0]
    assert suspects.wait_s("c", 3.6) > 0.0
    suspects.sent("c", engine, 5.0)
    assert suspects.died("new", object(), 5.5) == 0, "of another engine it is one of all"
    assert suspects.died("c", engine, 5.0 + TRIAL_S) == 3, "later it is one of all that were there"


def test_a_completion_that_is_there_is_forgotten() -> None:
    suspects = Suspects(2)
    assert suspects.died("a", object(), 0.0) == 0
    suspects.answered("a", complete=False)
    suspects.answered("b", complete=True)
    assert suspects.died("a", object(), 9.0) == 2
    suspects.answered("a", complete=True)
    assert suspects.died("a", object(), 19.0) == 0


def test_a_limit_of_none_blames_nobody() -> None:
    suspects = Suspects(0)
    assert {suspects.died("a", object(), float(now)) for now in range(9)} == {0}
    assert suspects.wait_s("a", 9.0) == 0.0


@pytest.mark.parametrize("slower", [1, 10, 100])
def test_a_slow_engine_is_never_taken_for_dead(slower: int) -> None:
    """A step of 50 ms, ten and a hundred times as long; it reports as seldom as its host has time for that."""
    watch, tokens, heard = ProgressWatch(silent_s=30, stalled_s=120), 0, 0
    for look in range(4000):
        now = look * 0.5
        tokens = int(now / (0.05 * slower))
        heard = int(now / (0.2 * slower))
        assert watch.look(now, heard=heard, progress=(tokens,), owes=True) == ""


def test_what_a_looker_missed_because_it_was_held_up_itself_counts_for_little() -> None:
    watch = ProgressWatch(silent_s=30, stalled_s=120)
    assert [watch.look(now, heard=1, progress=(1,), owes=True) for now in (0.0, 600.0, 1200.0)] == ["", "", ""]


@pytest.mark.parametrize(
    ("heard", "owes", "says"), [(0, False, "nothing was heard"), (1, True, "none of its requests")]
)
def test_an_engine_that_is_silent_or_gets_nowhere_is_taken_for_dead(heard: int, owes: bool, says: str) -> None:
    watch = ProgressWatch(silent_s=30, stalled_s=120)
    found = [watch.look(look * 0.5, heard=heard * look, progress=(7,), owes=owes) for look in range(300)]
    first = next(index for index, reason in enumerate(found) if reason)
    assert says in found[first] and first * 0.5 == pytest.approx(120 if owes else 30, abs=1.0)


def test_an_engine_that_owes_nothing_may_stand_still() -> None:
    watch = ProgressWatch(silent_s=30, stalled_s=120)
    assert not any(watch.look(look * 0.5, heard=look, progress=(7,), owes=False) for look in range(1000))
