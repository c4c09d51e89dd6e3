"""Which orders are scored first."""

from __future__ import annotations

import pytest
from builders.base import trajectory
from hypothesis import given
from hypothesis import strategies as st

from streamrl.stages.scoring_order import ScoringOrder, WaitingOrder


def order_of(number: int, group: int, *, evaluation: bool = False) -> WaitingOrder:
    return WaitingOrder(number, (trajectory(number, group, evaluation=evaluation),))


def test_what_closes_a_round_soonest_is_scored_first() -> None:
    waiting = ScoringOrder()
    for group in (0, 1, 2):
        waiting.member_arrived(group, 4)
    waiting.member_arrived(9, 1)
    waiting.add(order_of(9, 9, evaluation=True))  # held out: lacks one member only, and no round waits for it
    for number, group in enumerate([0, 0, 1, 2, 2]):
        waiting.add(order_of(number, group))
    waiting.member_ended(2)
    waiting.member_ended(2)  # two members to go, both waiting
    waiting.member_ended(1)  # three to go
    assert waiting.pop().order_id == 3
    for _ in range(3):
        waiting.member_ended(0)  # one to go, as groups complete elsewhere
    assert [waiting.pop().order_id for _ in range(len(waiting))] == [0, 1, 4, 2, 9]
    with pytest.raises(IndexError):
        waiting.pop()


@given(events=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["add", "end", "pop"])), max_size=60))
def test_scoring_order_loses_and_repeats_nothing(events: list[tuple[int, str]]) -> None:
    waiting, added, popped = ScoringOrder(), [], []
    for number, (group, what) in enumerate(events):
        if what == "add":
            waiting.member_arrived(group, 4)
            waiting.add(order_of(number, group))
            added.append(number)
        elif what == "end":
            waiting.member_ended(group)
        elif len(waiting):
            first = waiting.first()
            popped.append(waiting.pop().order_id)
            assert first.order_id == popped[-1]
    popped += [waiting.pop().order_id for _ in range(len(waiting))]
    assert sorted(popped) == added


def test_nothing_is_left_of_orders_that_overtook_each_other() -> None:
    waiting = ScoringOrder()
    for group in range(0, 400, 2):
        for number, of in enumerate((group, group + 1)):
            waiting.member_arrived(of, 4)
            waiting.add(order_of(number, of, evaluation=bool(number)))
            waiting.member_ended(of)  # it waits at another place now
        assert [waiting.pop().order_id for _ in range(2)] == [0, 1]
    assert not waiting._ranks
