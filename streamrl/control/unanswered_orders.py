"""Orders without an answer, which a controller that takes over must give again; and how orders are made of the state.

``Control.unanswered_orders`` calls it when a controller resumes a run from its journal. Where the new controller
notices an answer itself (ranks that have stepped, engines that hold the pushed version), control takes the answer as an
event first, and the actions of this event are not carried out: ``unanswered_orders`` has all that is due.

Engines that were paused for a version (``rollout.advanced.presubmit``) are paused again before groups that wait for
this version are launched; the push, which ends the pause, follows after the last launch. Paused trajectories are
launched and paused again; the shell gives them the tokens that they had."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from streamrl.base.types import TrajectoryId
from streamrl.buffers.rollout_buffer import Group
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.mixture import draw_order
from streamrl.control.run_state import Batch, RunState


def unanswered_orders(
    state: RunState,
    shares: Mapping[str, float],
    waiting_answers: Collection[type[ControlEvent]] = (),
    waiting_outcomes: Collection[TrajectoryId] = (),
) -> list[ControlAction]:
    """Actions that bring a shell with nothing in flight to the state of the old shell, in an order that the new one can
    carry out. Its engines hold the live version, its ranks the trainer's version without gradients of an open batch.

    ``shares``: share of each training set;
    ``waiting_answers``, ``waiting_outcomes``: types of answers, and trajectories with an outcome, that have arrived and
    that control has not taken yet (in a deterministic run)."""
    pending = state.pending
    if pending.end is not None:
        return [pending.end]
    actions: list[ControlAction] = []
    if pending.checkpoint is not None and on.CheckpointDone not in waiting_answers:
        actions.append(do.WriteCheckpoint(policy_version=pending.checkpoint))
    if on.BatchTrained not in waiting_answers:
        actions.extend(groups_in_batch(state))
        if pending.step is not None:
            actions.append(pending.step)
    if pending.paused_for is not None:
        actions.append(do.PauseEngines(policy_version=pending.paused_for))
    actions.extend(_launches(state, waiting_outcomes))
    if pending.push is not None and on.WeightsLive not in waiting_answers:
        actions.append(do.PublishWeights(policy_version=pending.push, last=state.ending))
    if pending.evaluation is not None and on.EvaluationDone not in waiting_answers:
        actions.append(pending.evaluation)
        if state.draining:  # the drain cancelled the evaluation and waits for its answer
            actions.append(do.CancelEvaluation(policy_version=pending.evaluation.policy_version))
    if pending.draw and on.PromptsDrawn not in waiting_answers:
        actions.append(draw_order(state.prompts, shares, pending.draw))
    return actions


def groups_in_batch(state: RunState) -> list[do.TrainGroupNow]:
    """Orders that handed the groups of the open or closed batch to training."""
    return [train_order(state.batch, group) for group in state.buffer.batched.values()]


def train_order(batch: Batch, group: Group) -> do.TrainGroupNow:
    """The order that hands ``group`` to training as part of ``batch``."""
    return do.TrainGroupNow(
        batch_id=batch.batch_id,
        group_id=group.group_id,
        ids=group.ids,
        round_kind=group.round_kind,
        temperature=group.sampling.get("temperature"),
        baseline=group.baseline,
    )


def launch_order(group: Group, ids: tuple[TrajectoryId, ...], version: int) -> do.LaunchGroup:
    """The order to sample ``ids`` of ``group`` under ``version``."""
    return do.LaunchGroup(
        group_id=group.group_id,
        ids=ids,
        policy_version=version,
        seed_base=group.seed_base,
        round_kind=group.round_kind,
        sampling=group.sampling,
    )


def _launches(state: RunState, waiting_outcomes: Collection[TrajectoryId]) -> list[ControlAction]:
    """Launches of trajectories without an outcome, oldest first, and the pause of those that were paused."""
    actions: list[ControlAction] = []
    paused_ids: list[TrajectoryId] = []
    for group in state.buffer.untrained.values():
        ids = tuple(trajectory for trajectory in group.open_ids if trajectory not in waiting_outcomes)
        if not ids:
            continue
        # The live version samples the remaining tokens of trajectories that were launched under an older one.
        actions.append(launch_order(group, ids, max(group.launch_version, state.live_version)))
        if group.paused:
            paused_ids.extend(ids)
    if paused_ids:
        actions.append(do.PauseTrajectories(ids=tuple(paused_ids)))
    return actions
