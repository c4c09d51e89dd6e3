"""How many requests run while a round's longest completions grow: the sum of their root over its decode steps.

A decode step costs a part by the root of what runs (``engine_cost``), so a round's cost depends on how its tokens lie:
many requests for a short time are cheaper than few for a long one. For a round that was played it is counted; for one
that is predicted it follows from two curves: how many groups still run after t tokens, and how many members of such a
group do.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from streamrl.policies.adviser.engine_cost import RoundLoad
from streamrl.policies.adviser.length_estimate import Curve, LengthEstimate

_BINS_PER_OCTAVE = 16


class PlayedLoad(msgspec.Struct):
    """What a round has asked of the engines so far. ``lengths``: (completions, sum of their lengths) by logarithmic bin
    of length, so that memory does not grow with the round."""

    longest: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0
    trained_tokens: float = 0.0
    lengths: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)

    def add(self, lengths: Sequence[int], *, size: int, cut: bool, cut_at: int) -> None:
        """A group of ``size`` ended; those of a ``cut`` one that are not in ``lengths`` had ``cut_at`` tokens."""
        stopped = size - len(lengths)
        tokens = sum(lengths) + stopped * cut_at
        for length in lengths:
            self._count(length, 1)
        if stopped > 0 and cut_at > 0:
            self._count(cut_at, stopped)
        self.requests += size
        self.tokens += tokens
        if not cut:
            self.longest = max(self.longest, *lengths, 0)
            self.trained_tokens += tokens

    def _count(self, length: int, times: int) -> None:
        place = int(_BINS_PER_OCTAVE * math.log2(max(length, 1)))
        count, total = self.lengths.get(place, (0, 0))
        self.lengths[place] = (count + times, total + times * length)

    def load(self) -> RoundLoad:
        """All of it. Within a bin completions are taken to be of equal length."""
        running = sum(count for count, _ in self.lengths.values())
        root_tokens = at = 0.0
        for _, (count, total) in sorted(self.lengths.items()):
            length = total / count
            root_tokens += (length - at) * math.sqrt(running)
            running, at = running - count, length
        return RoundLoad(
            longest=self.longest,
            tokens=self.tokens,
            root_tokens=root_tokens,
            requests=self.requests,
            trained_tokens=self.trained_tokens,
        )


class LoadProfile:
    """Expected loads for groups of ``size`` whose lengths are distributed as ``lengths`` says."""

    def __init__(self, lengths: LengthEstimate, size: int) -> None:
        self.lengths = lengths
        self._size = size
        groups, members = lengths.groups, lengths.members
        self._edges = sorted({0.0, *groups.lengths, *members.lengths})
        self._alive: list[float] = []  # share of the members of a running group that run, after each edge
        for edge in self._edges:
            running = _beyond(groups, edge)
            share = _beyond(members, edge) / running if running > 0 else 0.0
            self._alive.append(min(max(share, 1 / size), 1.0))
        self._roots = [0.0]  # integral of the root of that share up to each edge
        for start, end, alive in zip(self._edges, self._edges[1:], self._alive, strict=False):
            self._roots.append(self._roots[-1] + (end - start) * math.sqrt(alive))

    def expected(self, groups: Curve, count: int, tokens: float, *, cut: float = math.inf) -> float:
        """Sum over steps of the root of the running requests, of ``count`` groups drawn from ``groups`` that sample
        ``tokens`` together and stop at ``cut``."""
        roots = sampled = 0.0
        for place, start in enumerate(self._edges):
            end = min(self._edges[place + 1] if place + 1 < len(self._edges) else start, cut)
            running = count * _beyond(groups, start)
            if end <= start or running <= 0:
                break
            members = self._size * self._alive[place]
            roots += (end - start) * math.sqrt(members) * _root_of_count(running)
            sampled += (end - start) * members * running
        # The groups of a long round have more members that run than the others: as many more as they have tokens.
        return roots * math.sqrt(tokens / sampled) if sampled > 0 else 0.0

    def drawn(self, longest: Sequence[float]) -> float:
        """The same for groups whose ``longest`` completions are given, or where they were cut."""
        roots, before = 0.0, 0.0
        for place, length in enumerate(sorted(longest)):
            at = self._root_integral(length)
            roots += math.sqrt((len(longest) - place) * self._size) * (at - before)
            before = at
        return roots

    def _root_integral(self, length: float) -> float:
        place = max(bisect_right(self._edges, length) - 1, 0)
        return self._roots[place] + (length - self._edges[place]) * math.sqrt(self._alive[place])


def _beyond(curve: Curve, length: float) -> float:
    """Share of what is longer than ``length``."""
    place = bisect_right(curve.lengths, length)
    return 1.0 - (curve.below[place - 1] if place else 0.0)


def _root_of_count(mean: float) -> float:
    """E[sqrt(K)] of a Poisson count of that mean, within 2 %: the mean itself for rare ones, its root for many."""
    return mean / math.sqrt(mean + math.exp(-0.4 * mean))
