"""The launch phase of a decision: asks the round policy what to launch, and makes groups of prompts.

With ``rollout.advanced.presubmit`` the next round opens while the step still runs: its requests wait in the paused
engines, and the weights that are trained now sample them."""

from __future__ import annotations

import msgspec

from streamrl.base.types import TrajectoryId
from streamrl.buffers.rollout_buffer import Group, Member, PromptRef
from streamrl.buffers.slots import last_version
from streamrl.control import actions as do
from streamrl.control.apply import Actions, batch_after
from streamrl.control.model import Batch, RunState
from streamrl.control.pending import launch_order
from streamrl.control.round_policy import Launch, RoundView, Rules, Source


def view(state: RunState, rules: Rules) -> RoundView:
    """Make the policy's view. In advance of a version: as if it were live already."""
    settings = rules.settings
    buffer = state.buffer
    ahead = _launches_ahead(state, rules)
    batch = _launch_batch(state, rules)
    paused = len(buffer.paused)
    # One size a round: a refill of another size would not fill the batch exactly.
    size = batch.group_size or rules.sizer.size
    unit = _trajectories_of_a_unit(size, rules)
    due = tuple((last_version(version, settings.max_staleness), unit * weight) for version, weight in buffer.versions())
    return RoundView(
        trainer_version=state.trainer_version + ahead,
        live_version=state.live_version + ahead,
        batch_trajectories=unit * settings.batch_weight,
        group_size=size,
        target=unit * batch.target,
        missing=unit * batch.missing,
        keeps_prompts=settings.group_sizing.keeps_prompts,
        joined=len(batch.groups),
        batch_closed=state.batch_closed and not ahead,
        round_kind=batch.round_kind,
        untrained=len(buffer.untrained) - paused,
        untrained_trajectories=sum(count for _, count in due),
        paused=paused,
        queue=tuple(state.prompts.queue),
        exhausted=state.prompts.exhausted and not state.prompts.waiting,
        free_slots=rules.slots - state.slots.in_use,
        steps_left=state.steps - state.trainer_version - int(state.batch_closed),
        when_stale=settings.when_stale,
        due=due,
    )


def launch(state: RunState, rules: Rules, out: Actions) -> None:
    """Ask the policy until it has nothing more to launch, or prompts must be drawn first."""
    while not state.pending.draw and not state.finished:
        seen = view(state, rules)
        plan = rules.policy.launch(seen)
        if plan is None or plan.groups <= 0:
            return
        if plan.because is not None:
            out.append(plan.because)
        if plan.source is Source.COHORT:
            went = _load_cohort(state, plan, seen.group_size, out)
        elif plan.source is Source.PAUSED:
            went = _resume(state, plan, rules, seen.group_size, out)
        else:
            went = _launch_groups(state, plan, rules, seen.group_size, out)
        if not went:
            return


def _load_cohort(state: RunState, plan: Launch, size: int, out: Actions) -> bool:
    """Queue the prompts of a cohort, once they are drawn: ``plan.copies`` of each, for groups of ``size``."""
    pool = state.prompts
    if len(pool.waiting) < plan.groups and not pool.exhausted:
        _draw(state, plan.groups - len(pool.waiting), out)
        return False
    chosen = pool.waiting[: plan.groups]
    pool.waiting = pool.waiting[plan.groups :]
    for ref in chosen:
        pool.queue += [msgspec.structs.replace(ref, group_size=size)] * plan.copies
    pool.unsorted = True
    return bool(pool.queue)


def _resume(state: RunState, plan: Launch, rules: Rules, size: int, out: Actions) -> bool:
    chosen = state.buffer.paused_groups()[: plan.groups]
    if not chosen:
        return False
    _open_round(state, plan, rules, size, out)
    ids: list[TrajectoryId] = []
    for group in chosen:
        state.buffer.resume(group)
        ids.extend(group.open_ids)
    out.append(do.ResumeTrajectories(ids=tuple(ids)))
    return True


