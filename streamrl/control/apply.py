"""Changes of the state by an event: ``apply(state, event, rules, out)``. Afterwards ``decide`` orders what follows from
it."""

from __future__ import annotations

from operator import itemgetter

from streamrl.base.types import DropReason, FinishReason, TrajectoryId
from streamrl.buffers.rollout_buffer import Group, Member, PromptRef
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.events import ControlEvent
from streamrl.control.model import Batch, GroupLengths, RunState
from streamrl.control.round_policy import GroupObserved, Rules
from streamrl.control.settings import ControlSettings
from streamrl.recipe.rewards import FailurePolicy
from streamrl.recipe.scheduling import Straggler

Actions = list[ControlAction]


def apply(state: RunState, event: ControlEvent, rules: Rules, out: Actions) -> bool:
    """Change ``state`` by ``event``; actions that follow from it at once are appended to ``out``. Returns whether
    anything may have to be decided: not for an answer that comes twice."""
    if isinstance(event, on.Answer) and not state.pending.awaits(event):
        return False
    match event:
        case on.TrajectoryScored():
            return _scored(state, event, rules, out)
        case on.TrajectoryFailed():
            return _failed(state, event, rules, out)
        case on.PromptsDrawn():
            _drawn(state, event)
        case on.RunBegan():
            _began(state, event, rules.settings, out)
        case on.BatchTrained():
            _trained(state, event, rules, out)
        case on.WeightsLive():
            _live(state, event, rules.settings, out)
        case on.EvaluationDone():
            state.pending.evaluation = None
        case on.CheckpointDone():
            state.pending.checkpoint = None
        case on.StopRequested():
            _stop(state, event, out)
        case on.RunContinued():
            _continue(state, event)
        case on.EnginesMeasured() | on.RoundTimed() | on.RoundsAdvised():
            rules.policy.observe(event)
            return isinstance(event, on.EnginesMeasured) and event.environment > 0  # others may be launched
    return True


# ---- the run -------------------------------------------------------------------------------------


def _began(state: RunState, event: on.RunBegan, settings: ControlSettings, out: Actions) -> None:
    version = event.policy_version
    if state.live_version >= 0:
        raise ValueError(
            f"the run is to begin at version {version} in its middle, with version {state.live_version} live: one that "
            "goes on from its journal goes on with the event after the last one"
        )
    state.trainer_version = state.live_version = version
    state.steps = event.steps or state.steps
    # A resumed run goes on counting where the checkpoint was written.
    state.batch = Batch(batch_id=version, target=settings.batch_weight)
    state.next_group_id = max(state.next_group_id, version * settings.batch_groups)
    if version >= state.steps:
        reason = f"nothing to train: the weights are of step {version} already; raise run.steps to go on"
        end(state, do.End(reason=reason), out)
    elif settings.evaluate_at_start:
        order_evaluation(state, version, 0, out)


def _continue(state: RunState, event: on.RunContinued) -> None:
    """Continue after a drain, or after an error that ended the run: not after its last step, nor its last prompt."""
    state.steps = event.steps or state.steps
    if state.trainer_version < state.steps and (state.draining or not state.starved):
        state.stop_reason = None
        state.starved = False
        state.pending.end = None
        state.dropped_in_a_row = 0
        state.recent_failures.clear()


def _stop(state: RunState, event: on.StopRequested, out: Actions) -> None:
    if not state.draining:
        state.stop_reason = event.reason
        if state.pending.evaluation is not None:  # the run ends once EvaluationDone says that nothing is left of it
            out.append(do.CancelEvaluation(policy_version=state.pending.evaluation.policy_version))


def end(state: RunState, action: do.End, out: Actions) -> None:
    """The run is over; the first reason counts."""
    if state.pending.end is None:
        state.pending.end = action
        out.append(action)


# ---- prompts and trajectories --------------------------------------------------------------------


def _drawn(state: RunState, event: on.PromptsDrawn) -> None:
    state.pending.draw = 0
    pool = state.prompts
    pool.drawn += len(event.prompt_ids)
    pool.exhausted = event.exhausted
    tokens = event.prompt_tokens or (0,) * len(event.prompt_ids)
    pool.waiting += [PromptRef(prompt_id=p, tokens=n) for p, n in zip(event.prompt_ids, tokens, strict=True)]


