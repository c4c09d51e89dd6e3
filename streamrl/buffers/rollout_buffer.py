"""The rollout buffer: the state of every trajectory and group, and the accounting. Part of control's state
(``control``), in the controller's process and in simulations; a checkpoint stores it.

It has identities, sizes and states, but no tokens, so that it can be encoded as it is. A method that changes one
trajectory or group costs time in proportion to one group at most; ``train`` and methods that list groups cost more.

A trajectory is in flight (sampled, paused, or being scored), then scored, then part of a batch, then trained; in each
of these states it may be dropped, with one reason. At every moment
``issued == trained + sum(dropped.values()) + in_flight`` (``Accounting``)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from streamrl.base.types import Baseline, DropReason, FinishReason, TrajectoryId


class Accounting(Struct, frozen=True, kw_only=True):
    """Numbers of trajectories since the run began."""

    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int


class PromptRef(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt that may be launched.

    ``attempt``: number of earlier launches;
    ``seed_base``: number from which its seeds are derived (None: the number of its group);
    ``tokens``: length of the prompt (0: unknown);
    ``group_size``: group size of its cohort or of its last launch (0: not launched yet)."""

    prompt_id: str
    attempt: int = 0
    seed_base: int | None = None
    tokens: int = 0
    group_size: int = 0


class Member(Struct, kw_only=True, omit_defaults=True):
    """One trajectory that is neither trained nor dropped.

    ``oldest_version``: oldest policy version of its tokens; the launch version until the engine reports the tokens;
    ``finish_reason``: reason to stop sampling (None: not scored yet);
    ``reward``: combined reward;
    ``tokens``: number of sampled tokens;
    ``separate_rewards``: rewards by name, of which each gets an advantage of its own (empty: ``reward`` gets one);
    ``turn_rewards``: parts of ``reward`` by turn, up to the last one that is not 0 (empty: turns get no advantages);
    ``signal``: whether it has a gradient whatever the siblings' rewards are;
    ``seconds``: time from launch to score."""

    oldest_version: int
    finish_reason: FinishReason | None = None
    reward: float = 0.0
    tokens: int = 0
    separate_rewards: dict[str, float] = {}
    turn_rewards: tuple[float, ...] = ()
    seconds: float = 0.0
    signal: bool = False

    @property
    def scored(self) -> bool:
        """Return whether the trajectory has a reward."""
        return self.finish_reason is not None


class Group(Struct, kw_only=True, omit_defaults=True):
    """The trajectories of one launch of a prompt.

    ``launch_version``: live policy version at the launch;
    ``oldest_version``: oldest policy version that one of its tokens may have;
    ``size``: number of launched trajectories, and of the slots that the group uses until it ends;
    ``keep``: number of trajectories that a batch takes;
    ``weight``: share of a batch that the group fills (``ControlSettings.weight_of``);
    ``round_kind``: kind of the round that launched the group;
    ``members``: trajectories that are neither trained nor dropped, by sample number;
    ``open``: number of members without a reward;
    ``paused``: whether the open members are paused and keep their tokens;
    ``queued``: whether the prompt came from the queue of deferred prompts, not from a draw;
    ``sampling``: sampling parameters that differ from the recipe's;
    ``baseline``: earlier rewards of the prompt, from when the group joins a batch, where the objective tracks them."""

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
    baseline: Baseline | None = None

    @property
    def seed_base(self) -> int:
        """Number from which the seeds of the trajectories are derived."""
        return self.group_id if self.prompt.seed_base is None else self.prompt.seed_base

    @property
    def ready(self) -> bool:
        """Return whether every member has a reward."""
        return self.open == 0 and bool(self.members)

    @property
    def tokens(self) -> int:
        """Number of sampled tokens of the scored members."""
        return sum(member.tokens for member in self.members.values())

    @property
    def longest(self) -> int:
        """Number of sampled tokens of the longest scored member."""
        return max((member.tokens for member in self.members.values()), default=0)

    @property
    def zero_variance(self) -> bool:
        """Return whether all members have the same rewards, so that a baseline of the group leaves no signal."""
        first: dict[str, float] = {}
        if len({member.turn_rewards for member in self.members.values()}) > 1:
            return False
        if any(member.signal for member in self.members.values()):
            return False
        for member in self.members.values():
            rewards = member.separate_rewards or {"": member.reward}
            for name, value in rewards.items():
                if first.setdefault(name, value) != value:
                    return False
        return True

    @property
    def ids(self) -> tuple[TrajectoryId, ...]:
        """Ids of all members, by sample number."""
        return tuple(self._id(sample) for sample in self.members)

    @property
    def open_ids(self) -> tuple[TrajectoryId, ...]:
        """Ids of the members without a reward."""
        return tuple(self._id(sample) for sample, member in self.members.items() if not member.scored)

    def _id(self, sample: int) -> TrajectoryId:
        prompt = self.prompt
        return TrajectoryId(prompt_id=prompt.prompt_id, group_id=self.group_id, sample=sample, attempt=prompt.attempt)