def _launch_groups(state: RunState, plan: Launch, rules: Rules, size: int, out: Actions) -> bool:
    """Return whether all groups of ``plan`` were launched that slots allow; where prompts lack, they are drawn
    first."""
    if not 0 <= plan.keep <= plan.size or plan.size < 1:
        raise ValueError(
            f"the rounds launch groups of {plan.size} trajectories of which {plan.keep} are kept: "
            "answer a size of 1 or more, and keep as many or fewer"
        )
    wanted = min(plan.groups, (rules.slots - state.slots.in_use) // plan.size)
    launched = 0
    while launched < wanted and (ref := _take(state, plan, rules)) is not None:
        _open_round(state, plan, rules, size, out)
        _launch_group(state, plan, ref, rules, out)
        launched += 1
    if launched < wanted and plan.source is Source.FRESH and not state.prompts.exhausted:
        _draw(state, wanted - launched, out)
    return 0 < launched == plan.groups or (launched > 0 and plan.source is Source.QUEUE)


def _take(state: RunState, plan: Launch, rules: Rules) -> PromptRef | None:
    pool = state.prompts
    if plan.source is Source.FRESH:
        return pool.waiting.pop(0) if pool.waiting else None
    if pool.unsorted:
        pool.queue = list(rules.policy.sorted_queue(pool.queue))
        pool.unsorted = False
    for place, ref in enumerate(pool.queue):
        if plan.queued_at in (0, ref.group_size):
            return pool.queue.pop(place)
    return None


def _launch_group(state: RunState, plan: Launch, ref: PromptRef, rules: Rules, out: Actions) -> None:
    version = state.live_version + _launches_ahead(state, rules)
    keep = plan.keep or plan.size
    group = Group(
        group_id=state.next_group_id,
        prompt=ref,
        launch_version=version,
        oldest_version=version,
        size=plan.size,
        keep=keep,
        weight=rules.settings.weight_of(keep),
        round_kind=plan.round_kind,
        members={sample: Member(oldest_version=version) for sample in range(plan.size)},
        open=plan.size,
        queued=plan.source is Source.QUEUE,
        sampling=rules.settings.sampling,
    )
    state.buffer.admit(group)
    state.next_group_id += 1
    state.slots.charge(group.size)
    out.append(launch_order(group, group.ids, version))


def _open_round(state: RunState, plan: Launch, rules: Rules, size: int, out: Actions) -> None:
    """The first launch of a round names it, and says what fills its batch and how large its groups are."""
    batch = _launch_batch(state, rules)
    if _launches_ahead(state, rules):
        state.next_batch = batch
        if state.pending.paused_for is None:
            state.pending.paused_for = state.trainer_version + 1
            out.append(do.PauseEngines(policy_version=state.trainer_version + 1))
    if not batch.round_kind:
        batch.round_kind = plan.round_kind
        batch.target = plan.target // _trajectories_of_a_unit(size, rules) or batch.target
        batch.group_size = plan.group_size or size


def _trajectories_of_a_unit(size: int, rules: Rules) -> int:
    """Trajectories that a policy sees for each unit of weight, in a round of groups of ``size``."""
    return size // rules.settings.weight_of(size)


def _draw(state: RunState, count: int, out: Actions) -> None:
    state.pending.draw = count
    out.append(do.DrawPrompts(count=count))


def _launch_batch(state: RunState, rules: Rules) -> Batch:
    """The batch that what is launched now is for."""
    if not _launches_ahead(state, rules):
        return state.batch
    return state.next_batch or batch_after(state, rules.settings)


def _launches_ahead(state: RunState, rules: Rules) -> int:
    """1 where what is launched now waits in the engines for the version that is being made, else 0."""
    return int(
        rules.settings.presubmit
        and rules.policy.on_policy
        and state.batch_closed
        and state.pending.evaluation is None
        and all(version > state.trainer_version for version in state.buffer.by_version)
    )
