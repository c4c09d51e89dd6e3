"""The state of a run as control sees it: one tree of structs, which encodes as it is. That encoding is the snapshot.

``RunState`` is changed by ``apply`` (what happened) and ``decide`` (what was ordered) only. It remembers what it
ordered until that is answered (``Pending``), so that a controller that takes over knows what to order again."""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Record
from streamrl.buffers.rollout_buffer import Accounting, Group, PromptRef, RolloutBuffer
from streamrl.buffers.slots import Slots
from streamrl.control import events as on
from streamrl.control.actions import End, Evaluate, StepOptimizer

SNAPSHOT_SCHEMA = 4


class Batch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The batch that takes groups now. ``target``: weight that fills it (``ControlSettings.batch_weight``);
    ``groups``: those in it, in the order in which they joined; ``filled``: their weight (a group whose members failed
    counts as a whole one). ``round_kind``, ``group_size``: of its round; empty and 0 before the round's first launch.
    """

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
        """Weight that it still takes: 0 or less when it is full."""
        return self.target - self.filled

    def take(self, group: Group) -> None:
        """``group`` joins."""
        self.groups.append(group.group_id)
        self.filled += group.weight
        self.samples += len(group.members)
        self.tokens += group.tokens


class Pending(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Orders that have not been answered. ``draw``: prompts asked of the source; ``step``: the batch is closed and the
    trainer steps; ``push``, ``checkpoint``: the version that is pushed or written; ``paused_for``: the version that
    engines are paused for; ``end``: the last action, which nothing answers. What is sampled is in the buffer."""

    draw: int = 0
    step: StepOptimizer | None = None
    push: int | None = None
    evaluation: Evaluate | None = None
    checkpoint: int | None = None
    paused_for: int | None = None
    end: End | None = None

    @property
    def awaited(self) -> dict[type[on.Answer], tuple[int, ...]]:
        """Kinds of answers that are awaited, in the order of ``Answer``, with the fields that tell the right one."""
        step = self.step
        evaluation = self.evaluation
        asked: dict[type[on.Answer], tuple[int, ...] | None] = {
            on.PromptsDrawn: () if self.draw else None,
            on.CheckpointDone: None if self.checkpoint is None else (self.checkpoint,),
            on.EvaluationDone: None if evaluation is None else (evaluation.policy_version,),
            on.BatchTrained: None if step is None else (step.batch_id, step.policy_version),
            on.WeightsLive: None if self.push is None else (self.push,),
        }
        return {kind: fields for kind, fields in asked.items() if fields is not None}

    def awaits(self, answer: on.Answer) -> bool:
        """True when exactly this answer is awaited, and not one that was taken before."""
        fields = () if isinstance(answer, on.PromptsDrawn) else msgspec.structs.astuple(answer)
        return self.awaited.get(type(answer)) == fields


class PromptPool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Prompts that may be launched. ``waiting``: drawn from the source and not launched yet; ``queue``: deferred in a
    race, cut, or of a cohort; ``unsorted``: the queue changed since the policy sorted it; ``drawn``: prompts that the
    source gave so far; ``exhausted``: it has no more."""

    waiting: list[PromptRef] = []
    queue: list[PromptRef] = []
    unsorted: bool = False
    drawn: int = 0
    exhausted: bool = False

    @property
    def empty(self) -> bool:
        """Return whether no prompt waits, and the source has no more."""
        return self.exhausted and not self.waiting and not self.queue


class GroupLengths(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of the members of one complete group, by sample number, and which reached the cap: sampled tokens, or
    milliseconds from launch to score. 0: a race cut it, since as many as a batch takes had ended."""

    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]


