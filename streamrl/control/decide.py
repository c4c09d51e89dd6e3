"""Decisions after an event: ``decide(state, rules, out)``, which ``Control.handle`` calls after ``apply``.

In this order: drop stale groups, hand ready groups to training, settle a full batch and close it, publish, launch, end.
The time for an event grows with the size of its group, and with nothing else that is in flight."""

from __future__ import annotations

import math

from streamrl.base.types import DropReason
from streamrl.buffers.rollout_buffer import oldest_first
from streamrl.buffers.slots import last_version
from streamrl.control import actions as do
from streamrl.control.admission import resume_when_idle
from streamrl.control.apply import Actions, drop_group, end_run, observe_deferred, order_checkpoint, order_evaluation
from streamrl.control.launch import launch, view
from streamrl.control.round_policy import Candidate, Remainder, Rules
from streamrl.control.run_state import Batch, RunState, next_attempt, pause_groups, requeue_interrupted
from streamrl.control.unanswered_orders import train_order
from streamrl.recipe.scheduling import StalePolicy

MAX_DROPPED_BATCHES = 20
"""A run ends with an error once it drops the groups of this many batches without one optimizer step."""


def decide(state: RunState, rules: Rules, out: Actions) -> None:
    """Append the actions that are due now to ``out``, in order, and record them in ``state``."""
    if state.live_version < 0:
        return
    if state.ending:
        wind_down(state, rules, out)
        return
    drop_stale(state, rules, out)
    fill(state, rules, out)
    resume_when_idle(state, rules, out)
    close(state, rules, out)
    publish(state, out)
    if not state.steering.paused and not (rules.settings.in_turns and state.has_rank_work):
        launch(state, rules, out)
    if _starved(state):
        if state.prompts.limit:
            state.steps = state.trainer_version  # the last prompts were dropped: the run ends a step early
        state.starved = not state.prompts.limit
        wind_down(state, rules, out)
        return
    error = _dropped_too_many(state, rules) or _deadlock(state, rules)
    if error:
        end_run(state, do.End(reason=error, error=True), out)


def drop_stale(state: RunState, rules: Rules, out: Actions) -> None:
    """Drop groups whose oldest token no batch may train any more."""
    # ``trainer_version`` trains the open batch, and the version after it the next batch.
    next_to_train = state.trainer_version + int(state.batch_closed)
    for group in state.buffer.stale_groups(next_to_train - rules.settings.max_staleness):
        drop_group(state, group, DropReason.STALE, out)
        if rules.settings.when_stale is StalePolicy.REGENERATE:
            state.prompts.waiting.insert(0, next_attempt(group, None))


def fill(state: RunState, rules: Rules, out: Actions) -> None:
    """Hand ready groups to training while the batch takes more."""
    # Where sizes vary, a group that was refused may fit once others have joined.
    while _fill_once(state, rules, out):
        pass


def _fill_once(state: RunState, rules: Rules, out: Actions) -> bool:
    """Offer every ready group to the batch once. Returns whether a group joined."""
    batch = state.batch
    buffer = state.buffer
    if state.batch_closed or batch.missing <= 0 or not buffer.ready:
        return False
    joined = False
    round_view = view(state, rules)
    for group in sorted((buffer.untrained[group_id] for group_id in buffer.ready), key=oldest_first):
        if batch.missing <= 0:
            break
        candidate = Candidate(
            group_id=group.group_id,
            trajectories=round_view.trajectories_of(group.keep),
            tokens=group.tokens,
            deadline=last_version(group.oldest_version, rules.settings.max_staleness),
        )
        if not rules.policy.may_join(round_view, candidate):
            continue
        buffer.batch(group)
        batch.take(group)
        if rules.settings.tracked is not None:
            group.baseline = state.tracker.baseline(group.prompt.prompt_id, rules.settings.tracked)
        joined = True
        round_view = view(state, rules)
        out.append(train_order(batch, group))
        if rules.policy.cut_tokens and batch.tokens >= rules.policy.cut_tokens:
            batch.target = batch.filled  # enough tokens: the batch is full before it has its trajectories
    return joined


def close(state: RunState, rules: Rules, out: Actions) -> None:
    """Settle a full batch, and order the optimizer step once the trainer may take it."""
    batch = state.batch
    # Once the source is exhausted, the last groups are trained as one smaller batch.
    nothing_comes = state.prompts.empty and not state.pending.draw and not state.buffer.untrained
    if state.batch_closed or not batch.groups or (batch.missing > 0 and not nothing_comes):
        return
    _settle(state, rules, out)
    # The step waits until the last version is live, since engines take one version at a time, and until a checkpoint is
    # written, since the checkpoint has the trainer's current weights.
    if state.live_version < state.trainer_version or state.pending.checkpoint is not None:
        return
    if rules.settings.in_turns and state.has_engine_work:
        return  # the engines sleep during the step
    _predict_steps(state)
    nothing_runs = all(group.paused for group in state.buffer.untrained.values())
    state.pending.step = do.StepOptimizer(
        batch_id=batch.batch_id,
        policy_version=state.trainer_version + 1,
        groups=len(batch.groups),
        samples=batch.samples,
        trained_tokens=batch.tokens,
        batches=max(1, round(batch.filled / rules.settings.batch_weight)),
        engines_idle=rules.settings.in_turns or (state.pending.evaluation is None and nothing_runs),
        round_kind=state.round_kind,
        last=state.trainer_version + 1 >= state.steps,
        steps=state.steps,
        learning_rate=rules.settings.learning_rate,
    )
    out.append(state.pending.step)
    drop_stale(state, rules, out)


