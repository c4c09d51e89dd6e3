"""When an engine is taken for dead."""

from __future__ import annotations

import pytest

from streamrl.engines.elastic.engine_processes import ProgressWatch
from streamrl.recipe.sections import Engines

ENGINES = Engines(silence_timeout_s=30, progress_timeout_s=120)


@pytest.mark.parametrize("slower", [1, 10, 100])
def test_a_slow_engine_is_never_taken_for_dead(slower: int) -> None:
    """A step of 50 ms, ten and a hundred times as long; it reports as seldom as its host has time for that."""
    watch, tokens, received = ProgressWatch(ENGINES), 0, 0
    for look in range(4000):
        now = look * 0.5
        tokens = int(now / (0.05 * slower))
        received = int(now / (0.2 * slower))
        assert watch.check(now, received=received, progress=(tokens,), busy=True) == ""


def test_a_held_up_watcher_counts_missed_time_little() -> None:
    """Time that the watcher missed because it was held up itself counts for little."""
    watch = ProgressWatch(ENGINES)
    assert [watch.check(now, received=1, progress=(1,), busy=True) for now in (0.0, 600.0, 1200.0)] == ["", "", ""]


@pytest.mark.parametrize(
    ("received", "busy", "says"), [(0, False, "nothing was heard"), (1, True, "none of its requests")]
)
def test_a_silent_or_stuck_engine_is_taken_for_dead(received: int, busy: bool, says: str) -> None:
    """An engine that is silent or makes no progress is taken for dead."""
    watch = ProgressWatch(ENGINES)
    found = [watch.check(look * 0.5, received=received * look, progress=(7,), busy=busy) for look in range(300)]
    first = next(index for index, reason in enumerate(found) if reason)
    assert says in found[first] and first * 0.5 == pytest.approx(120 if busy else 30, abs=1.0)


def test_an_engine_that_owes_nothing_may_be_idle() -> None:
    watch = ProgressWatch(ENGINES)
    assert not any(watch.check(look * 0.5, received=look, progress=(7,), busy=False) for look in range(1000))
