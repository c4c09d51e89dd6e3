"""Changes of the state by an event: ``apply(state, event, rules, out)``.

``Control.handle`` calls ``apply`` first for every event, in the controller, in the simulator and where a journal is
replayed; ``decide`` then orders what follows. ``decide``, ``launch`` and ``steering`` use the other public functions.

Numbers of a group (``buffers.rollout_buffer.Group``):

``size``    trajectories that were launched. A group that races launches more than it keeps.
``keep``    trajectories of the group that a batch takes, at most ``size``. Once ``keep`` members have a reward, the
            race within the group is over: members without a reward are dropped (``DropReason.LOST_RACE``).
``open``    members without a reward yet. A group with none is *ready* and may join a batch.
``weight``  share of the group in a batch: ``keep``, or 1 where batches count prompts. A failed member does not change
            the weight (``ControlSettings.weight_of``).
slot        right of one trajectory to be in flight. A group holds ``size`` slots from its launch until it is dropped,
            or until the version that trained it is live (``buffers.slots``)."""

from __future__ import annotations

from statistics import fmean

from streamrl.base.types import DropReason, FinishReason, TrajectoryId
from streamrl.buffers.rollout_buffer import Group, Member, PromptRef
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.admission import admit
from streamrl.control.events import ControlEvent
from streamrl.control.mixture import no_set_left, note_reward, take_drawn
from streamrl.control.round_policy import GroupObserved, Rules
from streamrl.control.run_state import Batch, GroupLengths, RunState
from streamrl.control.settings import ControlSettings
from streamrl.recipe.rewards import FailurePolicy
from streamrl.recipe.scheduling import Straggler

Actions = list[ControlAction]


def apply(state: RunState, event: ControlEvent, rules: Rules, out: Actions) -> bool:
    """Change ``state`` by ``event`` and append actions that follow at once to ``out``. Returns whether ``decide`` may
    have something to order."""
    if isinstance(event, on.Answer) and not state.pending.awaits(event):
        return False  # an answer that came twice
    match event:
        case on.TrajectoryScored():
            return _score_trajectory(state, event, rules, out)
        case on.TrajectoryFailed():
            return _fail_trajectory(state, event, rules, out)
        case on.PromptsDrawn():
            _add_prompts(state, event, rules, out)
        case on.RunBegan():
            _begin_run(state, event, rules.settings, out)
        case on.BatchTrained():
            _finish_step(state, event, rules, out)
        case on.WeightsLive():
            _finish_push(state, event, rules.settings, out)
        case on.EvaluationDone():
            state.pending.evaluation = None
        case on.CheckpointDone():
            state.pending.checkpoint = None
        case on.StopRequested():
            _request_stop(state, event, out)
        case on.RunContinued():
            _continue_run(state, event)
        case on.EnginesMeasured():
            rules.policy.observe(event)
            admit(state, event, rules, out)
            # Trajectories in environments leave engine slots free for launches, and KV caches may have room.
            return event.environment > 0 or rules.settings.admission is not None
        case on.RoundTimed() | on.RoundsAdvised():
            rules.policy.observe(event)
            return False
    return True


# ---- the run -------------------------------------------------------------------------------------


def _begin_run(state: RunState, event: on.RunBegan, settings: ControlSettings, out: Actions) -> None:
    version = event.policy_version
    if state.live_version >= 0:
        raise ValueError(
            f"the run is to begin at version {version} in its middle, with version {state.live_version} live: one that "
            "goes on from its journal goes on with the event after the last one"
        )
    state.trainer_version = state.live_version = version
    state.steps = event.steps or state.steps
    state.prompts.set_limit(settings.prompts if event.prompts is None else event.prompts)
    # A resumed run continues the numbers of batches and groups from its checkpoint.
    state.batch = Batch(batch_id=version, target=settings.batch_weight)
    state.next_group_id = max(state.next_group_id, version * settings.batch_groups)
    if state.prompts.empty if state.prompts.limit else version >= state.steps:
        reason = f"nothing to train: the weights are of step {version} already; raise run.steps to go on"
        end_run(state, do.End(reason=reason), out)
    elif settings.evaluate_at_start:
        order_evaluation(state, version, 0, out)


