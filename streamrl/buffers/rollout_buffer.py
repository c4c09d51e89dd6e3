"""The rollout buffer: the life of every trajectory and group, and the accounting.

Pure and synchronous. It holds identities, sizes and states, never tokens. Every call costs time in proportion to one
group at most, whatever is in flight.

A trajectory is ``IN_FLIGHT`` (sampled, held with its tokens, or being scored) -> ``SCORED`` -> ``BATCHED`` -> trained,
or dropped with one reason from any of them. A group is open until each member ended, then ready, then batched.

At every instant ``issued == trained + sum(dropped.values()) + in_flight``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from streamrl.base.types import DropReason, FinishReason, Record, TrajectoryId
from streamrl.buffers.accounting import Accounting


class TrajectoryState(StrEnum):
    """Where a trajectory that has not ended is."""

    IN_FLIGHT = "in_flight"
    SCORED = "scored"
    BATCHED = "batched"


class PromptTicket(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that may be launched. ``attempt`` and ``noise`` (-1: a new one) say which draw of it this is;
    ``tokens``: of the prompt, 0 when unknown; ``group_size``: of its cohort or its last draw, 0 before the first."""

    prompt_id: str
    attempt: int = 0
    noise: int = -1
    tokens: int = 0
    domain: str = ""
    group_size: int = 0


class Member(msgspec.Struct, kw_only=True):
    """One trajectory that has not ended. ``oldest_version``: launch version until the engine told the real one.
    ``separate_rewards``: by name, those that are compared with their siblings' alone; empty: ``reward`` is."""

    id: TrajectoryId
    state: TrajectoryState
    oldest_version: int
    reward: float = 0.0
    tokens: int = 0
    finish_reason: FinishReason | None = None
    separate_rewards: dict[str, float] = {}


class Group(msgspec.Struct, kw_only=True):
    """The live members of one prompt.

    ``keep``: how many of its members a batch takes; ``open``: members that were not scored; ``held``: they stopped and
    keep their tokens; ``batch_id`` None until it is handed to training; ``oldest_version``: oldest policy version that
    one of its tokens may have; ``queued``: its prompt waited in the queue, not among the fresh ones.
    """

    group_id: int
    ticket: PromptTicket
    launch_version: int
    oldest_version: int
    size: int
    keep: int
    round_kind: str
    members: dict[TrajectoryId, Member]
    open: int
    held: bool = False
    batch_id: int | None = None
    queued: bool = False

    @property
    def prompt_id(self) -> str:
        """Of its prompt."""
        return self.ticket.prompt_id

    @property
    def attempt(self) -> int:
        """How often its prompt was launched before."""
        return self.ticket.attempt

    @property
    def ready(self) -> bool:
        """Every member ended, and it is not yet in a batch."""
        return self.open == 0 and self.batch_id is None and bool(self.members)

    @property
    def tokens(self) -> int:
        """Sampled tokens of its finished members."""
        return sum(m.tokens for m in self.members.values())

    @property
    def longest(self) -> int:
        """Sampled tokens of its longest finished member."""
        return max((m.tokens for m in self.members.values()), default=0)

    @property
    def zero_variance(self) -> bool:
        """All rewards are equal, or each of those that are compared alone: no signal for a group baseline."""
        members = [m.separate_rewards or {"": m.reward} for m in self.members.values()]
        first: dict[str, float] = {}
        return all(first.setdefault(name, value) == value for rewards in members for name, value in rewards.items())

    def open_ids(self) -> tuple[TrajectoryId, ...]:
        """Members that were not scored."""
        return tuple(i for i, m in self.members.items() if m.state is TrajectoryState.IN_FLIGHT)


class KeptGroup(Record, frozen=True):
    """A ``Group`` as a record; ``members`` in their order."""

    group_id: int
    ticket: PromptTicket
    launch_version: int
    oldest_version: int
    size: int
    keep: int
    round_kind: str
    members: tuple[Member, ...]
    open: int
    held: bool = False
    batch_id: int | None = None
    queued: bool = False


class KeptBuffer(Record, frozen=True):
    """A ``RolloutBuffer`` as a record. ``groups``: all of them, oldest launch first; ``ready``, ``held``, ``batched``:
    ids of those that are, each in the order in which they became so."""

    groups: tuple[KeptGroup, ...] = ()
    ready: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    batched: tuple[int, ...] = ()
    issued: int = 0
    trained: int = 0
    dropped: dict[DropReason, int] = {}
    wasted_tokens: int = 0


def oldest_first(group: Group) -> tuple[int, int]:
    """Sorts groups by their oldest token: who has it must be trained soonest."""
    return group.oldest_version, group.group_id


