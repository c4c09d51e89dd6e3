"""Orders that a controller that takes over must give again: what the state remembers as ordered and not answered.

An answer that the new controller finds by itself (ranks that have stepped, engines that hold the version that is
pushed) is an event first, taken without carrying out what control orders then: ``unanswered_orders`` says all of it.

Engines that are paused for a version (``rollout.advanced.presubmit``) are paused again before anything that waits for
it is launched, and the push, which ends the pause, follows after the last launch. What was stopped with its tokens is
launched and stopped again; the shell gives it the tokens that it has."""

from __future__ import annotations

from collections.abc import Collection

from streamrl.base.types import TrajectoryId
from streamrl.buffers.rollout_buffer import Group
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.model import Batch, RunState


def unanswered_orders(
    state: RunState, answered: Collection[type[ControlEvent]] = (), ended: Collection[TrajectoryId] = ()
) -> list[ControlAction]:
    """List what brings a shell with nothing in flight to where the old one was, in an order that it can carry out.
    Engines hold the live version and ranks the trainer's, with no gradients of an open batch. ``answered``, ``ended``:
    answers and trajectories that are known and do not count yet (a deterministic run)."""
    pending = state.pending
    if pending.end is not None:
        return [pending.end]
    actions: list[ControlAction] = []
    if pending.checkpoint is not None and on.CheckpointDone not in answered:
        actions.append(do.WriteCheckpoint(policy_version=pending.checkpoint))
    if on.BatchTrained not in answered:
        actions.extend(groups_in_batch(state))
        if pending.step is not None:
            actions.append(pending.step)
    if pending.paused_for is not None:
        actions.append(do.PauseEngines(policy_version=pending.paused_for))
    actions.extend(_launches(state, ended))
    if pending.push is not None and on.WeightsLive not in answered:
        actions.append(do.PublishWeights(policy_version=pending.push, last=state.ending))
    if pending.evaluation is not None and on.EvaluationDone not in answered:
        actions.append(pending.evaluation)
        if state.draining:  # it was cancelled, and its end is waited for
            actions.append(do.CancelEvaluation(policy_version=pending.evaluation.policy_version))
    if pending.draw and on.PromptsDrawn not in answered:
        actions.append(do.DrawPrompts(count=pending.draw))
    return actions


def groups_in_batch(state: RunState) -> list[do.TrainGroupNow]:
    """The groups of the open or closed batch, as they were handed over."""
    return [train_order(state.batch, group) for group in state.buffer.batched.values()]


def train_order(batch: Batch, group: Group) -> do.TrainGroupNow:
    """The order that hands ``group`` over as part of ``batch``."""
    return do.TrainGroupNow(
        batch_id=batch.batch_id,
        group_id=group.group_id,
        ids=group.ids,
        round_kind=group.round_kind,
        temperature=group.sampling.get("temperature"),
    )


def launch_order(group: Group, ids: tuple[TrajectoryId, ...], version: int) -> do.LaunchGroup:
    """The order to sample ``ids`` of ``group`` by ``version``."""
    return do.LaunchGroup(
        group_id=group.group_id,
        ids=ids,
        policy_version=version,
        seed_base=group.seed_base,
        round_kind=group.round_kind,
        sampling=group.sampling,
    )


def _launches(state: RunState, ended: Collection[TrajectoryId]) -> list[ControlAction]:
    """List launches of what has no outcome, oldest first; what was stopped is stopped again."""
    launches: list[ControlAction] = []
    paused: list[TrajectoryId] = []
    for group in state.buffer.untrained.values():
        ids = tuple(i for i in group.open_ids if i not in ended)
        if not ids:
            continue
        # What was under way when weights changed is sampled by those that are live now.
        launches.append(launch_order(group, ids, max(group.launch_version, state.live_version)))
        if group.paused:
            paused.extend(ids)
    return [*launches, do.PauseTrajectories(ids=tuple(paused))] if paused else launches
