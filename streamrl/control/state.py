"""The pure core of control: ``handle(event) -> actions``.

No clock, socket, task or torch. The same core runs the real pipeline and the simulator, and the event log of a
run rebuilds it (``event_log.replay``). Whatever may be decided in several ways is asked of a policy object.

Order of decisions after every event: evaluate and checkpoint a version that went live, drop what became stale, hand
ready groups to training, close the batch, publish, draw prompts, finish.

An evaluation shares the engines with the rollout of the next batch, and the batch may be trained meanwhile: only the
push waits. So an evaluation falls due with a version that goes live, begins at once, and there is never a second one.
"""

from __future__ import annotations

from collections import deque

import msgspec

from streamrl.buffers.rollout_buffer import Accounting, Group, RolloutBuffer
from streamrl.buffers.slots import SlotLedger, last_version
from streamrl.config.recipe import RoundKind, StalePolicy
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.rounds import ROUND_POLICIES, RoundView
from streamrl.types import DropReason

EXHAUSTED = "prompts exhausted"
"""Why a run without prompts ends: not a drain, so what is due is still done."""

MAX_DROPPED_BATCHES = 20
"""Trip-wire: so many batches' worth of groups dropped without one optimizer step end the run."""


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What of the recipe decides. Written into the event log, so that a log replays without the recipe."""

    steps: int
    batch_groups: int
    group_size: int
    rounds: RoundKind
    max_staleness: int
    when_stale: StalePolicy
    dynamic_sampling: bool
    max_failed_share: float
    failure_window: int
    evaluate_every: int = 0
    evaluate_limit: int = 0
    evaluate_at_start: bool = False
    evaluate_at_end: bool = False
    checkpoint_every: int = 0
    checkpoint_at_end: bool = False


class OpenBatch(msgspec.Struct, kw_only=True):
    """The batch that takes groups now. ``closed``: the trainer was told to step."""

    batch_id: int
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    closed: bool = False


class ControlState:
    """Everything control knows. One instance a run; not thread-safe, not re-entrant."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.buffer = RolloutBuffer()
        self.slots = SlotLedger((settings.max_staleness + 1) * settings.batch_groups * settings.group_size)
        self.policy = ROUND_POLICIES[settings.rounds]
        self.batch = OpenBatch(batch_id=0)
        self.trainer_version = 0
        self.live_version = -1
        self.publishing: int | None = None
        self.evaluating: int | None = None
        self.evaluated: tuple[int, int] | None = None
        self.checkpointing: int | None = None
        self.saved_version = -1
        self.final_work_ordered = False
        self.next_group_id = 0
        self.waiting_prompts: deque[tuple[str, int]] = deque()
        self.prompts_asked = 0
        self.exhausted = False
        self.recent_failures: deque[bool] = deque(maxlen=settings.failure_window)
        self.dropped_in_a_row = 0
        self.stopping: str | None = None
        self.finished = False

    def handle(self, event: ControlEvent) -> list[ControlAction]:
        """Take one event, decide, and return what is to be done, in order."""
        if self.finished:
            return []
        actions: list[ControlAction] = []
        self._record(event, actions)
        if not self.finished:
            self._decide(actions)
        return actions

    def accounting(self) -> Accounting:
        """Trajectory counts; ``balanced`` at every instant."""
        return self.buffer.accounting()

    # ---- what happened ---------------------------------------------------------------------------

    def _record(self, event: ControlEvent, actions: list[ControlAction]) -> None:
        match event:
            case on.RunBegan():
                self._record_began(event, actions)
            case on.PromptsDrawn():
                self.prompts_asked = 0
                self.exhausted = event.exhausted
                self.waiting_prompts.extend((prompt_id, 0) for prompt_id in event.prompt_ids)
            case on.TrajectoryScored():
                self._record_scored(event, actions)
            case on.TrajectoryFailed():
                self._record_failed(event, actions)
            case on.BatchTrained():
                self._record_trained(event)
            case on.WeightsLive():
                self._record_live(event, actions)
            case on.EvaluationDone():
                self.evaluating = None
            case on.CheckpointDone():
                self.checkpointing = None
            case on.StopRequested():
                self._record_stop(event, actions)
            case on.AlarmRaised():
                pass  # for whoever reads the log

    def _record_began(self, event: on.RunBegan, actions: list[ControlAction]) -> None:
        version = event.policy_version
        self.trainer_version = self.live_version = version
        # A resumed run goes on counting where the checkpoint was written.
        self.batch = OpenBatch(batch_id=version)
        self.next_group_id = version * self.settings.batch_groups
        if version >= self.settings.steps:
            self.finished = True
            reason = f"nothing to train: the weights are of step {version} already; raise run.steps to go on"
            actions.append(do.FinishRun(reason=reason))
        elif self.settings.evaluate_at_start:
            self._evaluate(0, actions)

    def _record_stop(self, event: on.StopRequested, actions: list[ControlAction]) -> None:
        if self._draining:
            return
        self.stopping = event.reason
        if self.evaluating is not None:  # a drained run ends soon; EvaluationDone tells when nothing is left of it
            actions.append(do.CancelEvaluation(policy_version=self.evaluating))

    def _record_scored(self, event: on.TrajectoryScored, actions: list[ControlAction]) -> None:
        group = self.buffer.score(
            event.id, reward=event.reward, tokens=event.tokens, reason=event.finish_reason, oldest=event.oldest_version
        )
        if group is None:  # it was cancelled while its result was on the way
            actions.append(do.ForgetTrajectories(ids=(event.id,)))
            return
        self.recent_failures.append(False)
        self._group_changed(group, actions)

    def _record_failed(self, event: on.TrajectoryFailed, actions: list[ControlAction]) -> None:
        group = self.buffer.drop_member(event.id, event.reason, tokens=event.tokens)
        if group is None:
            return
        if not group.members:  # until then it takes the place of a whole group in a batch, and keeps its slots
            self.slots.release(group.size)
        self.recent_failures.append(True)
        failed = sum(self.recent_failures)
        window = self.settings.failure_window
        if len(self.recent_failures) == window and failed > self.settings.max_failed_share * window:
            self.finished = True
            actions.append(
                do.StopRun(
                    message=f"{failed} of the last {window} trajectories failed, more than the share of "
                    f"{self.settings.max_failed_share:g} that reward_limits.max_failed_share allows; "
                    f"the last one ({event.reason}): {event.message or 'no message'}"
                )
            )
            return
        self._group_changed(group, actions)

    def _group_changed(self, group: Group, actions: list[ControlAction]) -> None:
        """A member ended: drop a group too small for a baseline, or without signal under dynamic sampling."""
        if not group.members:
            self.dropped_in_a_row += 1
        elif group.ready and self.settings.group_size > 1 and len(group.members) == 1:
            self._drop_group(group, DropReason.REWARD_FAILED, actions)
        elif group.ready and self.settings.dynamic_sampling and group.zero_variance:
            self._drop_group(group, DropReason.ZERO_VARIANCE, actions)

    def _drop_group(self, group: Group, reason: DropReason, actions: list[ControlAction]) -> None:
        ids = tuple(group.members)
        finished = group.ready
        self.buffer.drop_group(group.group_id, reason)
        self.slots.release(group.size)
        self.dropped_in_a_row += 1
        actions.append(do.ForgetTrajectories(ids=ids) if finished else do.CancelGroup(ids=ids))

    def _record_trained(self, event: on.BatchTrained) -> None:
        trained = self.buffer.train(event.batch_id)
        self.slots.consume(event.policy_version, sum(group.size for group in trained))
        self.trainer_version = event.policy_version
        self.batch = OpenBatch(batch_id=event.batch_id + 1)
        self.dropped_in_a_row = 0

    def _record_live(self, event: on.WeightsLive, actions: list[ControlAction]) -> None:
        self.live_version = event.policy_version
        self.publishing = None
        self.slots.version_live(event.policy_version)
        every, checkpoint_every = self.settings.evaluate_every, self.settings.checkpoint_every
        last = event.policy_version == self.settings.steps
        if every and event.policy_version % every == 0 and not (last and self.settings.evaluate_at_end):
            self._evaluate(self.settings.evaluate_limit, actions)
        if checkpoint_every and event.policy_version % checkpoint_every == 0 and not last:
            self._checkpoint(actions)

    def _evaluate(self, limit: int, actions: list[ControlAction]) -> None:
        """The live version, on the first ``limit`` held-out prompts (0: all); not in a drain, and not a second time."""
        if self._draining or self.evaluated == (self.live_version, limit):
            return
        self.evaluating = self.live_version
        self.evaluated = (self.live_version, limit)
        actions.append(do.Evaluate(policy_version=self.live_version, limit=limit))

    def _checkpoint(self, actions: list[ControlAction]) -> None:
        if self.saved_version == self.trainer_version:
            return
        self.checkpointing = self.saved_version = self.trainer_version
        actions.append(do.WriteCheckpoint(policy_version=self.trainer_version))

    # ---- what to do ------------------------------------------------------------------------------

    def _decide(self, actions: list[ControlAction]) -> None:
        if self.live_version < 0:
            return
        if self._ending:
            self._wind_down(actions)
            return
        self._drop_stale(actions)
        self._fill_batch(actions)
        self._close_batch(actions)
        self._publish(actions)
        self._launch(actions)
        self._trip_wire(actions)

    @property
    def _ending(self) -> bool:
        return self.stopping is not None or self.trainer_version >= self.settings.steps

    @property
    def _draining(self) -> bool:
        return self.stopping not in (None, EXHAUSTED)

    def _deadline(self, group: Group) -> int:
        return last_version(group.oldest_version, self.settings.max_staleness)

    def _view(self) -> RoundView:
        settings = self.settings
        untrained = list(self.buffer.untrained())
        return RoundView(
            trainer_version=self.trainer_version,
            live_version=self.live_version,
            batch_groups=settings.batch_groups,
            group_size=settings.group_size,
            seats=settings.batch_groups - self.batch.groups,
            batch_closed=self.batch.closed,
            untrained_groups=len(untrained),
            free_slots=self.slots.free,
            steps_left=settings.steps - self.trainer_version - int(self.batch.closed),
            when_stale=settings.when_stale,
            last_versions={g.group_id: self._deadline(g) for g in untrained},
        )

    def _drop_stale(self, actions: list[ControlAction]) -> None:
        """A group whose oldest token no batch may train any more ends here, whatever the policy promised."""
        # The open batch is trained by trainer_version; once it is closed the next chance is one version later.
        now = self.trainer_version + int(self.batch.closed)
        for group in [g for g in self.buffer.untrained() if self._deadline(g) < now]:
            self._drop_group(group, DropReason.STALE, actions)
            if self.settings.when_stale is StalePolicy.REGENERATE:
                self.waiting_prompts.appendleft((group.prompt_id, group.attempt + 1))

    def _fill_batch(self, actions: list[ControlAction]) -> None:
        if self.batch.closed:
            return
        view = self._view()
        for group in sorted(self.buffer.ready(), key=lambda g: (self._deadline(g), g.group_id)):
            if not self.policy.may_join(view, group.group_id):
                continue
            self.buffer.batch(group.group_id, self.batch.batch_id)
            self.batch.groups += 1
            self.batch.samples += len(group.members)
            self.batch.tokens += group.tokens
            actions.append(
                do.TrainGroupNow(batch_id=self.batch.batch_id, group_id=group.group_id, ids=tuple(group.members))
            )
            view = self._view()  # a seat less, and a group less to place

    def _close_batch(self, actions: list[ControlAction]) -> None:
        batch = self.batch
        # An exhausted source ends with one smaller batch rather than losing what was sampled.
        starved = self.exhausted and not self.waiting_prompts and not any(self.buffer.untrained())
        if batch.closed or not batch.groups or (batch.groups < self.settings.batch_groups and not starved):
            return
        # A delta is made against the last acknowledged version: the next step waits until that one is live.
        # A checkpoint is of the version that the trainer holds; it could not step while it writes anyway.
        if self.live_version < self.trainer_version or self.checkpointing is not None:
            return
        batch.closed = True
        actions.append(
            do.StepOptimizer(
                batch_id=batch.batch_id,
                policy_version=self.trainer_version + 1,
                groups=batch.groups,
                samples=batch.samples,
                trained_tokens=batch.tokens,
                engines_idle=self.evaluating is None and not any(self.buffer.untrained()),
            )
        )
        self._drop_stale(actions)

    def _publish(self, actions: list[ControlAction]) -> None:
        # Weights never change under an evaluation: its figure belongs to one version.
        if self.publishing is None and self.evaluating is None and self.live_version < self.trainer_version:
            self.publishing = self.trainer_version
            actions.append(do.PublishWeights(policy_version=self.trainer_version))

    def _launch(self, actions: list[ControlAction]) -> None:
        wanted = self.policy.groups_to_launch(self._view())
        while wanted > 0 and self.waiting_prompts:
            prompt_id, attempt = self.waiting_prompts.popleft()
            group = self.buffer.admit(
                prompt_id,
                self.next_group_id,
                self.settings.group_size,
                attempt=attempt,
                policy_version=self.live_version,
            )
            self.next_group_id += 1
            self.slots.charge(group.size)
            actions.append(do.LaunchGroup(group_id=group.group_id, ids=tuple(group.members)))
            wanted -= 1
        if wanted > 0 and not self.prompts_asked and not self.exhausted:
            self.prompts_asked = wanted
            actions.append(do.DrawPrompts(count=wanted))
        if self._starved:
            self.stopping = EXHAUSTED
            self._wind_down(actions)

    @property
    def _starved(self) -> bool:
        idle = not self.buffer.groups and not self.batch.closed and self.publishing is None
        return self.exhausted and not self.waiting_prompts and idle and self.live_version == self.trainer_version

    def _trip_wire(self, actions: list[ControlAction]) -> None:
        if self.dropped_in_a_row <= MAX_DROPPED_BATCHES * self.settings.batch_groups or self.finished:
            return
        self.finished = True
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.buffer.dropped.items()))
        actions.append(
            do.StopRun(
                message=f"{self.dropped_in_a_row} groups in a row were dropped without one optimizer step "
                f"(trajectories dropped so far: {reasons}). With dynamic sampling this means that every prompt is "
                "always or never solved: choose prompts of other difficulty, a larger group_size, or "
                "dynamic_sampling = false"
            )
        )

    # ---- the end ---------------------------------------------------------------------------------

    def _wind_down(self, actions: list[ControlAction]) -> None:
        """Nothing new is trained: let a closed batch finish and go live, drop the rest, evaluate, save, finish."""
        reason = DropReason.CANCELLED if self.stopping is None else DropReason.DRAINED
        for group in [g for g in self.buffer.groups.values() if g.batch_id is None or not self.batch.closed]:
            self._drop_group(group, reason, actions)
        if not self.batch.closed:
            self.batch = OpenBatch(batch_id=self.batch.batch_id)
        self._publish(actions)
        if self.batch.closed or self.live_version < self.trainer_version or self._busy_with_live_version:
            return
        if not self.final_work_ordered:
            self.final_work_ordered = True
            if self.settings.evaluate_at_end:
                self._evaluate(0, actions)
            if self.settings.checkpoint_at_end:
                self._checkpoint(actions)
        if not self._busy_with_live_version:
            self.finished = True
            actions.append(do.FinishRun(reason=self.stopping or "finished"))

    @property
    def _busy_with_live_version(self) -> bool:
        return self.evaluating is not None or self.checkpointing is not None
