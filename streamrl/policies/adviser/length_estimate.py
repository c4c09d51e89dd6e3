"""How long are groups? The distribution of their longest completions, from races that hide the long ones.

A group that lost its race is *censored*: its longest completion is longer than where it was cut. When its prompt is
sampled again in a long round, that group is no draw from all prompts, only from those beyond the cut. Both are what the
Kaplan-Meier estimate with delayed entry is for: a cut group leaves the risk set where it was cut, a group of a long
round enters it there. To leave the first out makes the tail look thin, to count the second from zero makes it look
fat, and a policy that raced by either would undo its own choice (refs/scheduling-model.md, section 5).

Everything is kept in logarithmic bins with weights that fade, so that memory and cost do not grow with the run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from streamrl.policies.length_prediction import FadingMean

_BINS_PER_OCTAVE = 32  # 2.2 % wide; within a bin the mean of what fell into it is used
KEPT_PER_GROUP = 0.995
"""Weight that a group keeps with each later one: the last 200 or so decide."""

_HEAVIEST = 1e6  # then all weights are scaled down
_GRID = 48  # points of the integral over an order statistic
_PENDING_CUTS = 4096


class LengthBin(msgspec.Struct, array_like=True):
    """Weights of what happened in one bin of lengths, all of them fading.

    ``ended``: groups (or members) whose length is known; ``lengths`` and ``tokens``: sums of their lengths and of their
    groups' tokens; ``left``: cut here; ``entered``: seen only because they are longer than this.
    """

    ended: float = 0.0
    lengths: float = 0.0
    tokens: float = 0.0
    left: float = 0.0
    entered: float = 0.0

    def scale(self, factor: float) -> None:
        self.ended *= factor
        self.lengths *= factor
        self.tokens *= factor
        self.left *= factor
        self.entered *= factor


class Curve(msgspec.Struct, frozen=True):
    """A distribution of lengths, ascending: ``lengths[i]`` has probability ``shares[i]``.

    ``below[i]``: the sum of the shares up to and with it. ``tokens[i]``: mean tokens of a group whose longest
    completion is ``lengths[i]`` (of single members: unused).
    """

    lengths: tuple[float, ...]
    shares: tuple[float, ...]
    tokens: tuple[float, ...]
    below: tuple[float, ...]

    def at(self, share: float) -> int:
        """Index of the ``share``-quantile."""
        return min(bisect_left(self.below, share - 1e-12), len(self.lengths) - 1)

    def quantile(self, share: float) -> float:
        """The length that ``share`` of all do not exceed."""
        return self.lengths[self.at(share)]

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(length * share for length, share in zip(self.lengths, self.shares, strict=True))

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a group."""
        return sum(tokens * share for tokens, share in zip(self.tokens, self.shares, strict=True))

    def weighted(self, weights: Sequence[float]) -> Curve:
        """The same lengths with other shares, proportional to ``weights``."""
        total = sum(weights)
        shares = tuple(weight / total for weight in weights)
        return Curve(self.lengths, shares, self.tokens, tuple(accumulate(shares)))

    def cut_mean(self, cut: float) -> float:
        """Mean of the lengths when everything beyond ``cut`` stops there."""
        return sum(min(length, cut) * share for length, share in zip(self.lengths, self.shares, strict=True))

    def order_statistic(self, rank: int, count: int) -> float:
        """Expected ``rank``-th smallest (1-based) of ``count`` draws.

        The quantile function integrated over the Beta(rank, count - rank + 1) law of a uniform order statistic.
        """
        mean = rank / (count + 1)
        spread = math.sqrt(mean * (1 - mean) / (count + 2))
        low, high = max(mean - 4 * spread, 0.0), min(mean + 4 * spread, 1.0)
        total = weights = 0.0
        for step in range(_GRID):
            u = low + (high - low) * (step + 0.5) / _GRID
            weight = math.exp((rank - 1) * math.log(u / mean) + (count - rank) * math.log((1 - u) / (1 - mean)))
            total += weight * self.quantile(u)
            weights += weight
        return total / weights


class SurvivalHistogram:
    """The Kaplan-Meier estimate with delayed entry over fading weights."""

    def __init__(self) -> None:
        self._bins: dict[int, LengthBin] = {}
        self._curve: Curve | None = None

    def add(self, length: float, weight: float, *, tokens: float = 0.0, entry: float = 0.0) -> None:
        """Something of ``length``; with ``entry``, seen only because it is longer (one that is not, says nothing)."""
        place = _bin(length)
        if entry > 0:
            if length <= entry:
                return
            start = _bin(entry)
            place = max(place, start + 1)
            self._at(start).entered += weight
        found = self._at(place)
        found.ended += weight
        found.lengths += weight * length
        found.tokens += weight * tokens

    def add_cut(self, cut: float, weight: float) -> None:
        """Something longer than ``cut``."""
        self._at(_bin(cut)).left += weight

    def scale(self, factor: float) -> None:
        """Multiply all weights: the estimate stays what it is."""
        for found in self._bins.values():
            found.scale(factor)

    def curve(self) -> Curve:
        """The distribution now. What was cut beyond every known length is taken to be as long as the longest cut.

        Raises ``ValueError`` when no length is known yet.
        """
        if self._curve is None:
            self._curve = self._estimate()
        return self._curve

    def bins(self) -> list[tuple[int, LengthBin]]:
        """For a snapshot."""
        return sorted(self._bins.items())

    def set_bins(self, bins: list[tuple[int, LengthBin]]) -> None:
        """The inverse of ``bins``."""
        self._bins = dict(bins)
        self._curve = None

    def _at(self, place: int) -> LengthBin:
        self._curve = None
        return self._bins.setdefault(place, LengthBin())

    def _estimate(self) -> Curve:
        bins = self.bins()  # in order: sums of floats must not depend on who came first
        at_risk = sum(found.ended + found.left - found.entered for _, found in bins)
        surviving = 1.0
        lengths: list[float] = []
        shares: list[float] = []
        tokens: list[float] = []
        for _, found in bins:
            if found.ended > 0 and at_risk > 0:
                share = surviving * min(found.ended / at_risk, 1.0)
                lengths.append(found.lengths / found.ended)
                tokens.append(found.tokens / found.ended)
                shares.append(share)
                surviving -= share
            at_risk += found.entered - found.ended - found.left
        if not lengths:
            raise ValueError("no length is known yet: observe a complete group first")
        if surviving > 1e-9:  # all that is left was cut
            longest = max(self._bins)
            shares.append(surviving)
            lengths.append(max(lengths[-1], 2 ** (longest / _BINS_PER_OCTAVE)))
            tokens.append(tokens[-1] * lengths[-1] / lengths[-2])
        total = sum(shares)
        shares = [share / total for share in shares]
        return Curve(tuple(lengths), tuple(shares), tuple(tokens), tuple(accumulate(shares)))


