"""The invariants of a run, as far as one state shows them: ``violations``. That nothing is trained twice, or that
versions never go back, takes a history: the tests' walks and the fault campaign have one.

The walks ask after every event, simulated runs at every live version, ``streamrl show`` of the replayed journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from streamrl.base.types import DropReason
from streamrl.buffers.rollout_buffer import Group
from streamrl.buffers.slots import staleness
from streamrl.control.model import RunState
from streamrl.control.round_policy import Rules
from streamrl.recipe.scheduling import RoundKind, StalePolicy

Claims = Iterator[tuple[bool, str]]
"""(holds, the message where it does not) of each claim."""


def violations(state: RunState, rules: Rules) -> list[str]:
    """A sentence for each thing that must hold of ``state`` after every event and does not. It begins with the name of
    the invariant (``INVARIANTS``) and a colon. Costs time in proportion to what is in flight."""
    return [
        f"{name}: {wrong}" for name, claim in INVARIANTS.items() for holds, wrong in claim(state, rules) if not holds
    ]


def _accounting(state: RunState, rules: Rules) -> Claims:
    said = state.accounting()
    ends = said.trained, sum(said.dropped.values()), said.in_flight
    yield said.issued == sum(ends), f"{said.issued} were issued, and {ends} trained, dropped and in flight"


def _groups(state: RunState, rules: Rules) -> Claims:
    buffer = state.buffer
    both = buffer.untrained.keys() & buffer.batched.keys()
    yield not both, f"groups {both} are in a batch and wait for one"
    for group in buffer.batched.values():
        open_ = f"group {group.group_id} is in a batch, and {group.open} of its members have no reward"
        yield not group.open and not group.paused, open_
    for group in buffer.groups():
        for holds, wrong in _group(group, state, rules):
            yield holds, f"group {group.group_id} {wrong}"


def _group(group: Group, state: RunState, rules: Rules) -> Claims:
    members = group.members
    version = group.launch_version
    scored = sum(member.scored for member in members.values())
    yield bool(members), "has ended and is kept"
    yield group.open == len(members) - scored, f"counts {group.open} members without a reward, {scored} have one"
    whole = 1 <= group.keep <= group.size and set(members) <= set(range(group.size))
    yield whole, f"keeps {group.keep} of {group.size} trajectories and has the members {sorted(members)}"
    yield scored <= group.keep, f"has {scored} rewards, and a batch takes {group.keep}"
    weight = rules.settings.weight_of(group.keep)
    yield group.weight == weight, f"weighs {group.weight} in place of {weight}"
    yield group.group_id < state.next_group_id, f"has a number that will be given again, after {state.next_group_id}"
    live = version <= state.live_version or version == state.pending.paused_for
    yield live, f"is sampled by version {version}, and engines serve {state.live_version}"


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
    inside = list(state.buffer.batched)
    yield batch.groups == inside, f"batch {batch.batch_id} has the groups {batch.groups}, and the buffer {inside}"
    said = batch.filled, batch.samples, batch.tokens
    found = sum(g.weight for g in groups), sum(len(g.members) for g in groups), sum(g.tokens for g in groups)
    yield said == found, f"batch {batch.batch_id} says {said} of weight, samples and tokens, its groups {found}"
    had_room = not groups or batch.filled - groups[-1].weight < batch.target
    yield had_room, f"the last group of batch {batch.batch_id} joined when it was full"
    full = not state.batch_closed or batch.missing <= 0 or state.prompts.exhausted
    yield (
        full,
        f"batch {batch.batch_id} is closed, with {batch.missing} of {batch.target} missing, and there are prompts",
    )
    alone = following is None or (state.batch_closed and not following.groups)
    yield alone, f"another batch is open beside batch {batch.batch_id}"


def _staleness(state: RunState, rules: Rules) -> Claims:
    most = rules.settings.max_staleness
    buffer = state.buffer
    trainer = state.trainer_version
    for groups, trained_at in ((buffer.batched, trainer), (buffer.untrained, trainer + int(state.batch_closed))):
        for group in groups.values():
            old = (
                f"group {group.group_id} has a token of version {group.oldest_version}, {trained_at} trains it at best"
            )
            yield staleness(trained_at, group.oldest_version) <= most, old
    waits = rules.settings.when_stale is StalePolicy.WAIT and rules.settings.rounds is not RoundKind.CUSTOM
    stale = buffer.dropped.get(DropReason.STALE, 0)
    yield not (stale and waits), f"{stale} trajectories were dropped as stale, and when_stale is wait"


def _slots(state: RunState, rules: Rules) -> Claims:
    slots = state.slots
    live = state.live_version
    trainer = state.trainer_version
    used = sum(group.size for group in state.buffer.groups()) + sum(slots.consumed.values())
    yield slots.in_use == used, f"{slots.in_use} are in use, and groups and versions that are not live have {used}"
    yield slots.in_use <= rules.slots, f"{slots.in_use} are in use, and there are {rules.slots}"
    awaited = all(live < version <= trainer for version in slots.consumed)
    yield awaited, f"versions {list(slots.consumed)} keep some: {live} is live, {trainer} trained"


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
    made = trainer + int(state.batch_closed)
    if step is not None:
        ordered = step.batch_id, step.policy_version, step.groups, step.samples, step.trained_tokens
        fits = ordered == (batch.batch_id, trainer + 1, len(batch.groups), batch.samples, batch.tokens)
        yield fits, f"{step} is not of batch {batch.batch_id} and trainer version {trainer}"
        yield pending.checkpoint is None and live == trainer, f"version {trainer} is left before it is live and saved"
    push = pending.push is None or live < pending.push == trainer
    yield push, f"version {pending.push} is pushed: {live} is live, {trainer} trained"
    kept = pending.evaluation is None or (pending.evaluation.policy_version == live and pending.push is None)
    yield kept, f"weights change under {pending.evaluation}"
    saved = pending.checkpoint is None or pending.checkpoint == state.saved_version == trainer
    yield saved, f"version {pending.checkpoint} is saved, and the trainer holds {trainer}"
    paused = pending.paused_for is None or live < pending.paused_for == made
    yield paused, f"engines are paused for version {pending.paused_for}, and {made} is made"


def _drain(state: RunState, rules: Rules) -> Claims:
    buffer = state.buffer
    end = state.pending.end
    if end is not None and end.error:
        return  # it was not wound down
    left = bool(buffer.untrained or (buffer.batched and not state.batch_closed))
    yield not (left and state.ending and state.live_version >= 0), f"the run ends, with {buffer.accounting()}"
    under_way = buffer or state.busy or state.batch_closed or state.live_version < state.trainer_version
    yield end is None or not under_way, f"the run has ended ({end and end.reason}), and something is under way"


INVARIANTS: dict[str, Callable[[RunState, Rules], Claims]] = {
    "accounting": _accounting,
    "groups": _groups,
    "indexes": _indexes,
    "batch": _batch,
    "staleness": _staleness,
    "slots": _slots,
    "versions": _versions,
    "orders": _orders,
    "drain": _drain,
}
