"""Orders of people as control takes them: ``steer``, between an event and what is decided after it. Pure.

A change of settings is applied while the batch of its step is still empty, so that one batch is made by one set of
settings, whenever the change was asked for. Where it changes the rounds, groups that are under way for later batches
(continuous rounds, those submitted in advance, parts that are resumed) end and their prompts are sampled again. Other
changes leave them: each group has the sampling parameters that it was launched with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from streamrl.base.types import DropReason
from streamrl.control import events as on
from streamrl.control.actions import Decision
from streamrl.control.apply import Actions, drop_group, order_checkpoint, order_evaluation
from streamrl.control.machine import Steer
from streamrl.control.model import Batch, RunState, requeue_interrupted
from streamrl.control.round_policy import GroupSizer, RoundPolicy, Rules
from streamrl.control.settings import ControlSettings
from streamrl.control.steering.live_keys import LIVE, SAMPLED_AGAIN, STEPS, with_values

MakePolicies = Callable[[ControlSettings], tuple[RoundPolicy, GroupSizer]]
PAUSED = "nothing more is launched until `streamrl continue`; what runs is finished"


def steering_with(make: MakePolicies) -> Steer:
    """``Steer`` of a run whose policies ``make`` makes."""
    return partial(steer, make)


def steer(make: MakePolicies, state: RunState, rules: Rules, event: on.ControlEvent, out: Actions) -> Rules:
    """Take ``event`` where a person sent it, and what can be done now of all that was asked for."""
    steering = state.steering
    match event:
        case on.Steered(order="pause" | "continue" as order):
            if steering.paused != (order == "pause"):
                steering.paused = not steering.paused
                out.append(Decision(subject="pause", reason=PAUSED if steering.paused else "launches go on"))
        case on.Steered(order=order):
            steering.wanted = list(dict.fromkeys([*steering.wanted, order]))
        case on.SettingsChanged():
            steering.asked = sorted([*steering.asked, event], key=lambda change: change.step)
        case on.RunContinued(steps=steps):
            if steps and steps != steering.changed.get(STEPS):  # the recipe was given another number after that
                steering.changed.pop(STEPS, None)
                steering.recipe_steps = 0
                steering.asked = [left for one in steering.asked if (left := _without_older_steps(one, steps)).values]
    batch = state.batch
    opens = isinstance(event, on.BatchTrained) or not (batch.round_kind or state.ending)
    while opens and not batch.groups and not state.batch_closed and steering.asked:
        if steering.asked[0].step > batch.batch_id + 1:
            break
        rules = _changed(make, state, rules, steering.asked.pop(0), out)
        batch = state.batch
    _order_wanted(state, out)
    return rules


def _without_older_steps(change: on.SettingsChanged, recipe_steps: int) -> on.SettingsChanged:
    """``change`` without steps that were asked for when the recipe had another number of them."""
    same = change.recipe_steps in (0, recipe_steps)
    return msgspec.structs.replace(change, values={k: v for k, v in change.values.items() if same or k != STEPS})


def _changed(make: MakePolicies, state: RunState, rules: Rules, change: on.SettingsChanged, out: Actions) -> Rules:
    """The rules with the values of ``change``, which hold from the open batch on."""
    values = change.values
    after = with_values(rules.settings, change.values)
    if STEPS in values:
        state.steering.recipe_steps = change.recipe_steps
        state.steps = values[STEPS]
    state.steering.changed |= values
    state.steering.changes += 1
    words = (f"{key} = {value}" for key, value in values.items())
    figures = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
    reason = f"{', '.join(words)}, from step {state.batch.batch_id + 1} on"
    out.append(Decision(subject="settings", reason=reason, figures=figures))
    if not any(LIVE[key].partition(".")[0] in SAMPLED_AGAIN for key in values):
        return Rules(after, rules.policy, rules.sizer)
    policy, sizer = make(after)
    policy.restore(msgspec.to_builtins(rules.policy.snapshot()))
    sizer.restore(msgspec.to_builtins(rules.sizer.snapshot()))
    _sample_again(state, after, out)
    return Rules(after, policy, sizer)


def _sample_again(state: RunState, settings: ControlSettings, out: Actions) -> None:
    """End what is under way and queue its prompts, at a group size that there is now. The open batch has no groups."""
    for group in sorted(state.buffer.untrained.values(), key=lambda group: group.group_id):
        drop_group(state, group, DropReason.CANCELLED, out)
        requeue_interrupted(state, group)
    state.dropped_in_a_row = 0
    state.slots.version_live(state.trainer_version)  # their number may be smaller now; nothing is in flight
    state.batch = Batch(batch_id=state.batch.batch_id, target=settings.batch_weight)
    pool = state.prompts
    sizes = settings.group_sizes
    pool.queue = [r if r.group_size in sizes else msgspec.structs.replace(r, group_size=sizes[0]) for r in pool.queue]
    pool.unsorted = True


def waits_for_version(state: RunState) -> bool:
    """Return whether an order waits: for a step that is made, a version that is not live yet, or paused engines."""
    pending = state.pending
    settled = state.live_version == state.trainer_version and pending.push is None and pending.paused_for is None
    return state.batch_closed or not settled


def _order_wanted(state: RunState, out: Actions) -> None:
    """Order what was asked for once the trainer's version is live, nothing is pushed and nobody is in the way."""
    pending = state.pending
    wanted = state.steering.wanted
    if state.ending:
        wanted.clear()  # what falls due at the end is ordered there
        state.steering.paused = False
    if not wanted or waits_for_version(state):
        return
    if "evaluate" in wanted and pending.evaluation is None:
        wanted.remove("evaluate")
        order_evaluation(state, state.live_version, 0, out)
    if "checkpoint" in wanted and pending.checkpoint is None:
        wanted.remove("checkpoint")
        order_checkpoint(state, state.live_version, out)