def _scored(state: RunState, event: on.TrajectoryScored, rules: Rules, out: Actions) -> bool:
    member = state.buffer.member(event.id)
    if member is not None and member.scored:
        return False  # it came twice, as it may where a controller was killed: the first one counts
    group = state.buffer.score(
        event.id,
        reward=event.reward,
        tokens=event.tokens,
        reason=event.finish_reason,
        oldest=event.oldest_version,
        separate=event.separate_rewards,
        seconds=event.seconds,
    )
    if group is None:  # it was dropped while its result was on the way
        state.buffer.wasted_tokens += event.tokens
        out.append(do.Drop(ids=(event.id,), reason=DropReason.CANCELLED))
        return False
    _note_failure(state, rules.settings, failed=False)
    surplus: tuple[TrajectoryId, ...] = ()
    if group.open and len(group.members) - group.open >= group.keep:
        surplus = group.open_ids
        for trajectory in surplus:
            state.buffer.drop_member(trajectory, DropReason.LOST_RACE)
        out.append(do.Drop(ids=surplus, reason=DropReason.LOST_RACE, abort=True))
    return _group_changed(state, group, rules, out, cut=surplus)


def _failed(state: RunState, event: on.TrajectoryFailed, rules: Rules, out: Actions) -> bool:
    member = state.buffer.member(event.id)
    if member is not None and member.scored:
        return False
    group = state.buffer.drop_member(event.id, event.reason, tokens=event.tokens)
    if group is None:
        return False
    if not group.members:  # until then it takes the place of a whole group in a batch, and keeps its slots
        state.slots.release(group.size)
    _note_failure(state, rules.settings, failed=True)
    if event.policy == FailurePolicy.DROP_GROUP and group.members:
        drop_group(state, group, DropReason.REWARD_FAILED, out)
        changed = True
    else:
        changed = _group_changed(state, group, rules, out)
    if why := _too_many_failures(state, event, rules.settings):  # after all else: a resume goes on from here
        end(state, do.End(reason=why, error=True), out)
    return changed


def _note_failure(state: RunState, settings: ControlSettings, *, failed: bool) -> None:
    state.recent_failures.append(failed)
    del state.recent_failures[: -settings.failure_window]


def _too_many_failures(state: RunState, event: on.TrajectoryFailed, settings: ControlSettings) -> str:
    if event.policy == FailurePolicy.STOP:
        return f"a reward failed, and the recipe says stop: {event.message}"
    failed = sum(state.recent_failures)
    seen = len(state.recent_failures)
    if failed <= settings.max_failed_share * settings.failure_window:
        return ""  # of the whole window, also while it fills: more of them cannot be mended by what comes
    return (
        f"{failed} of the last {seen} trajectories failed, more than the share of "
        f"{settings.max_failed_share:g} that reward_limits.max_failed_share allows; "
        f"the last one ({event.reason}): {event.message or 'no message'}"
    )


def _group_changed(
    state: RunState, group: Group, rules: Rules, out: Actions, *, cut: tuple[TrajectoryId, ...] = ()
) -> bool:
    """A member ended, and a race ``cut`` others: drop a group too small for the baseline, or without signal under
    dynamic sampling."""
    if not group.members:
        state.dropped_in_a_row += 1
        return True
    if not group.ready:
        return False
    _observe_complete(state, group, cut, rules)
    settings = rules.settings
    if settings.compares_siblings and group.keep > 1 and len(group.members) == 1:
        drop_group(state, group, DropReason.REWARD_FAILED, out)
    elif settings.dynamic_sampling and group.keep > 1 and group.zero_variance:
        drop_group(state, group, DropReason.ZERO_VARIANCE, out)
    return True


def drop_group(state: RunState, group: Group, reason: DropReason, out: Actions) -> None:
    """End a group that is not in a closed batch, with all its members."""
    state.buffer.drop_group(group, reason)
    state.slots.release(group.size)
    if reason not in (DropReason.LOST_RACE, DropReason.CUT):
        state.dropped_in_a_row += 1
    out.append(do.Drop(ids=group.ids, reason=reason, abort=group.open > 0))


# ---- lengths: reported before any filter, or groups that all fail or all succeed would be missing ----


