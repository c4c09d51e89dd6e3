"""Invariants of the state of a run, and ``violations``, which checks them all.

The walks of the tests call it after every event, simulated runs at every live version, and ``streamrl show`` for the
state that a journal replays. Invariants over time (nothing is trained twice, versions never go back) need a history,
which the walks and the fault campaign keep themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from streamrl.base.types import DropReason
from streamrl.buffers.rollout_buffer import Group
from streamrl.buffers.slots import staleness
from streamrl.control.admission import admission_claims
from streamrl.control.reward_tracker import RewardTracker
from streamrl.control.round_policy import Rules
from streamrl.control.run_state import Claims, RunState
from streamrl.recipe.scheduling import RoundKind, StalePolicy


def violations(state: RunState, rules: Rules) -> list[str]:
    """Messages for all claims that do not hold for ``state``, each with the name of its invariant (``INVARIANTS``) and
    a colon in front. All claims hold after every event. Takes time in proportion to the trajectories in flight."""
    return [
        f"{name}: {message}"
        for name, claims in INVARIANTS.items()
        for holds, message in claims(state, rules)
        if not holds
    ]


def _accounting(state: RunState, rules: Rules) -> Claims:
    counts = state.accounting()
    ends = counts.trained, sum(counts.dropped.values()), counts.in_flight
    yield counts.issued == sum(ends), f"{counts.issued} were issued, and {ends} trained, dropped and in flight"


def _groups(state: RunState, rules: Rules) -> Claims:
    buffer = state.buffer
    both = buffer.untrained.keys() & buffer.batched.keys()
    yield not both, f"groups {both} are in a batch and wait for one"
    for group in buffer.batched.values():
        message = f"group {group.group_id} is in a batch, and {group.open} of its members have no reward"
        yield not group.open and not group.paused, message
    for group in buffer.groups():
        for holds, message in _group(group, state, rules):
            yield holds, f"group {group.group_id} {message}"


def _group(group: Group, state: RunState, rules: Rules) -> Claims:
    members = group.members
    version = group.launch_version
    scored = sum(member.scored for member in members.values())
    yield bool(members), "has ended and is kept"
    yield group.open == len(members) - scored, f"counts {group.open} members without a reward, {scored} have one"
    fits = 1 <= group.keep <= group.size and set(members) <= set(range(group.size))
    yield fits, f"keeps {group.keep} of {group.size} trajectories and has the members {sorted(members)}"
    yield scored <= group.keep, f"has {scored} rewards, and a batch takes {group.keep}"
    weight = rules.settings.weight_of(group.keep)
    yield group.weight == weight, f"weighs {group.weight} in place of {weight}"
    yield group.group_id < state.next_group_id, f"has a number that will be given again, after {state.next_group_id}"
    version_fits = version <= state.live_version or version == state.pending.paused_for
    yield version_fits, f"is sampled by version {version}, and engines serve {state.live_version}"


def _indexes(state: RunState, rules: Rules) -> Claims:
    buffer = state.buffer
    weights = Counter[int]()
    for group in (*buffer.untrained.values(), *buffer.batched.values()):
        oldest = min((member.oldest_version for member in group.members.values()), default=group.oldest_version)
        yield group.oldest_version == oldest, f"group {group.group_id} says {group.oldest_version}, members {oldest}"
    for group in buffer.untrained.values():
        weights[group.oldest_version] += group.weight
    ready = [group_id for group_id, group in buffer.untrained.items() if group.ready]
    paused = [group_id for group_id, group in buffer.untrained.items() if group.paused and group.open]
    yield sorted(buffer.ready) == sorted(ready), f"ready is {buffer.ready}, and the groups say {ready}"
    yield sorted(buffer.paused) == sorted(paused), f"paused is {buffer.paused}, and the groups say {paused}"
    yield buffer.by_version == weights, f"by_version is {buffer.by_version}, and the groups say {dict(weights)}"


def _batch(state: RunState, rules: Rules) -> Claims:
    batch = state.batch
    following = state.next_batch
    groups = list(state.buffer.batched.values())
    group_ids = list(state.buffer.batched)
    yield batch.groups == group_ids, f"batch {batch.batch_id} has the groups {batch.groups}, and the buffer {group_ids}"
    counts = batch.filled, batch.samples, batch.tokens
    sums = sum(g.weight for g in groups), sum(len(g.members) for g in groups), sum(g.tokens for g in groups)
    yield counts == sums, f"batch {batch.batch_id} says {counts} of weight, samples and tokens, its groups {sums}"
    had_room = not groups or batch.filled - groups[-1].weight < batch.target
    yield had_room, f"the last group of batch {batch.batch_id} joined when it was full"
    may_be_closed = batch.missing <= 0 or state.prompts.exhausted
    message = f"batch {batch.batch_id} is closed, with {batch.missing} of {batch.target} missing, and there are prompts"
    yield may_be_closed or not state.batch_closed, message
    may_follow = following is None or (state.batch_closed and not following.groups)
    yield may_follow, f"another batch is open beside batch {batch.batch_id}"


def _staleness(state: RunState, rules: Rules) -> Claims:
    limit = rules.settings.max_staleness
    buffer = state.buffer
    trainer = state.trainer_version
    for groups, trained_at in ((buffer.batched, trainer), (buffer.untrained, trainer + int(state.batch_closed))):
        for group in groups.values():
            oldest = group.oldest_version
            message = f"group {group.group_id} has a token of version {oldest}, {trained_at} trains it at best"
            yield staleness(trained_at, oldest) <= limit, message
    waits = rules.settings.when_stale is StalePolicy.WAIT and rules.settings.rounds is not RoundKind.CUSTOM
    stale = buffer.dropped.get(DropReason.STALE, 0)
    yield not (stale and waits), f"{stale} trajectories were dropped as stale, and when_stale is wait"


def _slots(state: RunState, rules: Rules) -> Claims:
    slots = state.slots
    live = state.live_version
    trainer = state.trainer_version
    total = sum(group.size for group in state.buffer.groups()) + sum(slots.consumed.values())
    yield slots.in_use == total, f"{slots.in_use} are in use, and groups and versions that are not live have {total}"
    yield slots.in_use <= rules.slots, f"{slots.in_use} are in use, and there are {rules.slots}"
    not_live_yet = all(live < version <= trainer for version in slots.consumed)
    yield not_live_yet, f"versions {list(slots.consumed)} keep some: {live} is live, {trainer} trained"


def _versions(state: RunState, rules: Rules) -> Claims:
    trainer = state.trainer_version
    live = state.live_version
    batch = state.batch
    following = state.next_batch
    yield live in (trainer - 1, trainer), f"engines serve {live}, the trainer holds {trainer}"
    numbered = batch.batch_id == trainer and (following is None or following.batch_id == trainer + 1)
    yield numbered, f"version {trainer} trains batch {batch.batch_id}"
    yield state.saved_version <= trainer, f"{state.saved_version} is saved, the trainer holds {trainer}"


def _orders(state: RunState, rules: Rules) -> Claims:
    pending = state.pending
    batch = state.batch
    trainer = state.trainer_version
    live = state.live_version
    step = pending.step
    version_in_making = trainer + int(state.batch_closed)
    if step is not None:
        order = step.batch_id, step.policy_version, step.groups, step.samples, step.trained_tokens
        fits = order == (batch.batch_id, trainer + 1, len(batch.groups), batch.samples, batch.tokens)
        yield fits, f"{step} is not of batch {batch.batch_id} and trainer version {trainer}"
        yield pending.checkpoint is None and live == trainer, f"version {trainer} is left before it is live and saved"
    push_fits = pending.push is None or live < pending.push == trainer
    yield push_fits, f"version {pending.push} is pushed: {live} is live, {trainer} trained"
    evaluation = pending.evaluation
    weights_stay = evaluation is None or (evaluation.policy_version == live and pending.push is None)
    yield weights_stay, f"weights change under {evaluation}"
    checkpoint_fits = pending.checkpoint is None or pending.checkpoint == state.saved_version == trainer
    yield checkpoint_fits, f"version {pending.checkpoint} is saved, and the trainer holds {trainer}"
    pause_fits = pending.paused_for is None or live < pending.paused_for == version_in_making
    yield pause_fits, f"engines are paused for version {pending.paused_for}, and {version_in_making} is made"


def _turns(state: RunState, rules: Rules) -> Claims:
    """The ranks have the memory of the GPUs from the order of a step until its version is published, and the engines
    sleep until it is live."""
    if rules.settings.in_turns:
        running = [group.group_id for group in state.running_groups]
        message = f"it is the ranks' turn, and groups {running} and {state.pending.evaluation} are sampled"
        yield not (state.has_rank_work and state.has_engine_work), message
        yield state.pending.paused_for is None, f"engines are paused for version {state.pending.paused_for}"


def _mixture(state: RunState, rules: Rules) -> Claims:
    """Each training set has its share of the prompts that were drawn, to within one."""
    shares = rules.settings.shares
    drawn = state.prompts.sets
    open_shares = {name: share for name, share in shares.items() if name not in drawn or not drawn[name].exhausted}
    counts = {name: drawn[name].counted if name in drawn else 0 for name in open_shares}
    for name, share in open_shares.items():
        exact = share / sum(open_shares.values()) * sum(counts.values())
        yield abs(counts[name] - exact) < 1, f"{counts[name]} prompts of set {name} are drawn, its share is {exact:.3f}"
    total = sum(position.drawn for position in drawn.values())
    skipped = sum(position.skipped for position in drawn.values())
    by_pools = sum(count.drawn - count.launched for count in state.prompts.pools.values())
    yield skipped == by_pools, f"sets have skipped {skipped} prompts, pools {by_pools}"
    yield total <= state.prompts.drawn, f"sets have given {total} prompts, {state.prompts.drawn} were drawn"


def _drain(state: RunState, rules: Rules) -> Claims:
    buffer = state.buffer
    end = state.pending.end
    if end is not None and end.error:
        return  # an error ends a run without ``wind_down``
    leftovers = bool(buffer.untrained or (buffer.batched and not state.batch_closed))
    yield not (leftovers and state.ending and state.live_version >= 0), f"the run ends, with {buffer.accounting()}"
    under_way = buffer or state.busy or state.batch_closed or state.live_version < state.trainer_version
    yield end is None or not under_way, f"the run has ended ({end and end.reason}), and something is under way"


def _tracker(state: RunState, rules: Rules) -> Claims:
    tracked = rules.settings.tracked is not None
    for group in state.buffer.batched.values():
        has_baseline = group.baseline is not None
        yield has_baseline == tracked, f"group {group.group_id} in a batch has the baseline {group.baseline}"
    prompts = len(state.tracker.prompts)
    is_empty = state.tracker == RewardTracker()
    yield tracked or is_empty, f"knows {prompts} prompts of an objective that tracks none"


INVARIANTS: dict[str, Callable[[RunState, Rules], Claims]] = {
    "accounting": _accounting,
    "groups": _groups,
    "indexes": _indexes,
    "batch": _batch,
    "staleness": _staleness,
    "slots": _slots,
    "versions": _versions,
    "orders": _orders,
    "turns": _turns,
    "mixture": _mixture,
    "tracker": _tracker,
    "admission": admission_claims,
    "drain": _drain,
}