class Steering(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Orders of people to a running run. ``wanted``: an evaluation or a checkpoint that was not ordered yet; ``asked``:
    changes of settings that wait for their step; ``changed``: values in force, by key, after so many ``changes``;
    ``recipe_steps``: what the recipe said when ``run.steps`` was changed."""

    paused: bool = False
    wanted: list[str] = []
    asked: list[on.SettingsChanged] = []
    changed: dict[str, Any] = {}
    changes: int = 0
    recipe_steps: int = 0


class RunState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything control knows, but for what policies learn.

    ``steps``: optimizer steps to make in all. ``batch``: takes groups, or is closed (``pending.step``); ``next_batch``:
    the one after it, whose round was opened before the step was done. ``trainer_version``, ``live_version``: what the
    trainer holds and every engine serves (-1: none yet). ``evaluated``: version and limit of the last evaluation that
    was ordered; ``saved_version``: of the last checkpoint. ``lengths``: groups that ended since the last step, for the
    group sizing, and ``sizing_figures`` what it said then. ``recent_failures``: of the newest trajectories, which
    failed; ``dropped_in_a_row``: groups since the last step. ``stop_reason``: of a drain that was asked for;
    ``starved``: there are no prompts left."""

    steps: int
    batch: Batch
    next_batch: Batch | None = None
    buffer: RolloutBuffer = msgspec.field(default_factory=RolloutBuffer)
    slots: Slots = msgspec.field(default_factory=Slots)
    prompts: PromptPool = msgspec.field(default_factory=PromptPool)
    pending: Pending = msgspec.field(default_factory=Pending)
    steering: Steering = msgspec.field(default_factory=Steering)
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

    @property
    def batch_closed(self) -> bool:
        """The trainer was ordered to step on ``batch``."""
        return self.pending.step is not None

    @property
    def draining(self) -> bool:
        """The run was asked to end: nothing new is trained or evaluated."""
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
        """The version that is evaluated."""
        return self.pending.evaluation.policy_version if self.pending.evaluation is not None else None

    @property
    def busy(self) -> bool:
        """Return whether an evaluation or a checkpoint is not done."""
        return self.pending.evaluation is not None or self.pending.checkpoint is not None

    @property
    def round_kind(self) -> str:
        """Kind of the round that the open batch belongs to, or of the groups that fill it; empty before both."""
        if self.batch.round_kind or not self.batch.groups:
            return self.batch.round_kind
        return self.buffer.batched[self.batch.groups[0]].round_kind

    def accounting(self) -> Accounting:
        """Trajectory counts, of which ``control.check`` says that they balance."""
        return self.buffer.accounting()


class Snapshot(Record, frozen=True):
    """All of control. ``policy``, ``sizer``, ``order``: what the round policy, the group sizing and, in a deterministic
    run, the order of arrivals give as their own state."""

    schema: int
    state: RunState
    policy: dict[str, Any] = {}
    sizer: dict[str, Any] = {}
    order: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise ``StreamRLError`` for a snapshot of another schema."""
        if self.schema != SNAPSHOT_SCHEMA:
            raise StreamRLError(
                f"the snapshot of control has schema {self.schema}, this streamrl reads {SNAPSHOT_SCHEMA}: use the "
                "streamrl that wrote it"
            )

    def prompt_ids(self) -> set[str]:
        """Prompts that a run which goes on from here may launch."""
        return prompts_needed(self.state)


def prompts_needed(state: RunState) -> set[str]:
    """Prompts that may be launched, again too, and those of groups that have not ended."""
    pool = state.prompts
    needed = {ref.prompt_id for ref in (*pool.waiting, *pool.queue)}
    needed.update(group.prompt.prompt_id for group in state.buffer.groups())
    return needed


def next_attempt(group: Group, seed_base: int | None) -> PromptRef:
    """The prompt of ``group``, to be sampled again from its start."""
    return msgspec.structs.replace(
        group.prompt, attempt=group.prompt.attempt + 1, seed_base=seed_base, group_size=group.keep
    )


def requeue_interrupted(state: RunState, group: Group) -> None:
    """``group`` ends with the run that launched it; its prompt is sampled when the run goes on: from the queue where
    it came from there (one deferred, whose long round is still due, and one of a cohort)."""
    target = state.prompts.queue if group.queued else state.prompts.waiting
    target.append(next_attempt(group, group.prompt.seed_base))