def _observe_complete(state: RunState, group: Group, cut: tuple[TrajectoryId, ...], rules: Rules) -> None:
    rules.policy.observe(_observed(group))
    # To the group sizing a group is the first members of those that were launched: any are a fair sample of its size.
    launched = sorted([*group.members.items(), *((trajectory.sample, None) for trajectory in cut)], key=itemgetter(0))
    judged = [member for _, member in launched[: group.keep]]
    unit = rules.settings.group_sizing.straggler
    state.lengths.append(
        GroupLengths(
            lengths=tuple(0 if m is None else _length(m, unit) for m in judged),
            truncated=tuple(m is not None and m.finish_reason is FinishReason.LENGTH for m in judged),
        )
    )


def _length(member: Member, unit: Straggler) -> int:
    return max(1, member.tokens if unit is Straggler.TOKENS else round(1000 * member.seconds))


def observe_deferred(group: Group, longest: int, rules: Rules) -> None:
    """``group`` was stopped; ``longest``: the longest completion of its round by then."""
    rules.policy.observe(_observed(group, cut=True, cut_at=longest))


def _observed(group: Group, *, cut: bool = False, cut_at: int = 0) -> GroupObserved:
    scored = [m for m in group.members.values() if m.scored]
    return GroupObserved(
        prompt_id=group.prompt.prompt_id,
        round_kind=group.round_kind,
        size=group.keep,
        lengths=tuple(m.tokens for m in scored),
        truncated=sum(m.finish_reason is FinishReason.LENGTH for m in scored),
        prompt_tokens=group.prompt.tokens,
        cut=cut,
        cut_at=cut_at,
    )


# ---- versions ------------------------------------------------------------------------------------


def _trained(state: RunState, event: on.BatchTrained, rules: Rules, out: Actions) -> None:
    step = state.pending.step
    state.pending.step = None
    assert step is not None
    state.slots.consume(event.policy_version, state.buffer.train())
    state.trainer_version = event.policy_version
    state.batch = state.next_batch or batch_after(state, rules.settings)
    state.next_batch = None
    state.dropped_in_a_row = 0
    before = rules.sizer.size
    decision = rules.sizer.observe(state.lengths, step.batches)
    state.lengths = []
    state.sizing_figures = decision.figures
    if decision.size != before or decision.notify:
        out.append(do.Decision(subject="group_size", reason=decision.reason, figures=decision.figures))


def batch_after(state: RunState, settings: ControlSettings) -> Batch:
    """An empty batch that follows the one that takes groups now."""
    return Batch(batch_id=state.batch.batch_id + 1, target=settings.batch_weight)


def _live(state: RunState, event: on.WeightsLive, settings: ControlSettings, out: Actions) -> None:
    version = event.policy_version
    state.pending.push = None
    state.pending.paused_for = None
    state.live_version = version
    state.slots.version_live(version)
    last = version == state.steps  # then what falls due at the end is ordered there
    if settings.evaluate_every and version % settings.evaluate_every == 0 and not (last and settings.evaluate_at_end):
        if asked := "evaluate" in state.steering.wanted:  # here: there may be no time for it between two regular ones
            state.steering.wanted.remove("evaluate")
        order_evaluation(state, version, 0 if asked else settings.evaluate_limit, out)
    if settings.checkpoint_every and version % settings.checkpoint_every == 0 and not last:
        order_checkpoint(state, version, out)


def order_evaluation(state: RunState, version: int, limit: int, out: Actions) -> None:
    """Order an evaluation of ``version`` on the first ``limit`` held-out prompts (0: all); not in a drain, and not a
    second time. It falls due with a version that goes live and begins at once: the batch is trained meanwhile, only the
    push waits. So there is never a second one."""
    if state.draining or state.evaluated == (version, limit):
        return
    state.evaluated = (version, limit)
    state.pending.evaluation = do.Evaluate(policy_version=version, limit=limit)
    out.append(state.pending.evaluation)


def order_checkpoint(state: RunState, version: int, out: Actions) -> None:
    """Order a checkpoint of ``version``, unless it was written already."""
    if state.saved_version != version:
        state.pending.checkpoint = state.saved_version = version
        out.append(do.WriteCheckpoint(policy_version=version))
