"""The rollout buffer: the life of every trajectory and group, and the accounting.

Data that encodes as it is: identities, sizes and states, never tokens. Every method costs time in proportion to one
group at most, whatever else is in flight.

A trajectory is in flight (sampled, paused, or being scored), then scored, then part of a batch, then trained; from any
of them it may be dropped, with one reason. At every instant
``issued == trained + sum(dropped.values()) + in flight``."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from streamrl.base.types import DropReason, FinishReason, TrajectoryId


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectory counts since the run began."""

    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int


class PromptRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt that may be launched. ``attempt``: how often it was launched before; ``seed_base``: what its seeds are
    derived from (None: the number of its group); ``tokens``: length of the prompt, 0 when unknown; ``group_size``: of
    its cohort or its last launch, 0 before the first."""

    prompt_id: str
    attempt: int = 0
    seed_base: int | None = None
    tokens: int = 0
    group_size: int = 0


class Member(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One trajectory that has not ended. ``oldest_version``: launch version until the engine reports the real one;
    ``finish_reason``: None until it is scored. ``separate_rewards``: by name, those that are compared with their
    siblings' alone; empty: ``reward`` is. ``seconds``: from launch to score."""

    oldest_version: int
    finish_reason: FinishReason | None = None
    reward: float = 0.0
    tokens: int = 0
    separate_rewards: dict[str, float] = {}
    seconds: float = 0.0

    @property
    def scored(self) -> bool:
        """Return whether its reward is known."""
        return self.finish_reason is not None


