"""The launch phase of ``decide``: asks the round policy for launches, and makes groups of prompts.

``decide`` calls ``launch`` last, and ``view`` wherever it asks the policy. With ``rollout.advanced.presubmit`` the next
round opens while the optimizer step still runs: its requests wait in the paused engines for the version that the step
makes. This file calls such launches *ahead*."""

from __future__ import annotations

from msgspec.structs import replace

from streamrl.buffers.rollout_buffer import Group, Member, PromptRef
from streamrl.buffers.slots import last_version
from streamrl.control import actions as do
from streamrl.control.admission import free_slots
from streamrl.control.apply import Actions, batch_after
from streamrl.control.mixture import draw_order
from streamrl.control.round_policy import Launch, RoundView, Rules, Source
from streamrl.control.run_state import Batch, RunState, resume_groups
from streamrl.control.unanswered_orders import launch_order


def view(state: RunState, rules: Rules) -> RoundView:
    """Make the facts for the policy. For launches ahead, as if the version in the making were live already."""
    settings = rules.settings
    buffer = state.buffer
    ahead = _launches_ahead(state, rules)
    batch = _launch_batch(state, rules)
    paused = len(buffer.paused)
    # A round has one size: a group of another size, launched for a dropped one, would not fill the batch exactly.
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
        free_slots=free_slots(state, rules),
        steps_left=state.steps - state.trainer_version - int(state.batch_closed),
        when_stale=settings.when_stale,
        due=due,
    )


def launch(state: RunState, rules: Rules, out: Actions) -> None:
    """Ask the policy for launches until it has no more, or prompts must be drawn first."""
    while not state.pending.draw and not state.finished:
        round_view = view(state, rules)
        plan = rules.policy.launch(round_view)
        if plan is None or plan.groups <= 0:
            return
        if plan.because is not None:
            out.append(plan.because)
        if plan.source is Source.COHORT:
            ask_again = _load_cohort(state, plan, rules, round_view.group_size, out)
        elif plan.source is Source.PAUSED:
            ask_again = _resume(state, plan, rules, round_view.group_size, out)
        else:
            ask_again = _launch_groups(state, plan, rules, round_view.group_size, out)
        if not ask_again:
            return


def _load_cohort(state: RunState, plan: Launch, rules: Rules, size: int, out: Actions) -> bool:
    """Queue the prompts of a cohort once they are drawn: ``plan.copies`` of each, for groups of ``size``. Returns
    whether the queue has prompts, so that the policy can launch them."""
    pool = state.prompts
    if len(pool.waiting) < plan.groups and not pool.exhausted:
        _draw(state, plan.groups - len(pool.waiting), rules, out)
        return False
    cohort = pool.waiting[: plan.groups]
    pool.waiting = pool.waiting[plan.groups :]
    for ref in cohort:
        pool.queue += [replace(ref, group_size=size)] * plan.copies
    pool.unsorted = True
    return bool(pool.queue)


def _resume(state: RunState, plan: Launch, rules: Rules, size: int, out: Actions) -> bool:
    """Resume paused groups. Returns whether there were any."""
    groups = state.buffer.paused_groups()[: plan.groups]
    if not groups:
        return False
    _open_round(state, plan, rules, size, out)
    resume_groups(state, groups, out)
    return True


def _launch_groups(state: RunState, plan: Launch, rules: Rules, size: int, out: Actions) -> bool:
    """Launch groups of ``plan`` as far as slots and prompts allow; order a draw where fresh prompts lack. Returns
    whether the policy may be asked again: after all groups of the plan, or after any groups from the queue."""
    if not 0 <= plan.keep <= plan.size or plan.size < 1:
        raise ValueError(
            f"the rounds launch groups of {plan.size} trajectories of which {plan.keep} are kept: "
            "answer a size of 1 or more, and keep as many or fewer"
        )
    limit = min(plan.groups, free_slots(state, rules) // plan.size)
    launched = 0
    while launched < limit:
        ref = _take_prompt(state, plan, rules)
        if ref is None:
            break
        _open_round(state, plan, rules, size, out)
        _launch_group(state, plan, ref, rules, out)
        launched += 1
    if launched < limit and plan.source is Source.FRESH and not state.prompts.exhausted:
        _draw(state, limit - launched, rules, out)
    if not launched:
        return False
    return launched == plan.groups or plan.source is Source.QUEUE


def _take_prompt(state: RunState, plan: Launch, rules: Rules) -> PromptRef | None:
    """Take the next prompt for ``plan`` out of the pool; None where there is none."""
    pool = state.prompts
    if plan.source is Source.FRESH:
        return pool.waiting.pop(0) if pool.waiting else None
    if pool.unsorted:
        pool.queue = list(rules.policy.sorted_queue(pool.queue))
        pool.unsorted = False
    for index, ref in enumerate(pool.queue):
        if plan.queued_at in (0, ref.group_size):
            return pool.queue.pop(index)
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
    """Set kind, target and group size of the batch at the first launch of its round. A launch ahead also opens the next
    batch and pauses the engines."""
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
    """Trajectories of one unit of weight, in a round of groups of ``size``: policies see trajectories, control counts
    weight."""
    return size // rules.settings.weight_of(size)


def _draw(state: RunState, count: int, rules: Rules, out: Actions) -> None:
    pool = state.prompts
    if pool.limit:
        count = min(count, pool.limit - pool.drawn)
    state.pending.draw = count
    out.append(draw_order(pool, rules.settings.shares, count))


def _launch_batch(state: RunState, rules: Rules) -> Batch:
    """Batch that groups launched now may join."""
    if not _launches_ahead(state, rules):
        return state.batch
    return state.next_batch or batch_after(state, rules.settings)


def _launches_ahead(state: RunState, rules: Rules) -> int:
    """1 where launches wait in the paused engines for the version in the making, else 0."""
    presubmits = rules.settings.presubmit and rules.policy.on_policy
    if not presubmits or not state.batch_closed or state.pending.evaluation is not None:
        return 0
    # Groups of an older version still need the engines, which a launch ahead pauses.
    return int(all(version > state.trainer_version for version in state.buffer.by_version))
