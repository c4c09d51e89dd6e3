"""Slots, which bound the number of trajectories in flight, and the arithmetic of staleness. Control uses both, in the
controller's process and in simulations.

A batch consumes a number of trajectories and makes one new policy version. There are slots for ``max_staleness + 1``
batches. The slots of a group are released only when the group is dropped, or when the version that trained it is *live
on the engines*. So a group that is launched under live version ``u`` while ``d`` trained versions are not live yet
shares the buffer with at most ``max_staleness + 1 - d`` batches of earlier groups. Where groups are trained in an order
that ``may_take`` allows, it is trained by version ``u + max_staleness`` at the latest (docs/adr/0002)."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct


class Slots(Struct, kw_only=True):
    """Counts of slots. ``in_use``: number of slots in use; ``consumed``: slots of trained trajectories, by the version
    that trained them, which are released when this version is live."""

    in_use: int = 0
    consumed: dict[int, int] = {}

    def charge(self, count: int) -> None:
        """Take ``count`` slots at launch."""
        self.in_use += count

    def release(self, count: int) -> None:
        """Release ``count`` slots of a dropped group."""
        if count > self.in_use:
            raise ValueError(f"{count} slots released, {self.in_use} are in use")
        self.in_use -= count

    def consume(self, policy_version: int, count: int) -> None:
        """Note that the trajectories of ``count`` slots were trained by the step that made ``policy_version``."""
        self.consumed[policy_version] = self.consumed.get(policy_version, 0) + count

    def version_live(self, policy_version: int) -> None:
        """Release the slots that ``policy_version`` and older versions consumed: it is live on every engine."""
        for version in [consumed for consumed in self.consumed if consumed <= policy_version]:
            self.release(self.consumed.pop(version))


def staleness(trained_at: int, oldest_version: int) -> int:
    """Optimizer steps between the version that sampled a token and the version that trains it."""
    return trained_at - oldest_version


def last_version(oldest_version: int, max_staleness: int) -> int:
    """Last version whose step may train a token that ``oldest_version`` sampled."""
    return oldest_version + max_staleness


def may_take(
    trajectories: int, deadline: int, due: Iterable[tuple[int, int]], *, now: int, missing: int, batch: int
) -> bool:
    """Return whether a group may join the batch that version ``now`` trains: whether every other group can still be
    trained in time (earliest-deadline-first feasibility).

    ``trajectories``: number of trajectories of the group;
    ``deadline``: ``last_version`` of the group;
    ``due``: (deadline, number of trajectories) of all untrained groups, by deadline, ascending;
    ``missing``: number of trajectories that the batch still lacks;
    ``batch``: number of trajectories of a batch.

    For each deadline ``d`` before the group's own, at most ``max(missing - trajectories, 0) + batch * (d - now)``
    trajectories may have to be trained by ``d``. Groups differ in size, and the last one to join a batch may take more
    than are missing."""
    if missing <= 0 or deadline < now:
        return False
    rest_of_batch = max(missing - trajectories, 0)
    pending = 0
    for earlier_deadline, count in due:
        if earlier_deadline >= deadline:
            break
        pending += count
        if pending > rest_of_batch + batch * max(earlier_deadline - now, 0):
            return False
    return True
