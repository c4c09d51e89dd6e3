"""The pure core of control: ``handle(event) -> actions``.

No clock, socket, task or torch. The same core runs the real pipeline and the simulator, and the event log of a
run rebuilds it (``event_log.replay``). Whatever may be decided in several ways is asked of a policy object.

Order of decisions after every event: drop what became stale, hand ready groups to training, close the batch,
publish, evaluate, checkpoint, draw prompts, finish.
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
        self.evaluations_due: deque[tuple[int, int]] = deque()
        self.checkpoints_open = 0
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
                self.trainer_version = self.live_version = event.policy_version
                if self.settings.evaluate_at_start:
                    self.evaluations_due.append((event.policy_version, 0))
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
                self.checkpoints_open -= 1
            case on.StopRequested():
                self.stopping = self.stopping or event.reason

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
        self.slots.release(1)
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
        self.slots.release(len(ids))
        self.dropped_in_a_row += 1
        actions.append(do.ForgetTrajectories(ids=ids) if finished else do.CancelGroup(ids=ids))

    def _record_trained(self, event: on.BatchTrained) -> None:
        trained = self.buffer.train(event.batch_id)
        self.slots.consume(event.policy_version, self.buffer.in_flight(trained))
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
            self.evaluations_due.append((event.policy_version, self.settings.evaluate_limit))
        if checkpoint_every and event.policy_version % checkpoint_every == 0 and not last:
            self._checkpoint(actions)

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
        self._evaluate(actions)
        self._launch(actions)
        self._trip_wire(actions)

    @property
    def _ending(self) -> bool:
        return self.stopping is not None or self.trainer_version >= self.settings.steps

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
        if self.live_version < self.trainer_version:
            return
        batch.closed = True
        actions.append(
            do.StepOptimizer(
                batch_id=batch.batch_id,
                policy_version=self.trainer_version + 1,
                groups=batch.groups,
                samples=batch.samples,
                trained_tokens=batch.tokens,
            )
        )
        self._drop_stale(actions)

    def _publish(self, actions: list[ControlAction]) -> None:
        # Weights never change under an evaluation: its figure belongs to one version.
        if self.publishing is None and self.evaluating is None and self.live_version < self.trainer_version:
            self.publishing = self.trainer_version
            actions.append(do.PublishWeights(policy_version=self.trainer_version))

    def _evaluate(self, actions: list[ControlAction]) -> None:
        if self.evaluating is None and self.publishing is None and self.evaluations_due:
            _, limit = self.evaluations_due.popleft()
            self.evaluating = self.live_version
            actions.append(do.Evaluate(policy_version=self.live_version, limit=limit))

    def _checkpoint(self, actions: list[ControlAction]) -> None:
        self.checkpoints_open += 1
        actions.append(do.WriteCheckpoint(policy_version=self.trainer_version))

    def _launch(self, actions: list[ControlAction]) -> None:
        if self.evaluating is not None or self.evaluations_due:
            return
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
            self.stopping = "prompts exhausted"
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
        if self.batch.closed or self.publishing is not None or self.live_version < self.trainer_version:
            return
        if not self.final_work_ordered:
            self.final_work_ordered = True
            self.evaluations_due.clear()
            # A drained run ends soon: it saves what it has and skips the evaluation.
            if self.settings.evaluate_at_end and self.stopping in (None, "prompts exhausted"):
                self.evaluations_due.append((self.live_version, 0))
            if self.settings.checkpoint_at_end:
                self._checkpoint(actions)
        self._evaluate(actions)
        if self.evaluating is None and not self.checkpoints_open:
            self.finished = True
            actions.append(do.FinishRun(reason=self.stopping or "finished"))