class Group(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The live trajectories of one prompt, by sample number.

    ``size``: trajectories launched, which is the slots that it uses until it ends; ``keep``: how many of them a batch
    takes; ``weight``: what it counts in a batch, as ``ControlSettings.weight_of``; ``open``: members without a reward;
    ``oldest_version``: oldest policy version that one of its tokens may have; ``paused``: its open members are stopped
    and keep their tokens; ``queued``: its prompt waited in the queue, not among the fresh ones; ``sampling``:
    parameters that differ from the recipe's."""

    group_id: int
    prompt: PromptRef
    launch_version: int
    oldest_version: int
    size: int
    keep: int
    weight: int
    round_kind: str
    members: dict[int, Member]
    open: int
    paused: bool = False
    queued: bool = False
    sampling: dict[str, int | float] = {}

    @property
    def seed_base(self) -> int:
        """Number from which the seeds of its trajectories are derived."""
        return self.group_id if self.prompt.seed_base is None else self.prompt.seed_base

    @property
    def ready(self) -> bool:
        """Every member ended."""
        return self.open == 0 and bool(self.members)

    @property
    def tokens(self) -> int:
        """Sampled tokens of its scored members."""
        return sum(m.tokens for m in self.members.values())

    @property
    def longest(self) -> int:
        """Sampled tokens of its longest scored member."""
        return max((m.tokens for m in self.members.values()), default=0)

    @property
    def zero_variance(self) -> bool:
        """All rewards are equal, or each of those that are compared alone: no signal for a group baseline."""
        members = [m.separate_rewards or {"": m.reward} for m in self.members.values()]
        first: dict[str, float] = {}
        return all(first.setdefault(name, value) == value for rewards in members for name, value in rewards.items())

    @property
    def ids(self) -> tuple[TrajectoryId, ...]:
        """Ids of all members, by sample number."""
        return tuple(self._id(sample) for sample in self.members)

    @property
    def open_ids(self) -> tuple[TrajectoryId, ...]:
        """Ids of members without a reward."""
        return tuple(self._id(sample) for sample, member in self.members.items() if not member.scored)

    def _id(self, sample: int) -> TrajectoryId:
        prompt = self.prompt
        return TrajectoryId(prompt_id=prompt.prompt_id, group_id=self.group_id, sample=sample, attempt=prompt.attempt)


def oldest_first(group: Group) -> tuple[int, int]:
    """Sort key: the group with the oldest token must be trained soonest."""
    return group.oldest_version, group.group_id


class RolloutBuffer(msgspec.Struct, kw_only=True):
    """Groups that have not ended, and counters of those that have.

    ``untrained``: groups that are in no batch, oldest launch first; ``batched``: those of the open or closed batch, in
    the order in which they joined. ``ready``, ``paused`` (ids) and ``by_version`` (their weight, by oldest
    version) are indexes of ``untrained``. ``wasted_tokens``: of what was dropped. Read the fields; change them
    through the methods."""

    untrained: dict[int, Group] = {}
    batched: dict[int, Group] = {}
    ready: list[int] = []
    paused: list[int] = []
    by_version: dict[int, int] = {}
    issued: int = 0
    trained: int = 0
    dropped: dict[DropReason, int] = {}
    wasted_tokens: int = 0

    def groups(self) -> Iterator[Group]:
        """All of them, oldest launch first."""
        return iter(sorted((*self.batched.values(), *self.untrained.values()), key=lambda g: g.group_id))

    def __bool__(self) -> bool:
        return bool(self.untrained or self.batched)

    def find(self, group_id: int) -> Group | None:
        """The group, or None when it has ended."""
        return self.untrained.get(group_id) or self.batched.get(group_id)

    def member(self, trajectory: TrajectoryId) -> Member | None:
        """The live trajectory, or None when it has ended (a late result)."""
        group = self.find(trajectory.group_id)
        return None if group is None else group.members.get(trajectory.sample)

    def admit(self, group: Group) -> None:
        """Count ``group``, which is launched now, as in flight."""
        if self.find(group.group_id) is not None:
            raise ValueError(f"group {group.group_id} is in the buffer already")
        self.untrained[group.group_id] = group
        self._count_version(group, 1)
        self.issued += group.size

    def score(
        self,
        trajectory: TrajectoryId,
        *,
        reward: float,
        tokens: int,
        reason: FinishReason,
        oldest: int,
        separate: dict[str, float] | None = None,
        seconds: float = 0.0,
    ) -> Group | None:
        """Record a reward. None (and nothing changes) when the trajectory ended before or was scored already."""
        member = self.member(trajectory)
        if member is None or member.scored:
            return None
        group = self.untrained[trajectory.group_id]
        member.reward = reward
        member.tokens = tokens
        member.finish_reason = reason
        member.separate_rewards = separate or {}
        member.seconds = seconds
        if oldest != member.oldest_version:
            member.oldest_version = oldest
            self._update_oldest_version(group)
        group.open -= 1
        self._note_ready(group)
        return group

    def drop_member(self, trajectory: TrajectoryId, reason: DropReason, *, tokens: int = 0) -> Group | None:
        """End one trajectory of a group that is in no batch; the group shrinks. None for one that ended before."""
        group = self.untrained.get(trajectory.group_id)
        member = None if group is None else group.members.pop(trajectory.sample, None)
        if group is None or member is None:
            self.wasted_tokens += tokens  # it was dropped while it ran: what it had sampled is known only now
            return None
        group.open -= not member.scored
        self._dropped(reason, 1, tokens or member.tokens)
        if not group.members:
            self._leave_untrained(group)
        else:
            if member.oldest_version == group.oldest_version:
                self._update_oldest_version(group)
            self._note_ready(group)
        return group

    def drop_group(self, group: Group, reason: DropReason) -> None:
        """End every trajectory of a group with one reason."""
        if self.batched.pop(group.group_id, None) is None:
            self._leave_untrained(group)
        self._dropped(reason, len(group.members), group.tokens)

    def pause(self, group: Group) -> None:
        """Mark a group as paused: its open members stop and keep their tokens."""
        group.paused = True
        self.paused.append(group.group_id)

    def resume(self, group: Group) -> None:
        """The inverse of ``pause``; nothing for a group that is not paused."""
        if group.paused:
            group.paused = False
            self.paused.remove(group.group_id)

    def paused_groups(self) -> list[Group]:
        """Paused groups, those with the oldest tokens first: they must be trained soonest."""
        return sorted((self.untrained[group_id] for group_id in self.paused), key=oldest_first)

    def batch(self, group: Group) -> None:
        """Hand a ready group to training."""
        if not group.ready:
            raise ValueError(f"group {group.group_id} is not ready: {group.open} of its members have no reward")
        self._leave_untrained(group)
        self.batched[group.group_id] = group

    def train(self) -> int:
        """The optimizer stepped on the batch: its groups end as trained. Returns the slots that they used."""
        slots = sum(group.size for group in self.batched.values())
        self.trained += sum(len(group.members) for group in self.batched.values())
        self.batched = {}
        return slots

    def versions(self) -> list[tuple[int, int]]:
        """(oldest version, weight) of the untrained groups, ascending."""
        return sorted(self.by_version.items())

    def stale_groups(self, version: int) -> list[Group]:
        """Untrained groups whose oldest token may be of an older version, oldest launch first."""
        if not any(v < version for v in self.by_version):
            return []
        return [g for g in self.untrained.values() if g.oldest_version < version]

    def accounting(self) -> Accounting:
        """Counts for the invariant; ``in_flight`` is counted from the groups, not from the other three."""
        return Accounting(
            issued=self.issued,
            trained=self.trained,
            dropped={str(reason): count for reason, count in sorted(self.dropped.items())},
            in_flight=sum(len(group.members) for group in (*self.untrained.values(), *self.batched.values())),
        )

    # ---- indexes ---------------------------------------------------------------------------------

    def _dropped(self, reason: DropReason, count: int, tokens: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.wasted_tokens += tokens

    def _update_oldest_version(self, group: Group) -> None:
        """A member's oldest version changed, or the member with the oldest one left."""
        oldest = min(m.oldest_version for m in group.members.values())
        if oldest != group.oldest_version:
            self._count_version(group, -1)
            group.oldest_version = oldest
            self._count_version(group, 1)

    def _count_version(self, group: Group, sign: int) -> None:
        version = group.oldest_version
        self.by_version[version] = self.by_version.get(version, 0) + sign * group.weight
        if not self.by_version[version]:
            del self.by_version[version]

    def _note_ready(self, group: Group) -> None:
        if group.open == 0:
            self.resume(group)
            if group.group_id not in self.ready:
                self.ready.append(group.group_id)

    def _leave_untrained(self, group: Group) -> None:
        del self.untrained[group.group_id]
        self._count_version(group, -1)
        self.resume(group)
        if group.group_id in self.ready:
            self.ready.remove(group.group_id)
