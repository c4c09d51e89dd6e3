"""Orders of users in control: ``steer``, which ``Control`` calls between ``apply`` and ``decide``. Pure.

A change of settings is applied while the batch of its step is empty, so that all groups of a batch have the same
settings, whenever the user made the change. Where it changes the rounds, groups under way for later batches (in
continuous rounds, submitted in advance, or paused) are dropped, and their prompts are sampled again. Other changes
leave them: each group has the sampling parameters of its launch."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from streamrl.base.types import DropReason
from streamrl.control import events as on
from streamrl.control.actions import Decision
from streamrl.control.apply import Actions, drop_group, order_checkpoint, order_evaluation
from streamrl.control.round_policy import GroupSizer, RoundPolicy, Rules
from streamrl.control.run_state import Batch, RunState, requeue_interrupted
from streamrl.control.settings import ControlSettings
from streamrl.control.steering.live_keys import LIVE, SAMPLED_AGAIN, STEPS, with_values

MakePolicies = Callable[[ControlSettings], tuple[RoundPolicy, GroupSizer]]
PAUSED = "nothing more is launched until `streamrl continue`; what runs is finished"


def steer(make: MakePolicies, state: RunState, rules: Rules, event: on.ControlEvent, out: Actions) -> Rules:
    """Take ``event`` where it is an order of a user, and carry out all orders that are due now. Returns the rules that
    hold from here on. With ``make``, the function that makes the policies of the run, it is a ``Steer``."""
    _take_order(state, event, out)
    batch = state.batch
    round_may_open = isinstance(event, on.BatchTrained) or not (batch.round_kind or state.ending)
    changes = state.steering.waiting_changes
    while round_may_open and not batch.groups and not state.batch_closed and changes:
        if changes[0].step > batch.batch_id + 1:
            break
        rules = _apply_change(make, state, rules, changes.pop(0), out)
        batch = state.batch
    _order_requested(state, out)
    return rules


def _take_order(state: RunState, event: on.ControlEvent, out: Actions) -> None:
    """Note the order of a user in ``state``; other events change nothing."""
    steering = state.steering
    match event:
        case on.Steered(order="pause" | "continue" as order):
            if steering.paused != (order == "pause"):
                steering.paused = not steering.paused
                out.append(Decision(subject="pause", reason=PAUSED if steering.paused else "launches go on"))
        case on.Steered(order="return_engine", engine=engine):
            steering.engines_away.pop(engine, None)
            out.append(Decision(subject="engine", reason=f"{engine} serves again once it has the live weights"))
        case on.Steered(order=order, engine=engine) if engine:
            steering.engines_away[engine] = order
            out.append(Decision(subject="engine", reason=f"{engine} serves nothing; others sample its requests"))
        case on.Steered(order=order):
            if order not in steering.waiting_orders:
                steering.waiting_orders.append(order)
        case on.SettingsChanged():
            steering.waiting_changes.append(event)
            steering.waiting_changes.sort(key=lambda change: change.step)
        case on.RunContinued(steps=steps):
            # Another number of steps than the user's last change: the recipe was edited after this change.
            if steps and steps != steering.changed.get(STEPS):
                steering.changed.pop(STEPS, None)
                steering.recipe_steps = 0
                changes = [_without_older_steps(change, steps) for change in steering.waiting_changes]
                steering.waiting_changes = [change for change in changes if change.values]


def _without_older_steps(change: on.SettingsChanged, recipe_steps: int) -> on.SettingsChanged:
    """Return ``change``; without its number of steps where the recipe had another number when the user made it."""
    if change.recipe_steps in (0, recipe_steps):
        return change
    values = {key: value for key, value in change.values.items() if key != STEPS}
    return replace(change, values=values)


def _apply_change(make: MakePolicies, state: RunState, rules: Rules, change: on.SettingsChanged, out: Actions) -> Rules:
    """Return the rules with the values of ``change``, which hold from the open batch on."""
    values = change.values
    settings = with_values(rules.settings, change.values)
    if STEPS in values:
        state.steering.recipe_steps = change.recipe_steps
        state.steps = values[STEPS]
        state.prompts.set_limit(0)
    state.steering.changed |= values
    state.steering.changes += 1
    figures = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
    reason = f"{change.assignments}, from step {state.batch.batch_id + 1} on"
    out.append(Decision(subject="settings", reason=reason, figures=figures))
    if not any(LIVE[key].partition(".")[0] in SAMPLED_AGAIN for key in values):
        return Rules(settings, rules.policy, rules.sizer)
    policy, sizer = make(settings)
    policy.restore(msgspec.to_builtins(rules.policy.snapshot()))
    sizer.restore(msgspec.to_builtins(rules.sizer.snapshot()))
    _sample_again(state, settings, out)
    return Rules(settings, policy, sizer)


def _sample_again(state: RunState, settings: ControlSettings, out: Actions) -> None:
    """Drop all groups and put their prompts back into the pool, at a group size that ``settings`` have. The open batch
    has no groups."""
    for group in sorted(state.buffer.untrained.values(), key=lambda group: group.group_id):
        drop_group(state, group, DropReason.CANCELLED, out)
        requeue_interrupted(state, group)
    state.dropped_in_a_row = 0
    # Nothing is in flight, so all slots are free; the new settings may have fewer.
    state.slots.version_live(state.trainer_version)
    state.batch = Batch(batch_id=state.batch.batch_id, target=settings.batch_weight)
    pool = state.prompts
    sizes = settings.group_sizes
    pool.queue = [ref if ref.group_size in sizes else replace(ref, group_size=sizes[0]) for ref in pool.queue]
    pool.unsorted = True


def waits_for_version(state: RunState) -> bool:
    """Return whether orders of users must wait: for an optimizer step, a version that is not live yet, or paused
    engines."""
    pending = state.pending
    settled = state.live_version == state.trainer_version and pending.push is None and pending.paused_for is None
    return state.batch_closed or not settled


def _order_requested(state: RunState, out: Actions) -> None:
    """Order the evaluation and checkpoint that a user requested, once the trainer's version is live and no other one is
    under way."""
    pending = state.pending
    requests = state.steering.waiting_orders
    if state.ending:
        requests.clear()  # ``wind_down`` orders the last evaluation and checkpoint
        state.steering.paused = False
    if not requests or waits_for_version(state):
        return
    if "evaluate" in requests and pending.evaluation is None:
        requests.remove("evaluate")
        order_evaluation(state, state.live_version, 0, out)
    if "checkpoint" in requests and pending.checkpoint is None:
        requests.remove("checkpoint")
        order_checkpoint(state, state.live_version, out)