def _continue_run(state: RunState, event: on.RunContinued) -> None:
    """Continue after a drain or after an error that ended the run. A run that made its last step, or has no prompts
    left, stays ended."""
    state.steps = event.steps or state.steps
    state.prompts.set_limit(event.prompts)
    if state.trainer_version < state.steps and (state.draining or not state.starved):
        state.stop_reason = None
        state.starved = False
        state.pending.end = None
        state.dropped_in_a_row = 0
        state.recent_failures.clear()


def _request_stop(state: RunState, event: on.StopRequested, out: Actions) -> None:
    if state.draining:
        return
    state.stop_reason = event.reason
    evaluation = state.pending.evaluation
    if evaluation is not None:  # the run ends after its ``EvaluationDone``
        out.append(do.CancelEvaluation(policy_version=evaluation.policy_version))


def end_run(state: RunState, action: do.End, out: Actions) -> None:
    """End the run by ``action``, unless an earlier one has ended it."""
    if state.pending.end is None:
        state.pending.end = action
        out.append(action)


# ---- prompts and trajectories --------------------------------------------------------------------


def _add_prompts(state: RunState, event: on.PromptsDrawn, rules: Rules, out: Actions) -> None:
    state.pending.draw = 0
    lengths = event.prompt_tokens or (0,) * len(event.prompt_ids)
    drawn = zip(event.prompt_ids, lengths, strict=True)
    refs = [PromptRef(prompt_id=prompt_id, tokens=tokens) for prompt_id, tokens in drawn]
    pool = state.prompts
    settings = rules.settings
    in_turn = take_drawn(pool, refs, event, settings, out)
    pool.add(in_turn, drawn=len(refs), exhausted=event.exhausted or no_set_left(pool, settings.shares))


def _score_trajectory(state: RunState, event: on.TrajectoryScored, rules: Rules, out: Actions) -> bool:
    member = state.buffer.member(event.id)
    if member is not None and member.scored:
        return False  # the event came twice, as after the kill of a controller: the first one counts
    turn_rewards: tuple[float, ...] = ()
    if rules.settings.compares_turns:
        rewarded_turns = [number for number, reward in enumerate(event.turn_rewards, start=1) if reward]
        turn_rewards = event.turn_rewards[: max(rewarded_turns, default=0)]
    scored = Member(
        oldest_version=event.oldest_version,
        finish_reason=event.finish_reason,
        reward=event.reward,
        tokens=event.tokens,
        separate_rewards=event.separate_rewards,
        turn_rewards=turn_rewards,
        seconds=event.seconds,
        signal=event.signal,
    )
    group = state.buffer.score(event.id, scored)
    if group is None:  # the trajectory was dropped before its result arrived
        state.buffer.wasted_tokens += event.tokens
        out.append(do.Drop(ids=(event.id,), reason=DropReason.CANCELLED))
        return False
    _note_outcome(state, rules.settings, failed=False)
    lost_race = _end_race(state, group, out)
    return _check_group(state, group, rules, out, lost_race=lost_race)


def _end_race(state: RunState, group: Group, out: Actions) -> tuple[TrajectoryId, ...]:
    """Drop the open members of ``group`` once as many as it keeps have a reward. Returns their ids."""
    if not group.open or len(group.members) - group.open < group.keep:
        return ()
    open_ids = group.open_ids
    for trajectory in open_ids:
        state.buffer.drop_member(trajectory, DropReason.LOST_RACE)
    out.append(do.Drop(ids=open_ids, reason=DropReason.LOST_RACE, abort=True))
    return open_ids