class RolloutBuffer:
    """Groups that have not ended, and counters of those that have.

    ``groups``: all of them; ``untrained``: those that are not in a batch, oldest launch first; ``ready``: those of them
    that may be trained. Read them; change them only through the methods.
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.untrained: dict[int, Group] = {}
        self.ready: dict[int, Group] = {}
        self.issued = 0
        self.trained = 0
        self.dropped: Counter[DropReason] = Counter()
        self.wasted_tokens = 0
        self._batched: dict[int, list[Group]] = {}
        self._by_version: Counter[int] = Counter()
        self._held: dict[int, Group] = {}

    def admit(
        self,
        ticket: PromptTicket,
        group_id: int,
        size: int,
        *,
        keep: int,
        policy_version: int,
        round_kind: str,
        queued: bool = False,
    ) -> Group:
        """Launch a group of ``size`` trajectories that ``policy_version`` will sample."""
        if group_id in self.groups:
            raise ValueError(f"group {group_id} is in the buffer already")
        ids = [
            TrajectoryId(prompt_id=ticket.prompt_id, group_id=group_id, sample=i, attempt=ticket.attempt)
            for i in range(size)
        ]
        group = Group(
            group_id=group_id,
            ticket=ticket,
            launch_version=policy_version,
            oldest_version=policy_version,
            size=size,
            keep=keep,
            round_kind=round_kind,
            members={i: Member(id=i, state=TrajectoryState.IN_FLIGHT, oldest_version=policy_version) for i in ids},
            open=size,
            queued=queued,
        )
        self.groups[group_id] = self.untrained[group_id] = group
        self._by_version[policy_version] += keep
        self.issued += size
        return group

    def member(self, trajectory_id: TrajectoryId) -> Member | None:
        """The live trajectory, or None when it has ended (a late result)."""
        group = self.groups.get(trajectory_id.group_id)
        return None if group is None else group.members.get(trajectory_id)

    def score(
        self,
        trajectory_id: TrajectoryId,
        *,
        reward: float,
        tokens: int,
        reason: FinishReason,
        oldest: int,
        separate: dict[str, float] | None = None,
    ) -> Group | None:
        """Record a reward. None (and nothing changes) when the trajectory ended before or was scored already."""
        member = self.member(trajectory_id)
        if member is None or member.state is not TrajectoryState.IN_FLIGHT:
            return None
        group = self.groups[trajectory_id.group_id]
        member.state = TrajectoryState.SCORED
        member.reward, member.tokens, member.finish_reason = reward, tokens, reason
        member.separate_rewards = separate or {}
        if oldest != member.oldest_version:
            member.oldest_version = oldest
            self._date(group)
        group.open -= 1
        self._note_ready(group)
        return group

    def drop_member(self, trajectory_id: TrajectoryId, reason: DropReason, *, tokens: int = 0) -> Group | None:
        """End one trajectory of a group that is not batched; the group shrinks. None for one that ended before."""
        member = self.member(trajectory_id)
        if member is None or member.state is TrajectoryState.BATCHED:
            self.wasted_tokens += tokens  # it was dropped while it ran: what it had sampled is known only now
            return None
        group = self.groups[trajectory_id.group_id]
        del group.members[trajectory_id]
        group.open -= member.state is TrajectoryState.IN_FLIGHT
        self.dropped[reason] += 1
        self.wasted_tokens += tokens or member.tokens
        if group.members:
            if member.oldest_version == group.oldest_version:
                self._date(group)
            self._note_ready(group)
        else:
            self._remove(group)
        return group

    def drop_group(self, group_id: int, reason: DropReason) -> Group:
        """End every trajectory of a group with one reason."""
        group = self.groups[group_id]
        self._remove(group)
        self.dropped[reason] += len(group.members)
        self.wasted_tokens += group.tokens
        return group

    def hold(self, group: Group) -> None:
        """Its open members stop and keep their tokens."""
        group.held = True
        self._held[group.group_id] = group

    def resume(self, group: Group) -> None:
        """The inverse of ``hold``."""
        group.held = False
        self._held.pop(group.group_id, None)

    def batch(self, group_id: int, batch_id: int) -> Group:
        """Hand a ready group to training."""
        group = self.groups[group_id]
        if not group.ready:
            raise ValueError(f"group {group_id} is not ready: {[str(m.state) for m in group.members.values()]}")
        self._forget_untrained(group)
        group.batch_id = batch_id
        self._batched.setdefault(batch_id, []).append(group)
        for member in group.members.values():
            member.state = TrajectoryState.BATCHED
        return group

    def train(self, batch_id: int) -> list[Group]:
        """The optimizer stepped on ``batch_id``: its groups end as trained."""
        ended = self._batched.pop(batch_id, [])
        for group in ended:
            self.trained += len(group.members)
            del self.groups[group.group_id]
        return ended

    def versions(self) -> list[tuple[int, int]]:
        """(oldest version, trajectories that batches take) of the untrained groups, ascending."""
        return sorted(self._by_version.items())

    def older_than(self, version: int) -> list[Group]:
        """Untrained groups whose oldest token may be of an older version, oldest launch first."""
        if not any(v < version for v in self._by_version):
            return []
        return [g for g in self.untrained.values() if g.oldest_version < version]

    def in_flight(self, groups: Iterable[Group] | None = None) -> int:
        """Trajectories that have not ended, counted from the groups themselves."""
        return sum(len(g.members) for g in (self.groups.values() if groups is None else groups))

    def held(self) -> list[Group]:
        """Untrained groups that were stopped, those with the oldest tokens first: they must be trained soonest."""
        return sorted(self._held.values(), key=oldest_first)

    @property
    def held_groups(self) -> int:
        """How many they are."""
        return len(self._held)

    def accounting(self) -> Accounting:
        """Counts for the invariant; ``in_flight`` is counted independently of the other three."""
        return Accounting(
            issued=self.issued,
            trained=self.trained,
            dropped={str(reason): count for reason, count in sorted(self.dropped.items())},
            in_flight=self.in_flight(),
        )

    # ---- as a record -----------------------------------------------------------------------------

    def keep(self) -> KeptBuffer:
        """All of it, as a value that does not change with the buffer."""
        return KeptBuffer(
            groups=tuple(_kept_group(group) for group in self.groups.values()),
            ready=tuple(self.ready),
            held=tuple(self._held),
            batched=tuple(group.group_id for groups in self._batched.values() for group in groups),
            issued=self.issued,
            trained=self.trained,
            dropped=dict(self.dropped),
            wasted_tokens=self.wasted_tokens,
        )

    def restore(self, kept: KeptBuffer) -> None:
        """The inverse, on a new buffer. The index by version is made again from the groups."""
        self.issued, self.trained = kept.issued, kept.trained
        self.dropped, self.wasted_tokens = Counter(kept.dropped), kept.wasted_tokens
        for record in kept.groups:
            group = self.groups[record.group_id] = _group_of(record)
            if group.batch_id is None:
                self.untrained[group.group_id] = group
                self._count_version(group, 1)
        self.ready = {group_id: self.groups[group_id] for group_id in kept.ready}
        self._held = {group_id: self.groups[group_id] for group_id in kept.held}
        for group_id in kept.batched:
            group = self.groups[group_id]
            if group.batch_id is None:
                raise ValueError(f"group {group_id} is kept as batched, and as of no batch: the record is damaged")
            self._batched.setdefault(group.batch_id, []).append(group)

    # ---- indexes ---------------------------------------------------------------------------------

    def _date(self, group: Group) -> None:
        """A member's oldest version changed, or the member with the oldest one left."""
        oldest = min(m.oldest_version for m in group.members.values())
        if oldest != group.oldest_version:
            self._count_version(group, -1)
            group.oldest_version = oldest
            self._count_version(group, 1)

    def _count_version(self, group: Group, sign: int) -> None:
        self._by_version[group.oldest_version] += sign * group.keep
        if not self._by_version[group.oldest_version]:
            del self._by_version[group.oldest_version]

    def _note_ready(self, group: Group) -> None:
        if group.open == 0:
            self.resume(group)
            self.ready[group.group_id] = group

    def _forget_untrained(self, group: Group) -> None:
        if self.untrained.pop(group.group_id, None) is not None:
            self._count_version(group, -1)
        self.ready.pop(group.group_id, None)
        self._held.pop(group.group_id, None)

    def _remove(self, group: Group) -> None:
        self._forget_untrained(group)
        del self.groups[group.group_id]
        if group.batch_id is not None:
            self._batched[group.batch_id].remove(group)
            if not self._batched[group.batch_id]:
                del self._batched[group.batch_id]


def _kept_group(group: Group) -> KeptGroup:
    """A copy: members change while they are in the buffer."""
    fields = msgspec.structs.asdict(group)
    members = tuple(msgspec.structs.replace(member) for member in group.members.values())
    return KeptGroup(**(fields | {"members": members}))


def _group_of(kept: KeptGroup) -> Group:
    members = {member.id: msgspec.structs.replace(member) for member in kept.members}
    return Group(**(msgspec.structs.asdict(kept) | {"members": members}))
