"""Slots: the right of a trajectory to be in flight, and the arithmetic of staleness. The only place with that formula.

A batch consumes a number of trajectories and makes one new policy version. There are ``(max_staleness + 1)`` batches of
slots, released only when a whole group is dropped or when the version that consumed it is *live on the engines*. So a
group that is launched under live version ``u`` while ``d`` trained versions are not live yet shares the buffer with at
most ``(max_staleness + 1 - d)`` batches of groups that were launched before it. Consumed in any order that ``may_take``
allows, it is trained by version ``u + max_staleness`` at the latest (docs/adr/0002)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Slots(msgspec.Struct, kw_only=True):
    """Slots in use, and by version those of trained trajectories, which wait for that version to be live."""

    in_use: int = 0
    consumed: dict[int, int] = {}

    def charge(self, count: int) -> None:
        """Take ``count`` slots at launch."""
        self.in_use += count

    def release(self, count: int) -> None:
        """Give ``count`` slots back: their group was dropped."""
        if count > self.in_use:
            raise ValueError(f"{count} slots released, {self.in_use} are in use")
        self.in_use -= count

    def consume(self, policy_version: int, count: int) -> None:
        """``count`` slots were trained into ``policy_version``; they wait for it to be live."""
        self.consumed[policy_version] = self.consumed.get(policy_version, 0) + count

    def version_live(self, policy_version: int) -> None:
        """``policy_version`` is live on every engine: release what it and older versions consumed."""
        for version in [v for v in self.consumed if v <= policy_version]:
            self.release(self.consumed.pop(version))


def staleness(trained_at: int, oldest_version: int) -> int:
    """Optimizer steps between the version that sampled a token and the version that trains it."""
    return trained_at - oldest_version


def last_version(oldest_version: int, max_staleness: int) -> int:
    """The last trainer version that may still train a token sampled under ``oldest_version``."""
    return oldest_version + max_staleness


def may_take(
    trajectories: int, deadline: int, due: Iterable[tuple[int, int]], *, now: int, missing: int, batch: int
) -> bool:
    """Return whether a group may take ``trajectories`` of the ``missing`` ones of the batch that version ``now``
    trains.

    ``deadline``: the group's ``last_version``; ``due``: trajectories of all untrained groups by deadline, ascending.
    True when every other group can still be trained in time: for each deadline ``d`` before this group's own, at most
    ``max(missing - trajectories, 0) + batch * (d - now)`` trajectories may have to be trained by ``d``
    (earliest-deadline-first feasibility). Groups may differ in size, since the last one to join a batch may take more
    than are missing."""
    if missing <= 0 or deadline < now:
        return False
    pending = 0
    for last, count in due:
        if last >= deadline:
            break
        pending += count
        if pending > max(missing - trajectories, 0) + batch * max(last - now, 0):
            return False
    return True
