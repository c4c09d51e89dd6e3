"""The rollout buffer: the life of every trajectory and group, and the accounting.

Pure and synchronous. It holds identities, sizes and states, never tokens.

A trajectory is ``IN_FLIGHT`` (sampled or being scored) -> ``SCORED`` -> ``BATCHED`` -> trained, or dropped with
one reason from any of them. A group is open until each member ended, then ready, then batched.

At every instant ``issued == trained + sum(dropped.values()) + in_flight``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from streamrl.types import DropReason, FinishReason, TrajectoryId


class TrajectoryState(StrEnum):
    """Where a trajectory that has not ended is."""

    IN_FLIGHT = "in_flight"
    SCORED = "scored"
    BATCHED = "batched"


class Member(msgspec.Struct, kw_only=True):
    """One trajectory that has not ended. ``oldest_version``: launch version until the engine told the real one."""

    id: TrajectoryId
    state: TrajectoryState
    oldest_version: int
    reward: float = 0.0
    tokens: int = 0
    finish_reason: FinishReason | None = None


class Group(msgspec.Struct, kw_only=True):
    """The live members of one prompt. ``batch_id`` None until it is handed to training."""

    group_id: int
    prompt_id: str
    attempt: int
    launch_version: int
    size: int
    members: dict[TrajectoryId, Member]
    batch_id: int | None = None

    @property
    def ready(self) -> bool:
        """Every member ended, and it is not yet in a batch."""
        return self.batch_id is None and all(m.state is TrajectoryState.SCORED for m in self.members.values())

    @property
    def oldest_version(self) -> int:
        """Oldest policy version that one of its tokens may have."""
        return min((m.oldest_version for m in self.members.values()), default=self.launch_version)

    @property
    def tokens(self) -> int:
        """Sampled tokens of its finished members."""
        return sum(m.tokens for m in self.members.values())

    @property
    def zero_variance(self) -> bool:
        """All rewards are equal: no signal for a group baseline."""
        rewards = [m.reward for m in self.members.values()]
        return all(r == rewards[0] for r in rewards)


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectory counts since the run began."""

    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int

    @property
    def balanced(self) -> bool:
        """The accounting invariant."""
        return self.issued == self.trained + sum(self.dropped.values()) + self.in_flight


class RolloutBuffer:
    """Groups that have not ended, and counters of those that have."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.issued = 0
        self.trained = 0
        self.dropped: Counter[DropReason] = Counter()
        self.wasted_tokens = 0

    def admit(self, prompt_id: str, group_id: int, size: int, *, attempt: int, policy_version: int) -> Group:
        """Launch a group of ``size`` trajectories under the live ``policy_version``."""
        if group_id in self.groups:
            raise ValueError(f"group {group_id} is in the buffer already")
        ids = [TrajectoryId(prompt_id=prompt_id, group_id=group_id, sample=i, attempt=attempt) for i in range(size)]
        members = {i: Member(id=i, state=TrajectoryState.IN_FLIGHT, oldest_version=policy_version) for i in ids}
        group = Group(
            group_id=group_id,
            prompt_id=prompt_id,
            attempt=attempt,
            launch_version=policy_version,
            size=size,
            members=members,
        )
        self.groups[group_id] = group
        self.issued += size
        return group

    def member(self, trajectory_id: TrajectoryId) -> Member | None:
        """The live trajectory, or None when it has ended (a late result)."""
        group = self.groups.get(trajectory_id.group_id)
        return None if group is None else group.members.get(trajectory_id)

    def score(
        self, trajectory_id: TrajectoryId, *, reward: float, tokens: int, reason: FinishReason, oldest: int
    ) -> Group | None:
        """Record a reward. None (and nothing changes) when the trajectory ended before or was scored already."""
        member = self.member(trajectory_id)
        if member is None or member.state is not TrajectoryState.IN_FLIGHT:
            return None
        member.state = TrajectoryState.SCORED
        member.reward, member.tokens, member.finish_reason = reward, tokens, reason
        member.oldest_version = oldest
        return self.groups[trajectory_id.group_id]

    def drop_member(self, trajectory_id: TrajectoryId, reason: DropReason, *, tokens: int = 0) -> Group | None:
        """End one trajectory of a group that is not batched; the group shrinks. None for one that ended before."""
        member = self.member(trajectory_id)
        if member is None or member.state is TrajectoryState.BATCHED:
            return None
        group = self.groups[trajectory_id.group_id]
        del group.members[trajectory_id]
        self.dropped[reason] += 1
        self.wasted_tokens += tokens or member.tokens
        if not group.members:
            del self.groups[group.group_id]
        return group

    def drop_group(self, group_id: int, reason: DropReason) -> Group:
        """End every trajectory of a group with one reason."""
        group = self.groups.pop(group_id)
        self.dropped[reason] += len(group.members)
        self.wasted_tokens += group.tokens
        return group

    def batch(self, group_id: int, batch_id: int) -> Group:
        """Hand a ready group to training."""
        group = self.groups[group_id]
        if not group.ready:
            raise ValueError(f"group {group_id} is not ready: {[str(m.state) for m in group.members.values()]}")
        group.batch_id = batch_id
        for member in group.members.values():
            member.state = TrajectoryState.BATCHED
        return group

    def train(self, batch_id: int) -> list[Group]:
        """The optimizer stepped on ``batch_id``: its groups end as trained."""
        ended = [g for g in self.groups.values() if g.batch_id == batch_id]
        for group in ended:
            self.trained += len(group.members)
            del self.groups[group.group_id]
        return ended

    def untrained(self) -> Iterator[Group]:
        """Groups that are not in a batch, oldest launch first."""
        return (g for g in self.groups.values() if g.batch_id is None)

    def ready(self) -> list[Group]:
        """Groups that may be trained, oldest launch first."""
        return [g for g in self.groups.values() if g.ready]

    def in_flight(self, groups: Iterable[Group] | None = None) -> int:
        """Trajectories that have not ended, counted from the groups themselves."""
        return sum(len(g.members) for g in (self.groups.values() if groups is None else groups))

    def accounting(self) -> Accounting:
        """Counts for the invariant; ``in_flight`` is counted independently of the other three."""
        return Accounting(
            issued=self.issued,
            trained=self.trained,
            dropped={str(reason): count for reason, count in sorted(self.dropped.items())},
            in_flight=self.in_flight(),
        )
