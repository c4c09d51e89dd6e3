"""Admission of trajectories (``rollout.admission``): the limit of those in flight, with its claims and metrics. There
is one beside ``slots``, by the KV caches of the engines (``kv``).

Trajectories with turns keep their context on an engine from turn to turn. More of them than the caches hold evict each
other's contexts, and every turn is then computed from its first token. The rule follows
prime-rl's concurrency control and ThunderAgent (arXiv 2602.13692). From ``hard_mark`` on the groups with the shortest
contexts are paused, since they cost least to compute again; an engine that has preempted a request counts as full.
Below ``soft_mark`` paused groups that fit are resumed, and the limit of trajectories grows. A paused trajectory keeps
its turns.

``apply`` calls ``admit`` with each measurement of the engines, ``launch`` takes the free slots from here."""

from __future__ import annotations

import math

from streamrl.base.types import Metrics
from streamrl.buffers.rollout_buffer import Group
from streamrl.control import actions as do
from streamrl.control.events import EnginesMeasured
from streamrl.control.round_policy import Rules
from streamrl.control.run_state import Claims, RunState, pause_groups, resume_groups
from streamrl.recipe.scheduling import KvAdmission

SMOOTHING = 0.2
"""Weight of a measurement in the smoothed usage: trajectories take turns in bursts, which fill a cache for a moment."""


def _trajectories_in_flight(state: RunState) -> int:
    """Number of trajectories that are neither paused nor complete."""
    return sum(group.open for group in state.running_groups)


def admission_limit(state: RunState, rules: Rules) -> int:
    """Largest number of trajectories in flight; those of one group at least."""
    return max(state.admission.limit or rules.slots, *rules.settings.group_sizes)


def free_slots(state: RunState, rules: Rules) -> int:
    """Number of trajectories that may be launched now. None while groups are paused, which are resumed first."""
    free = rules.slots - state.slots.in_use
    if rules.settings.admission is None:
        return free
    if state.buffer.paused:
        return 0
    return min(free, admission_limit(state, rules) - _trajectories_in_flight(state))


def admit(state: RunState, measured: EnginesMeasured, rules: Rules, out: list[do.ControlAction]) -> None:
    """Pause and resume groups, and change the limit, after a measurement of the engines."""
    options = rules.settings.admission
    if options is None or state.pending.evaluation is not None:
        return  # the caches are those of an evaluation
    running = state.running_groups
    if not running:
        return
    admission = state.admission
    usage = 1.0 if measured.preemptions else measured.kv_usage
    admission.usage += SMOOTHING * (usage - admission.usage)
    if admission.usage >= options.hard_mark:
        running_tokens = sum(measured.contexts.get(group.group_id, 1) for group in running)
        admission.token_share = admission.usage / running_tokens
    shares = _shares(state, running, measured.contexts)
    if admission.usage >= options.hard_mark:
        _pause_shortest(state, running, shares, options.soft_mark, out)
    elif admission.usage < options.soft_mark:
        for group in state.buffer.paused_groups():
            if admission.usage + shares[group.group_id] <= options.soft_mark:
                admission.usage += shares[group.group_id]
                _resume(state, group, rules, out)
        if not state.buffer.paused:
            _grow(state, rules, options)


def resume_when_idle(state: RunState, rules: Rules, out: list[do.ControlAction]) -> None:
    """Resume the oldest paused group where nothing is in flight: a batch may wait for it."""
    if rules.settings.admission is not None and state.buffer.paused and not state.running_groups:
        _resume(state, state.buffer.paused_groups()[0], rules, out)


def admission_claims(state: RunState, rules: Rules) -> Claims:
    """No more trajectories are in flight than admission allows, and something runs where groups are paused by it."""
    if rules.settings.admission is None or state.ending or state.finished:
        return
    in_flight = _trajectories_in_flight(state)
    limit = admission_limit(state, rules)
    yield in_flight <= limit, f"{in_flight} trajectories are in flight, and {limit} may be"
    yield bool(in_flight or not state.buffer.paused), f"groups {state.buffer.paused} are paused, and nothing runs"


def admission_metrics(state: RunState) -> Metrics:
    """Return the limit of trajectories in flight and the pauses, once KV caches have limited them."""
    admission = state.admission
    if not admission.limit:
        return {}
    paused = [state.buffer.untrained[group_id].open for group_id in state.buffer.paused]
    return {
        "admission/limit": float(admission.limit),
        "admission/paused": float(sum(paused)),
        "admission/pauses_total": float(admission.pauses),
    }


def _shares(state: RunState, running: list[Group], contexts: dict[int, int]) -> dict[int, float]:
    """Share of the KV caches that each open group needs, by group id. ``contexts``: tokens of each group."""
    running_ids = [group.group_id for group in running]
    token_share = state.admission.token_share
    return {group_id: contexts.get(group_id, 1) * token_share for group_id in (*state.buffer.paused, *running_ids)}


def _pause_shortest(
    state: RunState, running: list[Group], shares: dict[int, float], soft_mark: float, out: list[do.ControlAction]
) -> None:
    """Pause the groups with the shortest contexts, of equal ones the youngest, until the caches are used to
    ``soft_mark``. One group goes on."""
    shortest_first = sorted(running, key=lambda group: (shares[group.group_id], -group.group_id))
    shortest: list[Group] = []
    for group in shortest_first[:-1]:
        if state.admission.usage <= soft_mark:
            break
        state.admission.usage -= shares[group.group_id]
        state.admission.pauses += group.open
        shortest.append(group)
    pause_groups(state, shortest, out)
    _set_limit(state, _trajectories_in_flight(state))


def _set_limit(state: RunState, limit: int) -> None:
    state.admission.limit = limit
    state.admission.ends = _number_of_ends(state)


def _resume(state: RunState, group: Group, rules: Rules, out: list[do.ControlAction]) -> None:
    resume_groups(state, [group], out)
    state.admission.limit = max(admission_limit(state, rules), _trajectories_in_flight(state))


def _grow(state: RunState, rules: Rules, options: KvAdmission) -> None:
    """Raise the limit once as many trajectories have ended as may be in flight: their contexts have all lengths."""
    limit = admission_limit(state, rules)
    if _number_of_ends(state) - state.admission.ends >= limit:
        _set_limit(state, min(math.ceil(limit * options.growth), rules.slots))


def _number_of_ends(state: RunState) -> int:
    """Number of trajectories that have ended since the run began."""
    return state.buffer.issued - sum(group.open for group in state.buffer.untrained.values())