def _fail_trajectory(state: RunState, event: on.TrajectoryFailed, rules: Rules, out: Actions) -> bool:
    member = state.buffer.member(event.id)
    if member is not None and member.scored:
        return False
    group = state.buffer.drop_member(event.id, event.reason, tokens=event.tokens)
    if group is None:
        return False
    if not group.members:  # with one member left a group still has its full weight and all its slots
        state.slots.release(group.size)
    _note_outcome(state, rules.settings, failed=True)
    if event.policy == FailurePolicy.DROP_GROUP and group.members:
        drop_group(state, group, DropReason.REWARD_FAILED, out)
        changed = True
    else:
        changed = _check_group(state, group, rules, out)
    # Last, so that a resumed run continues from a state with the effects of this event.
    error = _too_many_failures(state, event, rules.settings)
    if error:
        end_run(state, do.End(reason=error, error=True), out)
    return changed


def _note_outcome(state: RunState, settings: ControlSettings, *, failed: bool) -> None:
    state.recent_failures.append(failed)
    del state.recent_failures[: -settings.failure_window]


def _too_many_failures(state: RunState, event: on.TrajectoryFailed, settings: ControlSettings) -> str:
    """Message of the error that ends the run after ``event``; empty where it may go on."""
    if event.policy == FailurePolicy.STOP:
        return f"a reward failed, and the recipe says stop: {event.message}"
    failures = sum(state.recent_failures)
    # The limit is a share of the full window, also while the window fills: no later success can undo a failure in it.
    if failures <= settings.max_failed_share * settings.failure_window:
        return ""
    return (
        f"{failures} of the last {len(state.recent_failures)} trajectories failed, more than the share of "
        f"{settings.max_failed_share:g} that reward_limits.max_failed_share allows; "
        f"the last one ({event.reason}): {event.message or 'no message'}"
    )


def _check_group(
    state: RunState, group: Group, rules: Rules, out: Actions, *, lost_race: tuple[TrajectoryId, ...] = ()
) -> bool:
    """Check ``group`` after one of its members ended. Drops a ready group that is too small for the baseline, or that
    has no signal under dynamic sampling. ``lost_race``: members that the end of its race dropped."""
    if not group.members:
        state.dropped_in_a_row += 1
        return True
    if not group.ready:
        return False
    _observe_complete(state, group, lost_race, rules)
    settings = rules.settings
    if settings.pools:
        rewards = [member.reward for member in group.members.values()]
        note_reward(state.prompts, group.prompt.prompt_id, fmean(rewards), settings.shares)
    if settings.compares_siblings and group.keep > 1 and len(group.members) == 1:
        drop_group(state, group, DropReason.REWARD_FAILED, out)
    elif settings.dynamic_sampling and group.keep > 1 and group.zero_variance:
        drop_group(state, group, DropReason.ZERO_VARIANCE, out)
    return True


def drop_group(state: RunState, group: Group, reason: DropReason, out: Actions) -> None:
    """End a group that is not in a closed batch, with all its members."""
    state.buffer.drop_group(group, reason)
    state.slots.release(group.size)
    if reason not in (DropReason.LOST_RACE, DropReason.BATCH_FULL):
        state.dropped_in_a_row += 1
    out.append(do.Drop(ids=group.ids, reason=reason, abort=group.open > 0))


# ---- lengths for the policies --------------------------------------------------------------------
# Observed before a group may be dropped: without groups that all fail or all succeed the lengths would be biased.


def _observe_complete(state: RunState, group: Group, lost_race: tuple[TrajectoryId, ...], rules: Rules) -> None:
    rules.policy.observe(_observation(group))
    # The group sizing sees the first ``keep`` of all launched members by sample number, also those that lost the race:
    # a fair sample of a group of this size.
    launched: dict[int, Member | None] = dict.fromkeys(trajectory.sample for trajectory in lost_race)
    launched.update(group.members)
    members = [launched[sample] for sample in sorted(launched)[: group.keep]]
    unit = rules.settings.group_sizing.straggler
    state.lengths.append(
        GroupLengths(
            lengths=tuple(0 if member is None else _length(member, unit) for member in members),
            truncated=tuple(member is not None and _is_truncated(member) for member in members),
        )
    )


def _length(member: Member, unit: Straggler) -> int:
    length = member.tokens if unit is Straggler.TOKENS else round(1000 * member.seconds)
    return max(1, length)


