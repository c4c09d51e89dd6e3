"""Round policies: how many groups to launch now, and whether a ready group may join the open batch.

A policy sees a frozen ``RoundView`` and answers with numbers; it holds no state of the run. New kinds of round
are added here (or in a module of their own) and named in ``ROUND_POLICIES``; stages do not change.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from streamrl.buffers.slots import may_take
from streamrl.config.recipe import RoundKind, StalePolicy


class RoundView(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may look at. ``seats``: groups that the open batch still takes.

    ``untrained_groups``: open and ready groups; ``last_versions``: for each of them the last trainer version
    that may still train it.
    """

    trainer_version: int
    live_version: int
    batch_groups: int
    group_size: int
    seats: int
    batch_closed: bool
    untrained_groups: int
    free_slots: int
    steps_left: int
    when_stale: StalePolicy
    last_versions: dict[int, int]


class RoundPolicy(Protocol):
    """How rounds are formed."""

    def groups_to_launch(self, view: RoundView) -> int:
        """Asked whenever something changed and prompts may be drawn."""
        ...

    def may_join(self, view: RoundView, group_id: int) -> bool:
        """Asked for each ready group, oldest first, while the open batch has seats."""
        ...


class SynchronousRounds:
    """Launch one batch of groups under the live weights, wait for all of them, step, push, repeat.

    A dropped group is refilled inside the round. Strictly on-policy.
    """

    def groups_to_launch(self, view: RoundView) -> int:
        if view.batch_closed or view.live_version != view.trainer_version or view.steps_left <= 0:
            return 0
        return max(view.seats - view.untrained_groups, 0)

    def may_join(self, view: RoundView, group_id: int) -> bool:
        return view.seats > 0


class ContinuousRounds:
    """No rounds: keep every slot busy; weights change in flight; staleness is bounded by slots and deadlines."""

    def groups_to_launch(self, view: RoundView) -> int:
        wanted = view.free_slots // view.group_size
        # What is launched beyond the last batch would be thrown away.
        needed = view.seats + (view.steps_left - 1) * view.batch_groups - view.untrained_groups
        return max(min(wanted, needed), 0)

    def may_join(self, view: RoundView, group_id: int) -> bool:
        deadline = view.last_versions[group_id]
        if view.when_stale is not StalePolicy.WAIT:
            return view.seats > 0 and deadline >= view.trainer_version
        others = [d for g, d in view.last_versions.items() if g != group_id]
        return may_take(deadline, others, now=view.trainer_version, seats=view.seats, batch_groups=view.batch_groups)


ROUND_POLICIES: dict[RoundKind, RoundPolicy] = {
    RoundKind.SYNCHRONOUS: SynchronousRounds(),
    RoundKind.CONTINUOUS: ContinuousRounds(),
}