def _predict_steps(state: RunState) -> None:
    """Predict the steps of a run that ends after a number of prompts, from the pace until the batch that closes now.
    The prediction is right once no prompt is left beside this batch."""
    pool = state.prompts
    if not pool.limit:
        return
    refs = [*pool.waiting, *pool.reserved, *pool.queue, *(group.prompt for group in state.buffer.untrained.values())]
    remaining = max(pool.limit - pool.drawn, 0) + len({ref.prompt_id for ref in refs})
    step = state.trainer_version + 1
    state.steps = step + math.ceil(remaining * step / max(pool.limit - remaining, 1))


def _settle(state: RunState, rules: Rules, out: Actions) -> None:
    """Defer, pause or keep the groups that are not in the full batch, as the policy's ``remainder`` says."""
    if len(state.buffer.untrained) == len(state.buffer.paused):
        return
    remainder = rules.policy.remainder(view(state, rules))
    if remainder is Remainder.PAUSE:
        pause_groups(state, state.running_groups, out)
    elif remainder is Remainder.REQUEUE:
        longest = max((group.longest for group in state.buffer.groups()), default=0)
        for group in [group for group in state.buffer.untrained.values() if not group.paused]:
            observe_deferred(group, longest, rules)
            drop_group(state, group, rules.policy.drop_reason, out)
            state.prompts.queue.append(next_attempt(group, group.seed_base if rules.policy.replays else None))
            state.prompts.unsorted = True


def publish(state: RunState, out: Actions) -> None:
    """Order the push of the trainer's version. The push waits for a running evaluation, whose figure belongs to one
    version."""
    pending = state.pending
    if pending.push is None and pending.evaluation is None and state.live_version < state.trainer_version:
        pending.push = state.trainer_version
        out.append(do.PublishWeights(policy_version=state.trainer_version, last=state.ending))


def wind_down(state: RunState, rules: Rules, out: Actions) -> None:
    """End the run without training a further batch: let a closed batch finish and go live, drop all other groups,
    evaluate, save, end."""
    reason = DropReason.DRAINED if state.draining or state.starved else DropReason.CANCELLED
    groups = list(state.buffer.untrained.values())
    if not state.batch_closed:
        groups += state.buffer.batched.values()
    for group in sorted(groups, key=lambda group: group.group_id):
        drop_group(state, group, reason, out)
        requeue_interrupted(state, group)  # for a run that continues from the last checkpoint
    if not state.batch_closed:
        state.batch = Batch(batch_id=state.batch.batch_id, target=rules.settings.batch_weight)
    publish(state, out)
    if state.batch_closed or state.live_version < state.trainer_version or state.busy:
        return
    if rules.settings.evaluate_at_end:
        order_evaluation(state, state.live_version, 0, out)
    if rules.settings.checkpoint_at_end:
        order_checkpoint(state, state.live_version, out)
    if not state.busy:
        end_run(state, do.End(reason=_end_reason(state)), out)


def _end_reason(state: RunState) -> str:
    if state.stop_reason is not None:
        return state.stop_reason
    return do.PROMPTS_EXHAUSTED if state.starved else do.ALL_STEPS_DONE


# ---- ends that no user requested ------------------------------------------------------------------


def _starved(state: RunState) -> bool:
    idle = not state.buffer and not state.batch_closed and state.pending.push is None
    nothing_comes = state.prompts.empty and not state.pending.draw
    return nothing_comes and idle and state.live_version == state.trainer_version


def _dropped_too_many(state: RunState, rules: Rules) -> str:
    groups = state.batch.target // rules.settings.weight_of(state.batch.group_size or rules.settings.group_size)
    if state.dropped_in_a_row <= MAX_DROPPED_BATCHES * max(groups, rules.settings.batch_groups):
        return ""
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(state.buffer.dropped.items()))
    return (
        f"{state.dropped_in_a_row} groups in a row were dropped without one optimizer step "
        f"(trajectories dropped so far: {reasons}). With dynamic sampling this means that every prompt is "
        "always or never solved: choose prompts of other difficulty, a larger group_size, or "
        "dynamic_sampling = false"
    )


def _deadlock(state: RunState, rules: Rules) -> str:
    """Message of the error where no event can follow; empty where one may. Paused groups count as under way, since some
    of their members may still be scored."""
    buffer = state.buffer
    pending = state.pending
    under_way = buffer.paused or len(buffer.untrained) > len(buffer.ready)
    awaits_answer = state.batch_closed or pending.push is not None or pending.draw or state.busy
    if under_way or awaits_answer or state.steering.paused:
        return ""
    round_view = view(state, rules)
    return (
        f"the rounds ({rules.settings.policy or rules.settings.rounds}) wait for nothing: no trajectory runs, "
        f"{round_view.missing} of {round_view.target} places of the batch are free, {len(buffer.ready)} groups are "
        f"ready, {round_view.queued} prompts queue and {round_view.free_slots} slots are free; "
        "correct what launch, may_join or slots answer"
    )
