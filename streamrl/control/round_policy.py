"""The two policies that control asks, what they see and what they answer: ``RoundPolicy`` forms rounds, ``GroupSizer``
chooses how large groups are. A policy is a small object in a file of its own, which comes in by constructor. It never
touches groups, streams or time, and what it learns it gives in ``snapshot``.

Control asks a round policy after every event:

1. ``launch``: may groups be launched now, how many, from where and how large?
2. ``may_join``: may this ready group join the open batch?
3. ``remainder``: the batch is full; what happens to the groups that are not in it?"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from streamrl.base.types import DropReason
from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.buffers.slots import may_take
from streamrl.control.actions import Decision
from streamrl.control.events import Measurement
from streamrl.control.model import GroupLengths
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import StalePolicy


class Source(StrEnum):
    """Source of the groups of a launch. ``fresh``: prompts from the source. ``queue``: prompts that wait in the queue,
    because they were deferred in a race, were cut, or are of a loaded cohort. ``paused``: groups that were stopped and
    continue from their tokens. ``cohort``: nothing is launched; so many prompts are drawn into the queue."""

    FRESH = "fresh"
    QUEUE = "queue"
    PAUSED = "paused"
    COHORT = "cohort"


class Remainder(StrEnum):
    """Handling of groups that are not in a full batch. ``keep``: nothing, a later batch takes them. ``requeue``: they
    end and their prompts join the queue. ``pause``: they stop, keep their tokens and are resumed under the next
    version."""

    KEEP = "keep"
    REQUEUE = "requeue"
    PAUSE = "pause"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """``groups`` of ``size`` trajectories each, of which the first ``keep`` (0: all) that are rewarded are kept.

    ``round_kind``: what this round is called in metrics (``synchronous``, ``short``, ``long``, ``sorted``, ...).
    ``group_size``: of the round that opens with this launch, where it is not the one that the view gives (0);
    ``target``: trajectories that close its batch (0: those of the recipe). ``queued_at``: take only prompts from the
    queue that were deferred at this group size (0: any). ``copies``: how often each prompt of a cohort enters the
    queue. ``because``: why this and not another kind of round (None: nothing was decided)."""

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


class RoundView(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a policy may use. Counts are groups unless they say otherwise.

    ``batch_trajectories``: what one optimizer step consumes; ``group_size``: of the open round, or chosen for the next
    one by the group sizing; ``keeps_prompts``: a batch is so many groups, so that here each of them counts as
    ``group_size`` trajectories, whatever its own size. ``target``: trajectories that close the open batch; ``missing``:
    trajectories that it still takes; ``joined``: groups in it. ``round_kind``: of the round that the open batch belongs
    to, empty before its first launch. ``untrained``: groups that run or are ready, ``untrained_trajectories``: what
    batches would take of those and of paused ones; ``paused``: groups that were stopped. ``queue``: prompts that wait
    in the queue, next one first; ``exhausted``: the source has no more. ``due``: trajectories of untrained groups by
    the last trainer version that may train them, ascending."""

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
        """Count the trajectories of the batch that a group of ``size`` fills."""
        return self.group_size if self.keeps_prompts else size

    @property
    def queued(self) -> int:
        """Prompts in the queue."""
        return len(self.queue)

    @property
    def at_barrier(self) -> bool:
        """The open batch may take what is launched now, and the version that will train it is live."""
        open_batch = not self.batch_closed and self.missing > 0 and self.steps_left > 0
        return open_batch and self.live_version == self.trainer_version

    def leaves_time_for_others(self, candidate: Candidate) -> bool:
        """Return whether every other untrained group can still be trained by its deadline once ``candidate`` has
        joined."""
        return may_take(
            candidate.trajectories,
            candidate.deadline,
            self.due,
            now=self.trainer_version,
            missing=self.missing,
            batch=self.batch_trajectories,
        )

    def queue_first(self, groups: int) -> tuple[int, Source]:
        """Take so many groups from the queue where prompts wait there, and otherwise from the source."""
        return (min(groups, self.queued), Source.QUEUE) if self.queue else (groups, Source.FRESH)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A ready group that asks to join. ``deadline``: the last trainer version that may train it."""

    group_id: int
    trajectories: int
    tokens: int
    deadline: int


class GroupObserved(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose members all ended, or ``size`` of them were kept; reported before any filter drops it.

    ``lengths``: sampled tokens of each rewarded member, by sample number. ``truncated``: members that reached the cap.
    ``prompt_tokens``: 0 when unknown. ``cut``: it was deferred, so that ``lengths`` are those of the members that had
    ended, and the others are longer than ``cut_at``, the longest length that any group of the round had by then."""

    prompt_id: str
    round_kind: str
    size: int
    lengths: tuple[int, ...]
    truncated: int
    prompt_tokens: int
    cut: bool = False
    cut_at: int = 0


