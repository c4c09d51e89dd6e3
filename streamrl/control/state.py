"""The pure core of control: ``handle(event) -> actions``.

No clock, socket, task or torch. The same core runs the real pipeline and the simulator, and the journal of a
run rebuilds it. Whatever may be decided in several ways is asked of a policy object: how rounds
are formed (``rounds``), how large groups are (``group_sizing``).

Order of decisions after every event: evaluate and checkpoint a version that went live, drop what became stale, hand
ready groups to training, settle a full batch (what lost its race ends), close it, publish, launch, finish.

An event costs time in proportion to the group that it is about, and to nothing else that is in flight.
"""

from __future__ import annotations

from collections import deque

from streamrl.base.types import DropReason, TrajectoryId
from streamrl.buffers.accounting import Accounting
from streamrl.buffers.rollout_buffer import Group, RolloutBuffer, TrajectoryState
from streamrl.buffers.slots import SlotLedger
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.batch_filling import BatchFilling
from streamrl.control.due_work import DueWork
from streamrl.control.events import ControlEvent
from streamrl.control.launching import Launching
from streamrl.control.length_watch import LengthWatch
from streamrl.control.open_batch import OpenBatch
from streamrl.control.round_policy import RoundPolicy
from streamrl.control.round_supply import RoundSupply
from streamrl.control.settings import ControlSettings
from streamrl.control.stalled_rounds import waits_for_nothing
from streamrl.journal.snapshot import restore_snapshot
from streamrl.policies.arrival_order import ArrivalOrder
from streamrl.policies.group_sizing import make_group_sizer
from streamrl.policies.round_policies import make_round_policy
from streamrl.recipe.rewards import FailurePolicy

EXHAUSTED = "prompts exhausted"
"""Why a run without prompts ends: not a drain, so what is due is still done."""

MAX_DROPPED_BATCHES = 20
"""Trip-wire: so many batches' worth of groups dropped without one optimizer step end the run."""


