"""Values of siblings from comparisons in which the place of a completion in a question does not count. Pure.

``forms`` asks the questions. A model that judges prefers some places (arXiv 2306.05685, section 3.4), so every pair is
asked in both orders, and every order of a ranking reversed as well: a judge that goes by places alone gives all
siblings the same value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

_CHAIN = re.compile(r"\d+(?:\s*[>=]\s*\d+)+")

Pair = tuple[int, int]
"""Places of two siblings among all, the one that the question shows first, and the other."""


def pairs_of(siblings: int, opponents: int) -> list[Pair]:
    """Pairs to compare, each in both orders. ``opponents``: number of siblings with which each one is compared, its
    neighbours in a circle (0: all; an odd number is rounded up)."""
    distances = range(1, siblings)
    if 0 < opponents < siblings - 1:
        distances = range(1, (opponents + 1) // 2 + 1)
    ordered = {(place, (place + distance) % siblings) for place in range(siblings) for distance in distances}
    return sorted(ordered | {(second, first) for first, second in ordered})


def values_of_pairs(siblings: int, shares: Mapping[Pair, float]) -> list[float]:
    """Share of its comparisons that each sibling wins, 0 to 1; a tie counts half. ``shares``: value of the first of
    each pair, 0 (it loses) to 1; the second has the rest."""
    wins: list[list[float]] = [[] for _ in range(siblings)]
    for (first, second), share in shares.items():
        wins[first].append(share)
        wins[second].append(1.0 - share)
    return [fmean(shares_of_one) for shares_of_one in wins]


def orders_of(texts: int, orders: int) -> list[list[int]]:
    """Orders in which a ranking shows the places 0 to ``texts`` - 1: half of ``orders`` begin at places with equal
    distances, and each of them is reversed, too. With twice as many orders as texts each is at each place twice."""
    starts = [texts * number * 2 // orders for number in range(orders // 2)]
    circles = [[(start + place) % texts for place in range(texts)] for start in starts]
    return [order for circle in circles for order in (circle, circle[::-1])]


def read_ranking(answer: str, order: Sequence[int]) -> list[float]:
    """Value of each place, 0 (the last) to 1 (the first), from a ranking such as ``3 > 1 = 2`` at the end of an answer.
    Completions that are equal share the values of their ranks. ``order``: place of each number, which counts from 1.
    Raises ``ValueError`` for a ranking that does not have each number once."""
    chains = _CHAIN.findall(answer)
    ranks = [[int(number) - 1 for number in equals.split("=")] for equals in (chains or [""])[-1].split(">") if equals]
    numbers = sorted(number for equals in ranks for number in equals)
    if numbers != list(range(len(order))):
        raise ValueError(f"the ranking has not each number from 1 to {len(order)} once")
    values = [0.0] * len(order)
    better = 0
    for equals in ranks:
        for number in equals:
            values[order[number]] = 1.0 - (better + (len(equals) - 1) / 2) / (len(order) - 1)
        better += len(equals)
    return values