class _State(msgspec.Struct):
    """What ``snapshot`` gives."""

    groups: list[tuple[int, LengthBin]]
    members: list[tuple[int, LengthBin]]
    weight: float
    seen: int
    again: FadingMean
    pending_cuts: list[int]
    entries: list[int]


class LengthEstimate:
    """Learns from groups of one size that ended or were cut, in the order of the events.

    ``seen``: groups that were complete in their first race. ``again``: mean tokens of groups that were sampled again.
    ``kept_per_group``: 1 where nothing changes, as in a record that is looked back on.
    """

    def __init__(self, kept_per_group: float = KEPT_PER_GROUP) -> None:
        self._kept = kept_per_group
        self._groups = SurvivalHistogram()
        self._members = SurvivalHistogram()
        self._weight = 1.0
        self._pending_cuts: deque[int] = deque(maxlen=_PENDING_CUTS)
        self._entries: list[int] = []
        self.seen = 0
        self.again = FadingMean()

    @property
    def groups(self) -> Curve:
        """Longest completions of groups. Raises ``ValueError`` before a group was complete."""
        return self._groups.curve()

    @property
    def members(self) -> Curve:
        """Single completions. Raises ``ValueError`` before one is known."""
        return self._members.curve()

    def observe(self, lengths: Sequence[int], *, again: bool = False) -> None:
        """A complete group; ``lengths``: tokens of its members. ``again``: its prompt had lost a race before."""
        if not lengths:
            return
        entry = 0
        if again:
            entry = self._entries.pop(0) if self._entries else 0
            self.again.add(sum(lengths), 1 - self._kept)
        else:
            self.seen += 1
        self._groups.add(max(lengths), self._weight, tokens=sum(lengths), entry=entry)
        for length in lengths:
            self._members.add(length, self._weight, entry=entry)
        self._fade()

    def begin_again(self, groups: int) -> None:
        """The prompts of the ``groups`` oldest cut groups are sampled again.

        They end in the order of their lengths, so the smallest cut goes with the first to end. Which cut belongs to
        which group does not matter to the estimate, as long as no group is paired with a cut beyond its length.
        """
        oldest = [self._pending_cuts.popleft() for _ in range(min(groups, len(self._pending_cuts)))]
        # Some groups are dropped instead of ending: their cuts are left, and the smallest of them say least.
        self._entries = sorted(self._entries + oldest)[-_PENDING_CUTS:]

    def observe_cut(self, lengths: Sequence[int], *, size: int, cut_at: int) -> None:
        """A group of ``size``, cut when members of ``lengths`` had ended; all others are longer than ``cut_at``."""
        self._groups.add_cut(max(cut_at, *lengths, 1), self._weight)
        for length in lengths:
            self._members.add(length, self._weight)
        if size > len(lengths):
            self._members.add_cut(max(cut_at, 1), self._weight * (size - len(lengths)))
        self._pending_cuts.append(max(cut_at, *lengths, 1))
        self._fade()

    def _fade(self) -> None:
        """The next group weighs more: as if all before it weighed less."""
        self._weight /= self._kept
        if self._weight > _HEAVIEST:
            for histogram in (self._groups, self._members):
                histogram.scale(1 / self._weight)
            self._weight = 1.0

    def snapshot(self) -> dict[str, object]:
        """All that was learned, as values that msgspec encodes."""
        state = _State(
            groups=self._groups.bins(),
            members=self._members.bins(),
            weight=self._weight,
            seen=self.seen,
            again=self.again,
            pending_cuts=list(self._pending_cuts),
            entries=self._entries,
        )
        built: dict[str, object] = msgspec.to_builtins(state)
        return built

    def restore(self, state: dict[str, object]) -> None:
        """The inverse: from here on this estimate answers as the one that gave ``state``."""
        known = msgspec.convert(state, _State)
        self._groups.set_bins(known.groups)
        self._members.set_bins(known.members)
        self._weight, self.seen = known.weight, known.seen
        self.again = known.again
        self._pending_cuts = deque(known.pending_cuts, maxlen=_PENDING_CUTS)
        self._entries = known.entries


def _bin(length: float) -> int:
    return int(_BINS_PER_OCTAVE * math.log2(max(length, 1)))
