"""What a round policy sees and answers. A policy is a small object in a file of its own; it holds no state of the run
beyond what it says in ``snapshot``, and never touches groups, streams or time.

Control asks it after every event:

1. ``launch``: may groups be launched now, how many, from where and how large?
2. ``may_join``: may this ready group join the open batch?
3. ``remainder``: the batch is full; what becomes of the groups that are not in it?
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from streamrl.base.types import DropReason
from streamrl.buffers.slots import may_take
from streamrl.control.actions import Explain
from streamrl.control.events import EnginesMeasured, RoundsAdvised, RoundTimed
from streamrl.recipe.scheduling import StalePolicy


class Source(StrEnum):
    """Where the groups of a launch come from.

    ``fresh``: prompts from the source. ``queue``: prompts that wait in the queue, because they lost a race, were cut,
    or are of a loaded cohort. ``held``: groups that were stopped and go on from their tokens. ``cohort``: nothing is
    launched; so many prompts are drawn into the queue.
    """

    FRESH = "fresh"
    QUEUE = "queue"
    HELD = "held"
    COHORT = "cohort"


class Remainder(StrEnum):
    """What becomes of groups that are not in a full batch.

    ``run_on``: nothing, a later batch takes them. ``requeue``: they end (``lost_race`` or ``cut``) and their prompts
    join the queue. ``hold``: they stop, keep their tokens and are resumed under the next version.
    """

    RUN_ON = "run_on"
    REQUEUE = "requeue"
    HOLD = "hold"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """``groups`` of ``size`` trajectories each, of which the first ``keep`` (0: all) that are rewarded are kept.

    ``round_kind``: what this round is called in metrics (``synchronous``, ``short``, ``long``, ``sorted``, ...).
    ``target``: trajectories that close the batch, where the round opens with this launch (0: those of the recipe).
    ``copies``: how often each prompt of a cohort enters the queue. ``because``: why this and not another kind of round,
    for the event log (None: nothing was decided).
    """

    groups: int
    source: Source
    size: int
    round_kind: str
    keep: int = 0
    target: int = 0
    copies: int = 1
    because: Explain | None = None


class RoundView(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may look at. Counts are groups unless they say otherwise.

    ``batch_trajectories``: what one optimizer step consumes; ``group_size``: chosen for this round by the group sizing;
    ``target``: trajectories that close the open batch; ``seats``: how many of them are missing; ``joined``: groups in
    it. ``round_kind``: of the round that the open batch belongs to, empty before its first launch. ``untrained``:
    groups that run or are ready, ``untrained_trajectories``: what batches would take of those and of held ones;
    ``held``: groups that were stopped. ``queued``: prompts in the queue that a batch could take now; ``exhausted``: the
    source has no more. ``due``: trajectories of untrained groups by the
    last trainer version that may train them, ascending. ``unseated``: ready groups whose domain has no seat left.
    ``long_due``: it is the turn of those that lost at ``group_size``, as many batches of them as wait.
    """

    trainer_version: int
    live_version: int
    batch_trajectories: int
    group_size: int
    target: int
    seats: int
    joined: int
    batch_closed: bool
    round_kind: str
    untrained: int
    untrained_trajectories: int
    held: int
    queued: int
    exhausted: bool
    free_slots: int
    steps_left: int
    when_stale: StalePolicy
    due: tuple[tuple[int, int], ...]
    unseated: int = 0
    long_due: bool = False

    @property
    def at_barrier(self) -> bool:
        """The open batch may take what is launched now, and the version that will train it is live."""
        open_batch = not self.batch_closed and self.seats > 0 and self.steps_left > 0
        return open_batch and self.live_version == self.trainer_version

    def leaves_time_for_others(self, candidate: Candidate) -> bool:
        """Whether every other untrained group can still be trained by its deadline once ``candidate`` has joined."""
        return may_take(
            candidate.trajectories,
            candidate.deadline,
            self.due,
            now=self.trainer_version,
            seats=self.seats,
            batch=self.batch_trajectories,
        )


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A ready group that asks to join. ``deadline``: the last trainer version that may train it."""

    group_id: int
    trajectories: int
    tokens: int
    deadline: int


class GroupObserved(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose members all ended, or ``size`` of them were kept; told before any filter drops it.

    ``lengths``: sampled tokens of each rewarded member, by sample number. ``truncated``: members that reached the cap.
    ``prompt_tokens``: 0 when unknown. ``cut``: it lost its race, so that ``lengths`` are those of the members that had
    ended, and the others are longer than ``cut_at``, the longest length that any group of the round had by then.
    """

    round_kind: str
    size: int
    lengths: tuple[int, ...]
    truncated: int
    prompt_tokens: int
    cut: bool = False
    cut_at: int = 0


Observation = GroupObserved | EnginesMeasured | RoundTimed | RoundsAdvised


class RoundPolicy(Protocol):
    """How rounds are formed. Made once a run with its ``ControlSettings``.

    ``on_policy``: every token is trained by the version that sampled it; only such rounds are submitted in advance.
    """

    on_policy: bool

    def launch(self, view: RoundView) -> Launch | None:
        """Asked whenever something changed, again after each launch. None: nothing now."""
        ...

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        """Asked for each ready group, oldest first, while the open batch has seats.

        A group that is refused is asked for again when a group was dropped or the batch changes, not each time that
        another one becomes ready.
        """
        ...

    def remainder(self, view: RoundView) -> Remainder:
        """Asked once, when the batch is full."""
        ...

    @property
    def losing(self) -> DropReason:
        """Why groups end that ``requeue`` drops."""
        ...

    def slots(self) -> int:
        """Trajectories that may be in flight at once, at most."""
        ...

    @property
    def replays(self) -> bool:
        """Whether a prompt that was requeued draws the same noise again."""
        ...

    @property
    def predicts_lengths(self) -> bool:
        """Whether lengths of prompts are predicted, and the queue is served shortest first."""
        ...

    @property
    def cut_tokens(self) -> int:
        """Sampled tokens that fill a batch before it has its trajectories; 0: never."""
        ...

    def observe(self, seen: Observation) -> None:
        """What a policy that adapts learns from."""
        ...

    def snapshot(self) -> dict[str, object]:
        """What a resumed run needs of this policy: values that msgspec encodes."""
        ...

    def restore(self, state: dict[str, object]) -> None:
        """The inverse, on a new policy."""
        ...


class StatelessRounds:
    """What most policies answer to the last six questions: nothing special, nothing learnt."""

    replays = False
    predicts_lengths = False
    cut_tokens = 0

    def observe(self, seen: Observation) -> None:
        """Nothing is learnt."""

    def snapshot(self) -> dict[str, object]:
        """No state."""
        return {}

    def restore(self, state: dict[str, object]) -> None:
        """No state."""