def _is_truncated(member: Member) -> bool:
    return member.finish_reason is FinishReason.LENGTH


def observe_deferred(group: Group, longest: int, rules: Rules) -> None:
    """Report a group that its round deferred to the policy. ``longest``: longest completion of the round so far."""
    rules.policy.observe(_observation(group, deferred=True, round_longest=longest))


def _observation(group: Group, *, deferred: bool = False, round_longest: int = 0) -> GroupObserved:
    scored = [member for member in group.members.values() if member.scored]
    return GroupObserved(
        prompt_id=group.prompt.prompt_id,
        round_kind=group.round_kind,
        size=group.keep,
        lengths=tuple(member.tokens for member in scored),
        truncated=sum(_is_truncated(member) for member in scored),
        prompt_tokens=group.prompt.tokens,
        deferred=deferred,
        round_longest=round_longest,
    )


# ---- versions ------------------------------------------------------------------------------------


def _finish_step(state: RunState, event: on.BatchTrained, rules: Rules, out: Actions) -> None:
    step = state.pending.step
    state.pending.step = None
    assert step is not None
    earlier_samples = 0.0
    if rules.settings.tracked is not None:
        groups = state.buffer.batched.values()
        earlier_samples = fmean([group.baseline.weight for group in groups if group.baseline is not None] or [0.0])
        state.tracker.learn(groups, event.change, rules.settings.tracked)
    state.slots.consume(event.policy_version, state.buffer.train())
    state.trainer_version = event.policy_version
    state.batch = state.next_batch or batch_after(state, rules.settings)
    state.next_batch = None
    state.dropped_in_a_row = 0
    last_size = rules.sizer.size
    decision = rules.sizer.observe(state.lengths, step.batches, earlier_samples)
    state.lengths = []
    state.sizing_figures = decision.figures
    if decision.size != last_size or decision.notify:
        out.append(do.Decision(subject="group_size", reason=decision.reason, figures=decision.figures))


def batch_after(state: RunState, settings: ControlSettings) -> Batch:
    """Make an empty batch that follows the current one."""
    return Batch(batch_id=state.batch.batch_id + 1, target=settings.batch_weight)


def _finish_push(state: RunState, event: on.WeightsLive, settings: ControlSettings, out: Actions) -> None:
    version = event.policy_version
    state.pending.push = None
    state.pending.paused_for = None
    state.live_version = version
    state.slots.version_live(version)
    is_last = version == state.steps  # ``wind_down`` orders the last evaluation and checkpoint
    evaluation_due = settings.evaluate_every and version % settings.evaluate_every == 0
    if evaluation_due and not (is_last and settings.evaluate_at_end):
        limit = settings.evaluate_limit
        # A requested evaluation of all prompts takes the place of the regular one: there may be no time between two.
        if "evaluate" in state.steering.waiting_orders:
            state.steering.waiting_orders.remove("evaluate")
            limit = 0
        order_evaluation(state, version, limit, out)
    if settings.checkpoint_every and version % settings.checkpoint_every == 0 and not is_last:
        order_checkpoint(state, version, out)


def order_evaluation(state: RunState, version: int, limit: int, out: Actions) -> None:
    """Order an evaluation of ``version`` on the first ``limit`` held-out prompts (0: all), except in a drain, or where
    the same evaluation was ordered already. It begins as soon as its version is live. The next batch is trained
    meanwhile, but its push waits for the evaluation, so that two evaluations never run at once."""
    if state.draining or state.evaluated == (version, limit):
        return
    state.evaluated = (version, limit)
    state.pending.evaluation = do.Evaluate(policy_version=version, limit=limit)
    out.append(state.pending.evaluation)


def order_checkpoint(state: RunState, version: int, out: Actions) -> None:
    """Order a checkpoint of ``version``, unless one was ordered already."""
    if state.saved_version != version:
        state.pending.checkpoint = state.saved_version = version
        out.append(do.WriteCheckpoint(policy_version=version))
