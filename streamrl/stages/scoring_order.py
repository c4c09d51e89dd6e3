"""Sequence of scoring: the work that closes a round soonest is first. Pure; ``stages.reward`` calls it in the
controller.

A round closes when groups are complete, so a group that lacks one member goes before a group that lacks five. Among
equal groups the first to arrive goes first. Held-out work, for which no round waits, goes last."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

from msgspec import Struct

from streamrl.base.types import Trajectory


class WaitingOrder(Struct, frozen=True):
    """Trajectories of one group to be scored together.

    ``reward_version``: number of the set of reward functions that scores them;
    ``arrived_at``: time of their arrival on the loop's clock, for the caller's latencies."""

    order_id: int
    trajectories: tuple[Trajectory, ...]
    reward_version: int = 0
    arrived_at: float = 0.0


class _Rank(NamedTuple):
    evaluation: bool
    missing: int
    arrival: int
    group_id: int


class ScoringOrder:
    """Work that waits for a worker. A member of a group counts as missing until it is scored, failed or lost; a member
    that waits here still counts."""

    def __init__(self) -> None:
        self._missing: dict[int, int] = {}
        self._waiting: dict[int, deque[tuple[int, bool, WaitingOrder]]] = {}
        self._ranks: list[_Rank] = []
        self._arrivals = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def member_arrived(self, group_id: int, group_size: int) -> None:
        """Note the size of a group when a member of it arrives; only the first call for a group counts."""
        self._missing.setdefault(group_id, group_size)

    def member_ended(self, group_id: int) -> bool:
        """Note that a member was scored, failed, or was lost. Returns whether it was the last member of its group."""
        missing = self._missing.get(group_id, 1) - 1
        if missing > 0:
            self._missing[group_id] = missing
        else:
            self._missing.pop(group_id, None)
        if group_id in self._waiting:
            self._rank(group_id)
        return missing <= 0

    def add(self, order: WaitingOrder) -> None:
        """Add an order."""
        first = order.trajectories[0]
        group_id = first.id.group_id
        self._arrivals += 1
        self._count += 1
        waiting = self._waiting.get(group_id)
        if waiting is not None:
            waiting.append((self._arrivals, first.evaluation, order))
        else:
            self._waiting[group_id] = deque([(self._arrivals, first.evaluation, order)])
            self._rank(group_id)

    def first(self) -> WaitingOrder:
        """Return the next order to score, without removing it. Raises ``IndexError`` when there is none."""
        while True:
            rank = self._ranks[0]
            waiting = self._waiting.get(rank.group_id)
            if waiting and rank == self._rank_of(rank.group_id):
                return waiting[0][2]
            heappop(self._ranks)  # outdated: the group has another rank now

    def pop(self) -> WaitingOrder:
        """Remove and return the next order to score. Raises ``IndexError`` when there is none."""
        order = self.first()
        group_id = heappop(self._ranks).group_id
        waiting = self._waiting[group_id]
        waiting.popleft()
        self._count -= 1
        if waiting:
            self._rank(group_id)
        else:
            del self._waiting[group_id]
            if not self._waiting:
                self._ranks.clear()  # no order waits, so the remaining ranks are outdated
        return order

    def _rank(self, group_id: int) -> None:
        heappush(self._ranks, self._rank_of(group_id))

    def _rank_of(self, group_id: int) -> _Rank:
        arrival, evaluation, _ = self._waiting[group_id][0]
        return _Rank(evaluation, self._missing.get(group_id, 0), arrival, group_id)
