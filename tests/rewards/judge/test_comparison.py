"""Siblings compared by a judge: its verdicts count, and the places of completions in its questions do not."""

from __future__ import annotations

import pytest

from streamrl.rewards.judge.comparison import orders_of, pairs_of, read_ranking, values_of_pairs


@pytest.mark.parametrize(("siblings", "opponents", "met"), [(2, 0, 1), (5, 0, 4), (6, 2, 2), (7, 3, 4), (4, 3, 3)])
def test_each_sibling_meets_as_many_others_in_both_orders(siblings: int, opponents: int, met: int) -> None:
    pairs = pairs_of(siblings, opponents)
    assert sorted({(second, first) for first, second in pairs}) == pairs and len(set(pairs)) == len(pairs)
    for one in range(siblings):
        assert [first for first, _ in pairs].count(one) == met


def test_values_are_shares_of_comparisons_won() -> None:
    """A judge that always prefers the first place says nothing about anybody; so does one that sees only ties."""
    shares = {(0, 1): 1.0, (1, 0): 0.0, (0, 2): 1.0, (2, 0): 0.5, (1, 2): 0.5, (2, 1): 0.5}
    assert values_of_pairs(3, shares) == [0.875, 0.25, 0.375]
    for share in (1.0, 0.5, 0.0):
        assert values_of_pairs(6, dict.fromkeys(pairs_of(6, 2), share)) == [0.5] * 6


@pytest.mark.parametrize(("texts", "orders"), [(2, 2), (5, 2), (5, 4), (5, 10), (4, 6)])
def test_a_judge_that_ranks_by_places_gives_all_the_same(texts: int, orders: int) -> None:
    """With twice as many orders as texts, each is at each place twice: a preference for one place helps nobody."""
    shown = orders_of(texts, orders)
    assert len(shown) == orders and all(sorted(order) == list(range(texts)) for order in shown)
    by_place = " > ".join(map(str, range(1, texts + 1)))
    rankings = [read_ranking(by_place, order) for order in shown]
    assert {round(sum(values), 9) for values in zip(*rankings, strict=True)} == {orders / 2}
    if orders == 2 * texts:
        for place in range(texts):
            assert [order[place] for order in shown].count(0) == 2


def test_a_ranking_is_the_last_chain_of_all_numbers() -> None:
    assert read_ranking("First 1 > 2, but no.\nRanking: 3 > 1 = 2", [1, 2, 0]) == [1.0, 0.25, 0.25]
    assert read_ranking("1=2 = 3", [0, 1, 2]) == [0.5, 0.5, 0.5]
    for answer in ("", "the first is best", "1 > 2", "1 > 2 > 2", "1 > 2 > 3 > 4", "0 > 1 > 2"):
        with pytest.raises(ValueError, match="each number from 1 to 3 once"):
            read_ranking(answer, [0, 1, 2])
