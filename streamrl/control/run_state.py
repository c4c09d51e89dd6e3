"""The state of a run in control: one tree of structs, whose encoding is the snapshot.

Only ``apply`` (events), ``decide`` with ``launch`` (orders) and ``steering`` (orders of users) change ``RunState``.
``Pending`` has the orders without an answer, so that a controller that takes over knows which to give again. The state
lives in the controller, in the simulator, and in commands that replay a journal."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from streamrl.base.errors import StreamRLError
from streamrl.base.types import JsonObject, Record
from streamrl.buffers.rollout_buffer import Accounting, Group, PromptRef, RolloutBuffer
from streamrl.buffers.slots import Slots
from streamrl.control import events as on
from streamrl.control.actions import ControlAction, End, Evaluate, PauseTrajectories, ResumeTrajectories, StepOptimizer
from streamrl.control.reward_tracker import RewardTracker

SNAPSHOT_SCHEMA = 4

Claims = Iterator[tuple[bool, str]]
"""Claims of one invariant of a state: (whether the claim holds, the message where it does not)."""


class Batch(Struct, kw_only=True, omit_defaults=True):
    """A batch that takes groups.

    ``target``: weight that fills it (``ControlSettings.batch_weight``);
    ``round_kind``, ``group_size``: properties of its round, empty and 0 before the first launch;
    ``groups``: ids of its groups, in the order in which they joined;
    ``filled``: weight of its groups (a group with failed members has its full weight);
    ``samples``, ``tokens``: number and sampled tokens of its trajectories."""

    batch_id: int
    target: int
    round_kind: str = ""
    group_size: int = 0
    groups: list[int] = []
    filled: int = 0
    samples: int = 0
    tokens: int = 0

    @property
    def missing(self) -> int:
        """Weight that the batch still takes: 0 or less when it is full."""
        return self.target - self.filled

    def take(self, group: Group) -> None:
        """Add ``group``."""
        self.groups.append(group.group_id)
        self.filled += group.weight
        self.samples += len(group.members)
        self.tokens += group.tokens


class Pending(Struct, kw_only=True, omit_defaults=True):
    """Orders without an answer yet, except launches, which the buffer has.

    ``draw``: prompts ordered from the source;
    ``step``: order to the trainer, which closes the batch;
    ``push``, ``checkpoint``: version that is pushed or written;
    ``evaluation``: order of the running evaluation;
    ``paused_for``: version that the paused engines wait for;
    ``end``: last action, which has no answer."""

    draw: int = 0
    step: StepOptimizer | None = None
    push: int | None = None
    evaluation: Evaluate | None = None
    checkpoint: int | None = None
    paused_for: int | None = None
    end: End | None = None

    @property
    def awaited(self) -> dict[type[on.Answer], tuple[int, ...]]:
        """Types of the answers that control waits for, in the order of ``Answer``, each with the values of its first
        fields; the others are measured. ``PromptsDrawn`` may have any values."""
        step = self.step
        evaluation = self.evaluation
        awaited: dict[type[on.Answer], tuple[int, ...]] = {}
        if self.draw:
            awaited[on.PromptsDrawn] = ()
        if self.checkpoint is not None:
            awaited[on.CheckpointDone] = (self.checkpoint,)
        if evaluation is not None:
            awaited[on.EvaluationDone] = (evaluation.policy_version,)
        if step is not None:
            awaited[on.BatchTrained] = (step.batch_id, step.policy_version)
        if self.push is not None:
            awaited[on.WeightsLive] = (self.push,)
        return awaited

    def awaits(self, answer: on.Answer) -> bool:
        """Return whether control waits for exactly this answer; False for one that it has taken before."""
        if isinstance(answer, on.PromptsDrawn):
            return bool(self.draw)
        values = self.awaited.get(type(answer))
        return values is not None and values == msgspec.structs.astuple(answer)[: len(values)]


class DrawnSet(Struct, kw_only=True, omit_defaults=True):
    """Prompts of one training set.

    ``drawn``: number of prompts that its source has given so far;
    ``reserve``: drawn prompts that wait for the turn of their set;
    ``counted``: number of prompts whose turn has come, since the run began or a set was exhausted;
    ``exhausted``: whether its source has no more, or no other prompts than those that are always skipped;
    ``skipped``: number of prompts that pools have skipped;
    ``skipped_in_a_row``: number of the newest prompts that all are in pools which keep none;
    ``prompts_known``: number of prompts of which the last mean reward is known."""

    drawn: int = 0
    reserve: list[PromptRef] = []
    counted: int = 0
    exhausted: bool = False
    skipped: int = 0
    skipped_in_a_row: int = 0
    prompts_known: int = 0


class PoolCount(Struct, kw_only=True, omit_defaults=True):
    """Prompts of a pool that were drawn again. ``launched``: number of those that were not skipped."""

    drawn: int = 0
    launched: int = 0


class PromptPool(Struct, kw_only=True, omit_defaults=True):
    """Prompts that may be launched.

    ``waiting``: prompts drawn from the source and not launched yet;
    ``queue``: prompts that were deferred by a race, stopped at the end of a round, or loaded with a cohort;
    ``unsorted``: whether the queue has changed since the policy sorted it;
    ``drawn``: number of prompts that all sources have given so far;
    ``sets``: prompts of each training set (of a single source: empty, or ``ONE_SET`` where there are pools);
    ``pools``: prompts of each pool by difficulty;
    ``rewards``: mean reward of the last group of each prompt, where there are pools;
    ``limit``: number of prompts that the run draws in all (0: no limit);
    ``exhausted``: whether the source has no more, or the limit is reached."""

    waiting: list[PromptRef] = []
    queue: list[PromptRef] = []
    unsorted: bool = False
    drawn: int = 0
    sets: dict[str, DrawnSet] = {}
    pools: dict[str, PoolCount] = {}
    rewards: dict[str, float] = {}
    limit: int = 0
    exhausted: bool = False

    def set_limit(self, limit: int) -> None:
        """Draw ``limit`` prompts in all, in place of an earlier limit."""
        if 0 < self.limit <= self.drawn:
            self.exhausted = False
        self.limit = limit
        self.exhausted = self.exhausted or 0 < limit <= self.drawn

    def add(self, refs: list[PromptRef], *, drawn: int, exhausted: bool) -> None:
        """Add prompts that may be launched. ``drawn``: number of all prompts that were drawn; ``exhausted``: whether
        the source has no more."""
        self.waiting += refs
        self.drawn += drawn
        self.exhausted = exhausted or 0 < self.limit <= self.drawn
        if self.exhausted:
            self.waiting += self.reserved
            for position in self.sets.values():
                position.reserve = []

    @property
    def reserved(self) -> list[PromptRef]:
        """Prompts that wait for the turn of their set."""
        return [ref for position in self.sets.values() for ref in position.reserve]

    @property
    def empty(self) -> bool:
        """Return whether no prompt waits, and the source has no more."""
        return self.exhausted and not self.waiting and not self.queue


class GroupLengths(Struct, frozen=True, kw_only=True):
    """Lengths of the members of one complete group, by sample number.

    ``lengths``: sampled tokens, or milliseconds from launch to score; 0 for a member that the race of its group
    dropped; ``truncated``: whether the member reached the cap."""

    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]


class Steering(Struct, kw_only=True, omit_defaults=True):
    """Orders of users to a running run.

    ``paused``: whether launches are paused;
    ``waiting_orders``: evaluation and checkpoint that a user requested and control has not ordered yet;
    ``waiting_changes``: changes of settings that wait for their step;
    ``changed``: changed values in force, by key;
    ``changes``: number of changes so far;
    ``recipe_steps``: ``run.steps`` of the recipe when a user changed this key;
    ``engines_away``: last order about each engine that serves nothing, since its host needs its GPU."""

    paused: bool = False
    waiting_orders: list[str] = field(default_factory=list, name="wanted")
    waiting_changes: list[on.SettingsChanged] = field(default_factory=list, name="asked")
    changed: JsonObject = {}
    changes: int = 0
    recipe_steps: int = 0
    engines_away: dict[str, on.UserOrder] = {}


class Admission(Struct, kw_only=True, omit_defaults=True):
    """State of the admission of trajectories (``control.admission``).

    ``limit``: largest number of trajectories in flight (0: as many as there are slots);
    ``ends``: number of trajectories that had ended when the limit last changed;
    ``pauses``: number of trajectories that were paused so far;
    ``usage``: used share of the KV caches, smoothed over measurements;
    ``token_share``: share of the KV caches that a token of a context took when they were last full. (The smoothed
    ``usage`` lags: divided by the few tokens that run after a pause, it would be too large a share.)"""

    limit: int = 0
    ends: int = 0
    pauses: int = 0
    usage: float = 0.0
    token_share: float = 0.0


class RunState(Struct, kw_only=True, omit_defaults=True):
    """Everything that control knows, except what policies learn.

    ``steps``: optimizer steps of the run in all, predicted where it ends after a number of prompts;
    ``batch``: batch that takes groups, or is closed (``Pending.step``);
    ``next_batch``: batch after it, where its round was opened before the step was done;
    ``trainer_version``: version of the trainer's weights;
    ``live_version``: version that every engine serves (-1: none yet);
    ``evaluated``: version and limit of the last evaluation that was ordered;
    ``saved_version``: version of the last checkpoint that was ordered;
    ``lengths``: groups that ended since the last step, for the group sizing;
    ``sizing_figures``: figures of the last decision of the group sizing;
    ``recent_failures``: whether each of the newest trajectories failed;
    ``dropped_in_a_row``: groups dropped since the last step;
    ``stop_reason``: reason of a requested drain;
    ``starved``: whether no prompts are left;
    ``tracker``: rewards of prompts, where the objective tracks them;
    ``admission``: limit of the trajectories in flight, where KV caches decide on it."""

    steps: int
    batch: Batch
    next_batch: Batch | None = None
    buffer: RolloutBuffer = field(default_factory=RolloutBuffer)
    slots: Slots = field(default_factory=Slots)
    prompts: PromptPool = field(default_factory=PromptPool)
    pending: Pending = field(default_factory=Pending)
    steering: Steering = field(default_factory=Steering)
    next_group_id: int = 0
    trainer_version: int = 0
    live_version: int = -1
    evaluated: tuple[int, int] | None = None
    saved_version: int = -1
    lengths: list[GroupLengths] = []
    sizing_figures: dict[str, float] = {}
    recent_failures: list[bool] = []
    dropped_in_a_row: int = 0
    stop_reason: str | None = None
    starved: bool = False
    tracker: RewardTracker = field(default_factory=RewardTracker)
    admission: Admission = field(default_factory=Admission)

    @property
    def batch_closed(self) -> bool:
        """Return whether the trainer was ordered to step on ``batch``."""
        return self.pending.step is not None

    @property
    def draining(self) -> bool:
        """Return whether a stop was requested: no further batch is trained or evaluated."""
        return self.stop_reason is not None

    @property
    def ending(self) -> bool:
        """Return whether nothing more will be trained."""
        return self.draining or self.starved or self.trainer_version >= self.steps

    @property
    def finished(self) -> bool:
        """Return whether nothing more will be decided."""
        return self.pending.end is not None

    @property
    def evaluating(self) -> int | None:
        """Version that the running evaluation scores; None without an evaluation."""
        return None if self.pending.evaluation is None else self.pending.evaluation.policy_version

    @property
    def busy(self) -> bool:
        """Return whether an evaluation or a checkpoint is under way."""
        return self.pending.evaluation is not None or self.pending.checkpoint is not None

    @property
    def running_groups(self) -> list[Group]:
        """Groups with trajectories in flight, in the order of their launches."""
        return [group for group in self.buffer.untrained.values() if group.open and not group.paused]

    @property
    def has_engine_work(self) -> bool:
        """Return whether engines have work: an evaluation, or trajectories that are neither paused nor complete."""
        return self.pending.evaluation is not None or bool(self.running_groups)

    @property
    def has_rank_work(self) -> bool:
        """Return whether a version is in the making, or not live yet."""
        return self.batch_closed or self.live_version < self.trainer_version

    @property
    def round_kind(self) -> str:
        """Kind of the round of the open batch, or before its first launch of the groups in it; empty where there are
        none."""
        if self.batch.round_kind or not self.batch.groups:
            return self.batch.round_kind
        return self.buffer.batched[self.batch.groups[0]].round_kind

    def accounting(self) -> Accounting:
        """Counts of trajectories; ``control.check`` verifies that they balance."""
        return self.buffer.accounting()


class Snapshot(Record, frozen=True):
    """Complete state of control. ``policy``: state of the round policy; ``sizer``: state of the group sizer; ``order``:
    order of arrivals, in a deterministic run."""

    schema: int
    state: RunState
    policy: JsonObject = {}
    sizer: JsonObject = {}
    order: JsonObject | None = None

    def check(self) -> None:
        """Raise ``StreamRLError`` for a snapshot of another schema."""
        if self.schema != SNAPSHOT_SCHEMA:
            raise StreamRLError(
                f"the snapshot of control has schema {self.schema}, this streamrl reads {SNAPSHOT_SCHEMA}: use the "
                "streamrl that wrote it"
            )

    def prompt_ids(self) -> set[str]:
        """Prompts that a run which continues from this snapshot may launch."""
        return prompts_needed(self.state)


def prompts_needed(state: RunState) -> set[str]:
    """Ids of prompts that may still be launched, and of prompts of unfinished groups."""
    pool = state.prompts
    prompt_ids = {ref.prompt_id for ref in (*pool.waiting, *pool.queue, *pool.reserved)}
    prompt_ids.update(group.prompt.prompt_id for group in state.buffer.groups())
    return prompt_ids


def pause_groups(state: RunState, groups: list[Group], out: list[ControlAction]) -> None:
    """Pause the open members of ``groups``, which keep their tokens."""
    for group in groups:
        state.buffer.pause(group)
    if groups:
        out.append(PauseTrajectories(ids=tuple(identity for group in groups for identity in group.open_ids)))


def resume_groups(state: RunState, groups: list[Group], out: list[ControlAction]) -> None:
    """Resume the open members of paused ``groups`` from their tokens."""
    for group in groups:
        state.buffer.resume(group)
    if groups:
        out.append(ResumeTrajectories(ids=tuple(identity for group in groups for identity in group.open_ids)))


def next_attempt(group: Group, seed_base: int | None) -> PromptRef:
    """Prompt of ``group`` for another attempt from its start."""
    return replace(group.prompt, attempt=group.prompt.attempt + 1, seed_base=seed_base, group_size=group.keep)


def requeue_interrupted(state: RunState, group: Group) -> None:
    """Put the prompt of ``group``, which ends before it is trained, back into the pool. A prompt that came from the
    queue (deferred, or of a cohort) returns to the queue."""
    target = state.prompts.queue if group.queued else state.prompts.waiting
    target.append(next_attempt(group, group.prompt.seed_base))
