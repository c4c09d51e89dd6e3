"""Protocols of the two policies of control, with their inputs and results: ``RoundPolicy`` forms rounds, ``GroupSizer``
chooses the group size.

A policy is a small object in a file of its own (``policies``, or a file of the user), which ``Control`` gets by its
constructor. It never touches groups, streams or time; ``snapshot`` returns what it has learnt. It runs wherever control
runs: in the controller and in the simulator.

Control asks a round policy after every event:

1. ``launch``: may groups be launched now, how many, from where and how large?
2. ``may_join``: may this ready group join the open batch?
3. ``remainder``: the batch is full; what happens to the groups that are not in it?"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from streamrl.base.types import DropReason
from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.buffers.slots import may_take
from streamrl.control.actions import Decision
from streamrl.control.events import Measurement
from streamrl.control.run_state import GroupLengths
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import StalePolicy


class Source(StrEnum):
    """Source of the groups of a launch. ``fresh``: prompts from the source of prompts. ``queue``: prompts that wait in
    the queue, since a race deferred them, the end of a round stopped them, or a cohort was loaded. ``paused``: groups
    that were paused and continue from their tokens. ``cohort``: no groups; prompts are drawn into the queue."""

    FRESH = "fresh"
    QUEUE = "queue"
    PAUSED = "paused"
    COHORT = "cohort"


PolicyState = dict[str, object]
"""State of a policy or a sizer in a snapshot."""


class Remainder(StrEnum):
    """Handling of groups that are not in a full batch. ``keep``: groups go on, and a later batch takes them.
    ``requeue``: groups are dropped, and their prompts join the queue. ``pause``: groups stop, keep their tokens and are
    resumed under the next version."""

    KEEP = "keep"
    REQUEUE = "requeue"
    PAUSE = "pause"


class Launch(Struct, frozen=True, kw_only=True):
    """A launch of ``groups`` groups of ``size`` trajectories each.

    ``source``: source of the groups;
    ``size``: trajectories launched for each group;
    ``round_kind``: name of the round in metrics (``synchronous``, ``short``, ``long``, ``sorted``, ...);
    ``keep``: trajectories of a group that a batch takes, the first that are rewarded (0: all);
    ``group_size``: group size of the round that this launch opens (0: the size in the view);
    ``target``: trajectories that close the batch of this round (0: those of the recipe);
    ``queued_at``: group size at which prompts taken from the queue were deferred (0: any);
    ``copies``: times that each prompt of a cohort enters the queue;
    ``because``: decision for this kind of round (None: there was no choice)."""

    groups: int
    source: Source
    size: int
    round_kind: str
    keep: int = 0
    group_size: int = 0
    target: int = 0
    queued_at: int = 0
    copies: int = 1
    because: Decision | None = None


class RoundView(Struct, frozen=True, kw_only=True):
    """Facts that a policy may use. Counts are groups unless their description says otherwise.

    ``trainer_version``, ``live_version``: versions of the trainer and of the engines;
    ``batch_trajectories``: trajectories that one optimizer step consumes;
    ``group_size``: group size of the open round, or of the next one as the group sizing has chosen it;
    ``target``: trajectories that close the open batch;
    ``missing``: trajectories that the batch still takes;
    ``joined``: groups in the batch;
    ``batch_closed``: whether the trainer steps on the batch;
    ``round_kind``: kind of the round of the open batch, empty before its first launch;
    ``untrained``: groups that run or are ready;
    ``untrained_trajectories``: trajectories that batches would take of untrained and paused groups;
    ``paused``: paused groups;
    ``queue``: prompts that wait in the queue, the next one first;
    ``exhausted``: whether the source has no more prompts;
    ``free_slots``: trajectories that may be launched now;
    ``steps_left``: optimizer steps still to make;
    ``when_stale``: rule for groups that become too old;
    ``due``: trajectories of untrained groups by the last trainer version that may train them, ascending;
    ``keeps_prompts``: whether a batch is a number of groups, so that each group counts as ``group_size`` trajectories
      here, whatever its own size."""

    trainer_version: int
    live_version: int
    batch_trajectories: int
    group_size: int
    target: int
    missing: int
    joined: int
    batch_closed: bool
    round_kind: str
    untrained: int
    untrained_trajectories: int
    paused: int
    queue: tuple[PromptRef, ...]
    exhausted: bool
    free_slots: int
    steps_left: int
    when_stale: StalePolicy
    due: tuple[tuple[int, int], ...]
    keeps_prompts: bool = False

    def trajectories_of(self, size: int) -> int:
        """Number of trajectories of the batch that a group of ``size`` fills."""
        return self.group_size if self.keeps_prompts else size

    @property
    def queued(self) -> int:
        """Prompts in the queue."""
        return len(self.queue)

    @property
    def at_barrier(self) -> bool:
        """Return whether the open batch may take groups launched now, and the version that will train them is live."""
        open_batch = not self.batch_closed and self.missing > 0 and self.steps_left > 0
        return open_batch and self.live_version == self.trainer_version

    def leaves_time_for_others(self, candidate: Candidate) -> bool:
        """Return whether every other untrained group can still meet its deadline once ``candidate`` has joined."""
        return may_take(
            candidate.trajectories,
            candidate.deadline,
            self.due,
            now=self.trainer_version,
            missing=self.missing,
            batch=self.batch_trajectories,
        )

    def queue_first(self, groups: int) -> tuple[int, Source]:
        """Number and source of up to ``groups`` groups: from the queue where prompts wait there, else fresh ones."""
        if self.queue:
            return min(groups, self.queued), Source.QUEUE
        return groups, Source.FRESH


class Candidate(Struct, frozen=True, kw_only=True):
    """A ready group that may join the open batch. ``trajectories``: trajectories of the batch that it fills;
    ``tokens``: sampled tokens; ``deadline``: last trainer version that may train it."""

    group_id: int
    trajectories: int
    tokens: int
    deadline: int


class GroupObserved(Struct, frozen=True, kw_only=True):
    """A complete group, or one that its round deferred; reported before any filter drops the group.

    ``size``: members that a batch takes;
    ``lengths``: sampled tokens of each rewarded member, by sample number;
    ``truncated``: members that reached the cap;
    ``prompt_tokens``: length of the prompt, 0 when unknown;
    ``deferred``: whether the round deferred the group;
    ``round_longest``: longest completion of any group of the round when the group was deferred; its members without a
      length are longer."""

    prompt_id: str
    round_kind: str
    size: int
    lengths: tuple[int, ...]
    truncated: int
    prompt_tokens: int
    deferred: bool = False
    round_longest: int = 0


Observation = GroupObserved | Measurement


class RoundPolicy(Protocol):
    """Rules by which rounds are formed. A run makes its policy once, from its ``ControlSettings``.

    ``on_policy``: whether every token is trained by the version that sampled it; only such rounds are submitted in
    advance. ``replays``: whether a requeued prompt draws the same completions again. ``cut_tokens``: sampled tokens
    that fill a batch before it has its trajectories (0: no such limit)."""

    on_policy: bool

    def launch(self, view: RoundView) -> Launch | None:
        """Return the next launch, or None for no launch now. Called after every change, and again after each launch."""

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        """Return whether ``candidate`` may join the open batch. Called for each ready group, oldest first, while the
        batch takes more."""

    def remainder(self, view: RoundView) -> Remainder:
        """Return the handling of the groups that are not in the batch. Called when the batch is full."""

    @property
    def drop_reason(self) -> DropReason:
        """Reason for which groups are dropped when ``remainder`` returns ``requeue``. Any reason but ``lost_race`` and
        ``cut`` counts towards the dropped groups in a row that end a run."""

    def slots(self) -> int:
        """Largest number of trajectories that may be in flight at once."""

    @property
    def replays(self) -> bool: ...

    @property
    def cut_tokens(self) -> int: ...

    def sorted_queue(self, queue: Sequence[PromptRef]) -> Sequence[PromptRef]:
        """Return the queue in the order in which its prompts are launched. Called once prompts have joined the queue,
        before one is taken."""

    def observe(self, observation: Observation) -> None:
        """Learn from ``observation``, in policies that adapt."""

    def snapshot(self) -> PolicyState:
        """State of this policy that a resumed run needs, as values that msgspec encodes."""

    def restore(self, state: PolicyState) -> None:
        """Take over the ``state`` of a snapshot, in a new policy."""


class StatelessRounds:
    """Defaults for a policy that learns nothing and has no state."""

    replays = False
    cut_tokens = 0

    def sorted_queue(self, queue: Sequence[PromptRef]) -> Sequence[PromptRef]:
        """Return the queue unchanged."""
        return queue

    def observe(self, observation: Observation) -> None:
        """Learn nothing."""

    def snapshot(self) -> PolicyState:
        """Return no state."""
        return {}

    def restore(self, state: PolicyState) -> None:
        """Do nothing."""


class SizingDecision(Struct, frozen=True, kw_only=True):
    """Group size of the next round. ``figures``: values of metrics (``sizing/...``); ``notify``: whether the user reads
    the reason even where the size stays."""

    size: int
    reason: str
    figures: dict[str, float]
    notify: bool = False


class GroupSizer(Protocol):
    """Rule of the group size. Control reads ``size`` once a round, and reports the complete groups once a step. Rewards
    are no input."""

    @property
    def size(self) -> int:
        """Group size of the next round."""

    def observe(self, groups: Sequence[GroupLengths], batches: int = 1, earlier_samples: float = 0.0) -> SizingDecision:
        """Learn from all complete groups of one step, before any filter, and decide on the size. Called at most once a
        step. ``batches``: number of batches that the step trained; ``earlier_samples``: mean number of samples in
        the baselines of its prompts beside siblings, where the objective tracks prompts."""

    def snapshot(self) -> PolicyState:
        """State that a resumed run needs."""

    def restore(self, state: PolicyState) -> None:
        """Take over the ``state`` of a snapshot, in a new sizer."""


class FixedSize:
    """``GroupSizer`` with the recipe's group size."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def observe(self, groups: Sequence[GroupLengths], batches: int = 1, earlier_samples: float = 0.0) -> SizingDecision:
        return SizingDecision(size=self._size, reason="fixed by the recipe", figures={})

    def snapshot(self) -> PolicyState:
        return {}

    def restore(self, state: PolicyState) -> None:
        """Do nothing: the recipe has the size."""


class Rules(Struct, frozen=True):
    """Rules for all decisions of control: the settings of the recipe, the two policies, and the number of slots."""

    settings: ControlSettings
    policy: RoundPolicy
    sizer: GroupSizer

    @property
    def slots(self) -> int:
        """Trajectories that may be in flight. A round that is submitted in advance needs as many slots as the batch
        that is being trained."""
        slots = self.policy.slots()
        if self.settings.presubmit and self.policy.on_policy:
            return 2 * slots
        return slots