Observation = GroupObserved | Measurement


class RoundPolicy(Protocol):
    """Rules by which rounds are formed. Made once a run with its ``ControlSettings``.

    ``on_policy``: every token is trained by the version that sampled it; only such rounds are submitted in advance.
    ``replays``: a prompt that was requeued draws the same completions again. ``cut_tokens``: sampled tokens that fill a
    batch before it has its trajectories (0: never)."""

    on_policy: bool

    def launch(self, view: RoundView) -> Launch | None:
        """Asked whenever something changed, again after each launch. None: nothing now."""
        ...

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        """Asked for each ready group, oldest first, while the open batch takes more."""
        ...

    def remainder(self, view: RoundView) -> Remainder:
        """Asked when the batch is full."""
        ...

    @property
    def drop_reason(self) -> DropReason:
        """Reason for which groups are dropped when ``remainder`` answers ``requeue``. Any reason but ``lost_race`` and
        ``cut`` counts towards the dropped groups in a row that end a run."""
        ...

    def slots(self) -> int:
        """Trajectories that may be in flight at once, at most."""
        ...

    @property
    def replays(self) -> bool: ...

    @property
    def cut_tokens(self) -> int: ...

    def sorted_queue(self, queue: Sequence[PromptRef]) -> Sequence[PromptRef]:
        """The order in which the queue is served. Asked when prompts joined it, before one is taken."""
        ...

    def observe(self, seen: Observation) -> None:
        """Learn from what happened; for policies that adapt."""
        ...

    def snapshot(self) -> dict[str, object]:
        """State that a resumed run needs of this policy: values that msgspec encodes."""
        ...

    def restore(self, state: dict[str, object]) -> None:
        """The inverse, on a new policy."""
        ...


class StatelessRounds:
    """Defaults for a policy without state: nothing special, nothing learnt."""

    replays = False
    cut_tokens = 0

    def sorted_queue(self, queue: Sequence[PromptRef]) -> Sequence[PromptRef]:
        """Return the queue as it is."""
        return queue

    def observe(self, seen: Observation) -> None:
        """Learn nothing."""

    def snapshot(self) -> dict[str, object]:
        """Return no state."""
        return {}

    def restore(self, state: dict[str, object]) -> None:
        """Do nothing."""


class SizingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the next round's groups, why, and figures for metrics (``sizing/...``). ``notify``: the user reads
    the reason also where the size stays."""

    size: int
    reason: str
    figures: dict[str, float]
    notify: bool = False


class GroupSizer(Protocol):
    """Rule of the group size: asked for ``size`` once a round, given what ended once a step. Reward is not an input."""

    @property
    def size(self) -> int:
        """Group size of the next round."""
        ...

    def observe(self, groups: Sequence[GroupLengths], batches: int = 1) -> SizingDecision:
        """All complete groups of one step, before any filter. At most once a step. ``batches``: that it trained."""
        ...

    def snapshot(self) -> dict[str, object]:
        """State that a resumed run needs."""
        ...

    def restore(self, state: dict[str, object]) -> None:
        """The inverse, on a new sizer."""
        ...


class FixedSize:
    """``GroupSizer`` with the recipe's group size."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def observe(self, groups: Sequence[GroupLengths], batches: int = 1) -> SizingDecision:
        return SizingDecision(size=self._size, reason="fixed by the recipe", figures={})

    def snapshot(self) -> dict[str, object]:
        return {}

    def restore(self, state: dict[str, object]) -> None:
        """Do nothing: the size is the recipe's."""


class Rules(msgspec.Struct, frozen=True):
    """Rules that decide beside the state: the recipe's settings, the two policies, and the number of slots."""

    settings: ControlSettings
    policy: RoundPolicy
    sizer: GroupSizer

    @property
    def slots(self) -> int:
        """Trajectories that may be in flight. Groups that are submitted in advance take slots beside the batch that is
        being trained."""
        ahead = self.settings.presubmit and self.policy.on_policy
        return self.policy.slots() * (2 if ahead else 1)