def oldest_first(group: Group) -> tuple[int, int]:
    """Sort key that puts the group with the oldest token first: it must be trained soonest."""
    return group.oldest_version, group.group_id


class RolloutBuffer(Struct, kw_only=True):
    """Groups that have not ended, and counters of ended trajectories. Read the fields; change them through the methods.

    ``untrained``: groups that are in no batch, by group id, oldest launch first;
    ``batched``: groups of the open or closed batch, by group id, in the order in which they joined;
    ``ready``: ids of the untrained groups whose members all have a reward;
    ``paused``: ids of the paused groups;
    ``by_version``: sum of the weights of the untrained groups, by their oldest version;
    ``issued``, ``trained``: numbers of launched and of trained trajectories;
    ``dropped``: number of dropped trajectories, by reason;
    ``wasted_tokens``: sampled tokens of dropped trajectories."""

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
        """All groups, oldest launch first."""
        return iter(sorted((*self.batched.values(), *self.untrained.values()), key=lambda group: group.group_id))

    def __bool__(self) -> bool:
        return bool(self.untrained or self.batched)

    def find(self, group_id: int) -> Group | None:
        """Return the group, or None where it has ended."""
        return self.untrained.get(group_id) or self.batched.get(group_id)

    def member(self, trajectory: TrajectoryId) -> Member | None:
        """Return the trajectory, or None where it has ended (its result is late)."""
        group = self.find(trajectory.group_id)
        return None if group is None else group.members.get(trajectory.sample)

    def admit(self, group: Group) -> None:
        """Add ``group``, which is launched now."""
        if self.find(group.group_id) is not None:
            raise ValueError(f"group {group.group_id} is in the buffer already")
        self.untrained[group.group_id] = group
        self._count_version(group, 1)
        self.issued += group.size

    def score(self, trajectory: TrajectoryId, scored: Member) -> Group | None:
        """Put ``scored``, which has a reward, in the place of a trajectory, and return the group. Returns None, and
        changes nothing, where the trajectory has ended or has a reward."""
        member = self.member(trajectory)
        if member is None or member.scored:
            return None
        group = self.untrained[trajectory.group_id]
        group.members[trajectory.sample] = scored
        if scored.oldest_version != member.oldest_version:
            self._update_oldest_version(group)
        group.open -= 1
        self._note_ready(group)
        return group

    def drop_member(self, trajectory: TrajectoryId, reason: DropReason, *, tokens: int = 0) -> Group | None:
        """Drop one trajectory of a group that is in no batch, and return the group. None for a trajectory that has
        ended."""
        group = self.untrained.get(trajectory.group_id)
        member = None if group is None else group.members.pop(trajectory.sample, None)
        if group is None or member is None:
            self.wasted_tokens += tokens  # it was dropped while it ran, before its number of tokens was known
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
        """Drop every trajectory of a group, with one reason."""
        if self.batched.pop(group.group_id, None) is None:
            self._leave_untrained(group)
        self._dropped(reason, len(group.members), group.tokens)

    def pause(self, group: Group) -> None:
        """Mark a group as paused: its open members are not sampled and keep their tokens."""
        group.paused = True
        self.paused.append(group.group_id)

    def resume(self, group: Group) -> None:
        """Undo ``pause``; does nothing for a group that is not paused."""
        if group.paused:
            group.paused = False
            self.paused.remove(group.group_id)

    def paused_groups(self) -> list[Group]:
        """Return the paused groups, those with the oldest tokens first."""
        return sorted((self.untrained[group_id] for group_id in self.paused), key=oldest_first)

    def batch(self, group: Group) -> None:
        """Move a ready group to the batch."""
        if not group.ready:
            raise ValueError(f"group {group.group_id} is not ready: {group.open} of its members have no reward")
        self._leave_untrained(group)
        self.batched[group.group_id] = group

    def train(self) -> int:
        """End the groups of the batch as trained, after the optimizer step. Returns the number of slots that they
        used."""
        slots = sum(group.size for group in self.batched.values())
        self.trained += sum(len(group.members) for group in self.batched.values())
        self.batched = {}
        return slots

    def versions(self) -> list[tuple[int, int]]:
        """Return (oldest version, sum of the weights) of the untrained groups, ascending."""
        return sorted(self.by_version.items())

    def stale_groups(self, version: int) -> list[Group]:
        """Return the untrained groups that may have a token of a version before ``version``, oldest launch first."""
        if not any(oldest < version for oldest in self.by_version):
            return []
        return [group for group in self.untrained.values() if group.oldest_version < version]

    def accounting(self) -> Accounting:
        """Count trajectories for the invariant; ``in_flight`` is counted from the groups, not from the other counts."""
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
        """Compute the oldest version of the group again, after that of a member changed or a member was dropped."""
        oldest = min(member.oldest_version for member in group.members.values())
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
