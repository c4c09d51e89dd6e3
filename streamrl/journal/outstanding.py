"""What control ordered and nobody answered yet: what a controller that begins anew from the journal must order again.
Pure.

Most of it is in the control state itself, which a replay rebuilds exactly: what runs, what is asked of the source, the
version that is pushed. What the state has forgotten by then is remembered here: the groups of the open batch in the
order in which they were handed over, the step's own order, who stopped with which tokens, how the run ended, and which
batches were trained since the last durable checkpoint, for ranks that hold an older version.

A live controller and a replay do the same with each event, in this order::

    outstanding.told(event)
    actions = state.handle(event)
    outstanding.ordered(actions)

**What is known, is told first.** Where the new controller finds an answer by itself (ranks that have stepped, engines
that hold the version that is pushed), it journals that answer and takes it as above, without carrying out what control
orders then: ``again`` says all of it. An answer that is told twice changes nothing.

**Engines that are held** for a version that is made (``rollout.advanced.presubmit``) are held again, before anything
that waits for it is launched: an engine that survived may serve the live version meanwhile, and a new one does. So
``again`` has ``HoldEngines`` before its first ``LaunchGroup``, and ``PublishWeights``, which ends the hold, after the
last.

**What was stopped and keeps its tokens** is launched and stopped again. The shell gives those of ``kept_tokens`` back
to the rollout stage with the launch; one whose tokens it does not have is sampled from its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from streamrl.base.types import Record, TrajectoryId
from streamrl.buffers.rollout_buffer import TrajectoryState
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent

if TYPE_CHECKING:
    from streamrl.control.state import ControlState
    from streamrl.policies.arrival_order import Answer


class TrainedBatch(Record, frozen=True):
    """A batch that was stepped. ``groups``: its groups in the order in which they were handed over. To train it again
    is to carry out ``groups`` and then ``step``."""

    groups: tuple[do.TrainGroupNow, ...]
    step: do.StepOptimizer

    @property
    def policy_version(self) -> int:
        """The version that it made."""
        return self.step.policy_version


class KeptOutstanding(Record, frozen=True):
    """An ``Outstanding`` as a record. ``stopped``: by trajectory that was cut and has not ended, its tokens (-1: it has
    not told them)."""

    open_groups: tuple[do.TrainGroupNow, ...] = ()
    step: do.StepOptimizer | None = None
    stopped: tuple[tuple[TrajectoryId, int], ...] = ()
    trained: tuple[TrainedBatch, ...] = ()
    end: do.FinishRun | do.StopRun | None = None


class Outstanding:
    """See above. One instance a run, beside its ``ControlState``."""

    def __init__(self) -> None:
        self._open: list[do.TrainGroupNow] = []
        self._step: do.StepOptimizer | None = None
        self._stopped: dict[TrajectoryId, int] = {}
        self._trained: list[TrainedBatch] = []
        self._end: do.FinishRun | do.StopRun | None = None

    # ---- what is told ----------------------------------------------------------------------------

    def told(self, event: ControlEvent) -> None:
        """``event`` happened; before control handles it."""
        match event:
            case on.BatchTrained():
                step = self._step
                if step is not None and (step.batch_id, step.policy_version) == (event.batch_id, event.policy_version):
                    self._trained.append(TrainedBatch(groups=tuple(self._open), step=step))
                    self._open, self._step = [], None
            case on.CheckpointDone():
                self.forget_trained(event.policy_version)
            case on.TrajectoryCut():
                if event.id in self._stopped:
                    self._stopped[event.id] = event.tokens
            case on.TrajectoryScored() | on.TrajectoryFailed():
                self._stopped.pop(event.id, None)

    def ordered(self, actions: Iterable[ControlAction]) -> None:
        """Control ordered ``actions``, in this order."""
        for action in actions:
            match action:
                case do.TrainGroupNow():
                    self._open.append(action)
                case do.StepOptimizer():
                    self._step = action
                case do.CutTrajectories():
                    self._stopped |= {i: self._stopped.get(i, -1) for i in action.ids}
                case do.CancelGroup() | do.ForgetTrajectories():
                    self._dropped(action.ids)
                case do.FinishRun() | do.StopRun():
                    self._end = action

    def _dropped(self, ids: tuple[TrajectoryId, ...]) -> None:
        for trajectory in ids:
            self._stopped.pop(trajectory, None)
        gone = set(ids)
        # Of a group in the open batch a sibling that lost may come late; a drain takes back whole groups.
        if self._step is None and any(handed.ids[0] in gone for handed in self._open):
            self._open = [handed for handed in self._open if handed.ids[0] not in gone]

    def forget_trained(self, version: int) -> None:
        """``version`` is durable: no rank will begin from an older one."""
        self._trained = [batch for batch in self._trained if batch.policy_version > version]

    # ---- what a new controller must do -----------------------------------------------------------

    def again(self, state: ControlState) -> list[ControlAction]:
        """What brings a shell with nothing in flight to where the old one was, in an order that it can carry out.

        ``state``: control after the same events. Engines hold its live version and ranks its trainer version, with no
        gradients of an open batch.
        """
        if self._end is not None and state.finished:
            return [self._end]
        actions: list[ControlAction] = []
        if state.due.checkpointing is not None and not _answered(state, on.CheckpointDone):
            actions.append(do.WriteCheckpoint(policy_version=state.due.checkpointing))
        actions.extend(self._open)
        if self._step is not None:
            actions.append(self._step)
        if state.launching.held_for is not None:
            actions.append(do.HoldEngines(policy_version=state.launching.held_for))
        actions.extend(_launches(state))
        if state.publishing is not None and not _answered(state, on.WeightsLive):
            actions.append(do.PublishWeights(policy_version=state.publishing))
        actions.extend(_evaluation(state))
        if state.supply.asked and not _answered(state, on.PromptsDrawn):
            actions.append(do.DrawPrompts(count=state.supply.asked))
        return actions

    def trained_since(self, version: int) -> list[TrainedBatch]:
        """Batches that were stepped after ``version``, oldest first: what brings ranks that hold it up to now."""
        return [batch for batch in self._trained if batch.policy_version > version]

    @property
    def asked_step(self) -> do.StepOptimizer | None:
        """The step that was ordered and not reported."""
        return self._step

    @property
    def kept_tokens(self) -> dict[TrajectoryId, int]:
        """Trajectories that were stopped, told their tokens (this many) and have not ended; some of them run again."""
        return {trajectory: tokens for trajectory, tokens in self._stopped.items() if tokens >= 0}

    def trajectories_needed(self, state: ControlState) -> set[TrajectoryId]:
        """Whose payloads must outlive a compaction: scored and not trained, stopped with tokens, or trained since the
        last durable checkpoint."""
        needed = set(self.kept_tokens)
        for group in state.buffer.groups.values():
            for member in group.members.values():
                waits = state.arrivals is not None and state.arrivals.waits(member.id)
                if waits or member.state is not TrajectoryState.IN_FLIGHT:
                    needed.add(member.id)
        for batch in self._trained:
            needed.update(trajectory for group in batch.groups for trajectory in group.ids)
        needed.update(trajectory for group in self._open for trajectory in group.ids)
        return needed

    def prompts_needed(self, state: ControlState) -> set[str]:
        """Prompts that may be launched, once more too, or that are part of what ``trajectories_needed`` says."""
        supply = state.supply
        needed = {ticket.prompt_id for queue in (supply.waiting, supply.queue) for ticket in queue.tickets()}
        needed.update(group.prompt_id for group in state.buffer.groups.values())
        needed.update(trajectory.prompt_id for trajectory in self.trajectories_needed(state))
        return needed

    # ---- as a record -----------------------------------------------------------------------------

    def keep(self) -> KeptOutstanding:
        """All of it."""
        return KeptOutstanding(
            open_groups=tuple(self._open),
            step=self._step,
            stopped=tuple(self._stopped.items()),
            trained=tuple(self._trained),
            end=self._end,
        )

    @classmethod
    def of(cls, kept: KeptOutstanding) -> Outstanding:
        """The inverse."""
        made = cls()
        made._open, made._step = list(kept.open_groups), kept.step
        made._stopped, made._trained, made._end = dict(kept.stopped), list(kept.trained), kept.end
        return made


def _answered(state: ControlState, kind: type[Answer]) -> bool:
    return state.arrivals is not None and state.arrivals.answered(kind)


def _launches(state: ControlState) -> list[ControlAction]:
    """What of each group has no outcome, oldest launch first; what was stopped is stopped again."""
    launches: list[ControlAction] = []
    stopped: list[TrajectoryId] = []
    for group in state.buffer.groups.values():
        ids = group.open_ids()
        if state.arrivals is not None:
            ids = tuple(i for i in ids if not state.arrivals.waits(i))
        if not ids:
            continue
        # What was under way when weights changed is sampled by those that are live now.
        version = max(group.launch_version, state.live_version)
        noise = state.launching.noise_of(group)
        launches.append(do.LaunchGroup(group_id=group.group_id, ids=ids, policy_version=version, noise=noise))
        if group.held:
            stopped.extend(ids)
    return [*launches, do.CutTrajectories(ids=tuple(stopped))] if stopped else launches


def _evaluation(state: ControlState) -> list[ControlAction]:
    """The one that runs, from its start. One that was cancelled is begun and cancelled: its end is waited for."""
    version = state.due.evaluating
    if version is None or _answered(state, on.EvaluationDone):
        return []
    begun = do.Evaluate(policy_version=version, limit=state.due.limit)
    return [begun, do.CancelEvaluation(policy_version=version)] if state.draining else [begun]