class ControlState:
    """Everything control knows. One instance a run; not thread-safe, not re-entrant."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.steps = settings.steps
        self.policy = make_round_policy(settings)
        self.sizer = make_group_sizer(
            settings.group_sizing, settings.group_size, settings.batch_trajectories, settings.seed
        )
        self.buffer = RolloutBuffer()
        # What is submitted in advance is in flight together with the batch that is being trained.
        self.slots = SlotLedger(self.policy.slots() * (2 if settings.presubmit and self.policy.on_policy else 1))
        self.supply = RoundSupply(settings, self.policy)
        self.due = DueWork(settings)
        self.batch = OpenBatch(batch_id=0, target=settings.batch_trajectories)
        self.next_group_id = 0
        self.trainer_version = 0
        self.live_version = -1
        self.publishing: int | None = None
        self.recent_failures: deque[bool] = deque(maxlen=settings.failure_window)
        self.dropped_in_a_row = 0
        self.stopping: str | None = None
        self.finished = False
        self.lengths = LengthWatch(self.policy, self.sizer, self.supply.predictor)
        self.launching = Launching(self)
        self.filling = BatchFilling(self)
        self.arrivals = _arrival_order(settings, self.policy)
        self._changed = False

    def handle(self, event: ControlEvent) -> list[ControlAction]:
        """Take one event, decide, and return what is to be done, in order."""
        actions: list[ControlAction] = []
        if self.arrivals is None:
            self._take(event, actions)
            return actions
        counts: ControlEvent | None = event
        if not isinstance(event, on.RunContinued):
            counts = None if self.finished else self.arrivals.arrived(event, self)
        while counts is not None:
            before = len(actions)
            self._take(counts, actions)
            self.arrivals.ordered(actions[before:])
            counts = None if self.finished else self.arrivals.next(self)
        return actions

    def _take(self, event: ControlEvent, actions: list[ControlAction]) -> None:
        if isinstance(event, on.RunContinued):
            self._continue(event)
        if self.finished:
            return
        self._changed = True
        self._record(event, actions)
        if self._changed and not self.finished:
            self._decide(actions)

    def accounting(self) -> Accounting:
        """Trajectory counts; ``balanced`` at every instant."""
        return self.buffer.accounting()

    @property
    def round_kind(self) -> str:
        """Of the round that the open batch belongs to."""
        return self.batch.shown_kind or self.batch.round_kind or str(self.settings.rounds)

    # ---- what happened ---------------------------------------------------------------------------

    def _record(self, event: ControlEvent, actions: list[ControlAction]) -> None:
        match event:
            case on.TrajectoryScored():
                self._record_scored(event, actions)
            case on.TrajectoryFailed():
                self._record_failed(event, actions)
            case on.PromptsDrawn():
                self._changed = self.supply.drawn(event)
            case on.RunBegan():
                self._record_began(event, actions)
            case on.BatchTrained():
                self._record_trained(event, actions)
            case on.WeightsLive():
                self._record_live(event, actions)
            case on.EvaluationDone():
                self._changed = self.due.evaluation_done(event.policy_version)
            case on.CheckpointDone():
                self._changed = self.due.checkpoint_done(event.policy_version)
            case on.StopRequested():
                self._record_stop(event, actions)
            case on.EnginesMeasured() | on.RoundTimed() | on.RoundsAdvised():
                if self.arrivals is None:
                    self.policy.observe(event)
                self._changed = False
            case on.RunContinued():
                pass  # what to do is decided below
            case on.TrajectoryCut() | on.AlarmRaised() | on.RewardsAttached():
                self._changed = False  # for whoever reads the log

    def _record_began(self, event: on.RunBegan, actions: list[ControlAction]) -> None:
        version = event.policy_version
        if self.live_version >= 0:
            raise ValueError(
                f"the run is told to begin at version {version} in its middle, with version {self.live_version} live: "
                "one that goes on from its journal goes on with the event after the last one"
            )
        self.trainer_version = self.live_version = version
        self.steps = event.steps or self.steps
        # A resumed run goes on counting where the checkpoint was written.
        self.batch = OpenBatch(batch_id=version, target=self.settings.batch_trajectories)
        self.next_group_id = version * self.settings.batch_groups
        if event.kept is not None:
            restore_snapshot(self, event.kept)
        if version >= self.steps:
            self.finished = True
            reason = f"nothing to train: the weights are of step {version} already; raise run.steps to go on"
            actions.append(do.FinishRun(reason=reason))
        elif self.settings.evaluate_at_start:
            self.due.evaluate(version, 0, draining=self.draining, actions=actions)

    def _continue(self, event: on.RunContinued) -> None:
        """After a drain, and after an error that ended the run: not after its last step, nor its last prompt."""
        self.steps = event.steps or self.steps
        if self.trainer_version < self.steps and self.stopping != EXHAUSTED:
            self.stopping, self.finished = None, False
            self.dropped_in_a_row = 0
            self.recent_failures.clear()
            self.due.continued()

    def _record_stop(self, event: on.StopRequested, actions: list[ControlAction]) -> None:
        if self.draining:
            return
        self.stopping = event.reason
        if self.due.evaluating is not None:  # a drained run ends soon; EvaluationDone tells when nothing is left of it
            actions.append(do.CancelEvaluation(policy_version=self.due.evaluating))

    def _has_ended(self, trajectory: TrajectoryId) -> bool:
        """Whether an outcome is told twice, as it may be where a controller was killed: the first one counts."""
        member = self.buffer.member(trajectory)
        return member is not None and member.state is not TrajectoryState.IN_FLIGHT

    def _record_scored(self, event: on.TrajectoryScored, actions: list[ControlAction]) -> None:
        if self._has_ended(event.id):
            self._changed = False
            return
        group = self.buffer.score(
            event.id,
            reward=event.reward,
            tokens=event.tokens,
            reason=event.finish_reason,
            oldest=event.oldest_version,
            separate=event.separate_rewards,
        )
        if group is None:  # it was cancelled while its result was on the way
            self.buffer.wasted_tokens += event.tokens
            actions.append(do.ForgetTrajectories(ids=(event.id,), reason=DropReason.CANCELLED))
            self._changed = False
            return
        self.recent_failures.append(False)
        if group.open and len(group.members) - group.open >= group.keep:
            lost = group.open_ids()
            for trajectory in lost:
                self.buffer.drop_member(trajectory, DropReason.LOST_RACE)
            actions.append(do.CancelGroup(ids=lost, reason=DropReason.LOST_RACE))
        self._group_changed(group, actions)

    def _record_failed(self, event: on.TrajectoryFailed, actions: list[ControlAction]) -> None:
        if self._has_ended(event.id):
            self._changed = False
            return
        group = self.buffer.drop_member(event.id, event.reason, tokens=event.tokens)
        if group is None:
            self._changed = False
            return
        if not group.members:  # until then it takes the place of a whole group in a batch, and keeps its slots
            self.slots.release(group.size)
        self.recent_failures.append(True)
        if event.policy == FailurePolicy.DROP_GROUP and group.members:
            self.drop_group(group, DropReason.REWARD_FAILED, actions)
        else:
            self._group_changed(group, actions)
        if why := self._too_many_failures(event):  # after the books are kept: a resume goes on from here
            self._stop_run(actions, why)

    def _too_many_failures(self, event: on.TrajectoryFailed) -> str:
        if event.policy == FailurePolicy.STOP:
            return f"a reward failed, and the recipe says stop: {event.message}"
        failed, seen = sum(self.recent_failures), len(self.recent_failures)
        if failed <= self.settings.max_failed_share * self.settings.failure_window:
            return ""  # of the whole window, also while it fills: more of them cannot be mended by what comes
        return (
            f"{failed} of the last {seen} trajectories failed, more than the share of "
            f"{self.settings.max_failed_share:g} that reward_limits.max_failed_share allows; "
            f"the last one ({event.reason}): {event.message or 'no message'}"
        )

    def _group_changed(self, group: Group, actions: list[ControlAction]) -> None:
        """A member ended: drop a group too small for the baseline, or without signal under dynamic sampling."""
        if not group.members:
            self.dropped_in_a_row += 1
            self.supply.gives_back(group)
            return
        if not group.ready:
            self._changed = False
            return
        self.lengths.complete(group)
        self.filling.newest = group
        if self.settings.compares_siblings and group.keep > 1 and len(group.members) == 1:
            self.drop_group(group, DropReason.REWARD_FAILED, actions)
        elif self.settings.dynamic_sampling and group.keep > 1 and group.zero_variance:
            self.drop_group(group, DropReason.ZERO_VARIANCE, actions)

    def drop_group(self, group: Group, reason: DropReason, actions: list[ControlAction]) -> None:
        """End a group that is not in a closed batch, whatever its members do."""
        self.filling.newest = None
        ids = tuple(group.members)
        running = group.open > 0
        self.buffer.drop_group(group.group_id, reason)
        self.slots.release(group.size)
        self.supply.gives_back(group)
        if reason not in (DropReason.LOST_RACE, DropReason.CUT):
            self.dropped_in_a_row += 1
        ended = do.CancelGroup if running else do.ForgetTrajectories
        actions.append(ended(ids=ids, reason=reason))

    def _record_trained(self, event: on.BatchTrained, actions: list[ControlAction]) -> None:
        if not self.batch.closed or (event.batch_id, event.policy_version) != (
            self.batch.batch_id,
            self.trainer_version + 1,
        ):
            self._changed = False  # the answer to a step that was asked for twice
            return
        trained, batches = self.buffer.train(event.batch_id), self.batch.seats_taken / self.settings.batch_trajectories
        self.slots.consume(event.policy_version, sum(group.size for group in trained))
        self.trainer_version = event.policy_version
        self.batch = self.launching.batch_after(self.batch)
        self.dropped_in_a_row = 0
        changed = self.lengths.step(max(1, round(batches)))
        if changed is not None:
            actions.append(changed)

    def _record_live(self, event: on.WeightsLive, actions: list[ControlAction]) -> None:
        if event.policy_version != self.publishing:
            self._changed = False  # the answer to a push that was asked for twice
            return
        self.live_version = event.policy_version
        self.publishing = None
        self.launching.released()
        self.slots.version_live(event.policy_version)
        last = event.policy_version == self.steps
        self.due.version_live(event.policy_version, last=last, draining=self.draining, actions=actions)

    # ---- what to do ------------------------------------------------------------------------------

    def _decide(self, actions: list[ControlAction]) -> None:
        if self.live_version < 0:
            return
        if self.ending:
            self._wind_down(actions)
            return
        self.filling.drop_stale(actions)
        self.filling.fill(actions)
        self.filling.close(actions)
        self._publish(actions)
        self.launching.launch(actions)
        if self._starved:
            self.stopping = EXHAUSTED
            self._wind_down(actions)
        self._trip_wire(actions)
        nothing = "" if self.finished or self.ending else waits_for_nothing(self, self.launching)
        if nothing:
            self._stop_run(actions, nothing)

    @property
    def ending(self) -> bool:
        """Whether nothing more will be trained."""
        return self.stopping is not None or self.trainer_version >= self.steps

    @property
    def draining(self) -> bool:
        """Whether the run was asked to end: nothing new is trained or evaluated."""
        return self.stopping not in (None, EXHAUSTED)

    def _publish(self, actions: list[ControlAction]) -> None:
        # Weights never change under an evaluation: its figure belongs to one version.
        if self.publishing is None and self.due.evaluating is None and self.live_version < self.trainer_version:
            self.publishing = self.trainer_version
            actions.append(do.PublishWeights(policy_version=self.trainer_version))

    @property
    def _starved(self) -> bool:
        idle = not self.buffer.groups and not self.batch.closed and self.publishing is None
        return self.supply.empty and idle and self.live_version == self.trainer_version

    def _trip_wire(self, actions: list[ControlAction]) -> None:
        groups = self.batch.target // (self.batch.group_size or self.settings.group_size)
        if self.finished or self.dropped_in_a_row <= MAX_DROPPED_BATCHES * max(groups, self.settings.batch_groups):
            return
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.buffer.dropped.items()))
        self._stop_run(
            actions,
            f"{self.dropped_in_a_row} groups in a row were dropped without one optimizer step "
            f"(trajectories dropped so far: {reasons}). With dynamic sampling this means that every prompt is "
            "always or never solved: choose prompts of other difficulty, a larger group_size, or "
            "dynamic_sampling = false",
        )

    def _stop_run(self, actions: list[ControlAction], message: str) -> None:
        self.finished = True
        actions.append(do.StopRun(message=message))

    # ---- the end ---------------------------------------------------------------------------------

    def _wind_down(self, actions: list[ControlAction]) -> None:
        """Nothing new is trained: let a closed batch finish and go live, drop the rest, evaluate, save, finish."""
        reason = DropReason.CANCELLED if self.stopping is None else DropReason.DRAINED
        for group in [g for g in self.buffer.groups.values() if g.batch_id is None or not self.batch.closed]:
            self.drop_group(group, reason, actions)
            self.supply.sample_again(group)  # for whoever resumes from the last checkpoint
        if not self.batch.closed:
            self.batch = OpenBatch(batch_id=self.batch.batch_id, target=self.settings.batch_trajectories)
        self._publish(actions)
        if self.batch.closed or self.live_version < self.trainer_version or self.due.busy:
            return
        self.due.at_end(self.live_version, draining=self.draining, actions=actions)
        if not self.due.busy:
            self.finished = True
            actions.append(do.FinishRun(reason=self.stopping or "finished"))


def _arrival_order(settings: ControlSettings, policy: RoundPolicy) -> ArrivalOrder | None:
    if not settings.deterministic:
        return None
    if not policy.on_policy:
        raise ValueError(
            f"deterministic rounds train on-policy, and {settings.policy or settings.rounds} at staleness "
            f"{settings.max_staleness} do not: which weights sample a token would depend on when they change"
        )
    return ArrivalOrder()
