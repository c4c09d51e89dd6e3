"""The invariants of a run, as far as one state shows them: ``violations``. That nothing is trained twice, or that
versions never go back, takes a history: the tests' walks and the fault campaign have one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from streamrl.base.types import DropReason
from streamrl.buffers.rollout_buffer import Group
from streamrl.buffers.slots import staleness
from streamrl.control.model import RunState
from streamrl.control.round_policy import Rules
from streamrl.recipe.scheduling import RoundKind, StalePolicy


def violations(state: RunState, rules: Rules) -> list[str]:
    """A sentence for each thing that must hold of ``state`` after every event and does not. It begins with the name of
    the invariant (``INVARIANTS``) and a colon. Costs time in proportion to what is in flight."""
    return [f"{name}: {text}" for name, check in INVARIANTS.items() for text in check(state, rules)]


def _accounting(state: RunState, rules: Rules) -> Iterator[str]:
    said = state.accounting()
    if not said.balanced:
        dropped = sum(said.dropped.values())
        yield (
            f"{said.issued} trajectories were issued, and {said.trained} trained, {dropped} dropped and "
            f"{said.in_flight} in flight are {said.trained + dropped + said.in_flight}"
        )


def _groups(state: RunState, rules: Rules) -> Iterator[str]:
    buffer = state.buffer
    for group_id in buffer.untrained.keys() & buffer.batched.keys():
        yield f"group {group_id} is in a batch and waits for one"
    for group in buffer.groups():
        yield from (f"group {group.group_id} {text}" for text in _group(group, state, rules))
    for group in buffer.batched.values():
        if group.open or group.paused:
            yield f"group {group.group_id} is in a batch, and {group.open} of its members have no reward"


def _group(group: Group, state: RunState, rules: Rules) -> Iterator[str]:
    if not group.members:
        yield "has ended and is kept"
        return
    unscored = sum(not member.scored for member in group.members.values())
    if group.open != unscored:
        yield f"counts {group.open} members without a reward, and has {unscored}"
    if not 1 <= group.keep <= group.size or not set(group.members) <= set(range(group.size)):
        yield f"keeps {group.keep} of {group.size} trajectories and has the members {sorted(group.members)}"
    if len(group.members) - unscored > group.keep:
        yield f"has {len(group.members) - unscored} rewards, and a batch takes {group.keep}"
    if group.weight != rules.settings.weight_of(group.keep):
        yield f"weighs {group.weight} and keeps {group.keep} trajectories"
    if group.group_id >= state.next_group_id:
        yield f"has a number that will be given again: the next is {state.next_group_id}"
    if group.launch_version > state.live_version and group.launch_version != state.pending.paused_for:
        yield f"is sampled by version {group.launch_version}, and engines serve {state.live_version}"


def _indexes(state: RunState, rules: Rules) -> Iterator[str]:
    buffer, weights = state.buffer, Counter[int]()
    for group in (*buffer.untrained.values(), *buffer.batched.values()):
        oldest = min((member.oldest_version for member in group.members.values()), default=group.oldest_version)
        if group.oldest_version != oldest:
            yield f"group {group.group_id} says version {group.oldest_version} is its oldest, its members {oldest}"
    for group in buffer.untrained.values():
        weights[group.oldest_version] += group.weight
    ready = sorted(group_id for group_id, group in buffer.untrained.items() if group.ready)
    paused = sorted(group_id for group_id, group in buffer.untrained.items() if group.paused and group.open)
    for name, index, found in (
        ("ready", sorted(buffer.ready), ready),
        ("paused", sorted(buffer.paused), paused),
        ("by_version", buffer.by_version, weights),
    ):
        if index != found:
            yield f"{name} is {index}, and the groups say {found}"


def _batch(state: RunState, rules: Rules) -> Iterator[str]:
    batch, following, groups = state.batch, state.next_batch, list(state.buffer.batched.values())
    if batch.groups != list(state.buffer.batched):
        yield f"batch {batch.batch_id} has the groups {batch.groups}, and the buffer {list(state.buffer.batched)}"
        return
    found = (sum(g.weight for g in groups), sum(len(g.members) for g in groups), sum(g.tokens for g in groups))
    if found != (batch.filled, batch.samples, batch.tokens):
        said = (batch.filled, batch.samples, batch.tokens)
        yield f"batch {batch.batch_id} says {said} of weight, samples and tokens, its groups {found}"
    if groups and batch.filled - groups[-1].weight >= batch.target:
        yield f"group {groups[-1].group_id} joined batch {batch.batch_id}, which was full"
    if state.batch_closed and batch.missing > 0 and not state.prompts.exhausted:
        yield f"batch {batch.batch_id} is closed, with {batch.missing} of {batch.target} missing, and there are prompts"
    if following is not None and (following.groups or not state.batch_closed):
        yield f"batch {following.batch_id} is open beside batch {batch.batch_id}"


def _staleness(state: RunState, rules: Rules) -> Iterator[str]:
    settings, buffer = rules.settings, state.buffer
    for groups, trained_at in (
        (buffer.batched, state.trainer_version),
        (buffer.untrained, state.trainer_version + int(state.batch_closed)),
    ):
        for group in groups.values():
            if staleness(trained_at, group.oldest_version) > settings.max_staleness:
                yield (
                    f"group {group.group_id} has a token of version {group.oldest_version}, is trained by version "
                    f"{trained_at} at the earliest, and {settings.max_staleness} steps are allowed"
                )
    stale = buffer.dropped.get(DropReason.STALE, 0)
    if stale and settings.when_stale is StalePolicy.WAIT and settings.rounds is not RoundKind.CUSTOM:
        yield f"{stale} trajectories were dropped as stale, and when_stale is wait"


def _slots(state: RunState, rules: Rules) -> Iterator[str]:
    slots = state.slots
    used = sum(group.size for group in state.buffer.groups()) + sum(slots.consumed.values())
    if slots.in_use != used:
        yield f"{slots.in_use} are in use, and groups and versions that are not live have {used}"
    if slots.in_use > rules.slots:
        yield f"{slots.in_use} are in use, and there are {rules.slots}"
    for version in slots.consumed:
        if not state.live_version < version <= state.trainer_version:
            yield f"version {version} keeps some: {state.live_version} is live, {state.trainer_version} trained"


def _versions(state: RunState, rules: Rules) -> Iterator[str]:
    trainer, live = state.trainer_version, state.live_version
    if live not in (trainer - 1, trainer):
        yield f"engines serve {live}, the trainer holds {trainer}"
    if state.batch.batch_id != trainer or (state.next_batch is not None and state.next_batch.batch_id != trainer + 1):
        yield f"version {trainer} trains batch {state.batch.batch_id}"
    if state.saved_version > trainer:
        yield f"{state.saved_version} is saved, the trainer holds {trainer}"


def _orders(state: RunState, rules: Rules) -> Iterator[str]:
    pending, batch, trainer, live = state.pending, state.batch, state.trainer_version, state.live_version
    step = pending.step
    if step is not None and (step.batch_id, step.policy_version, step.groups, step.samples, step.trained_tokens) != (
        *(batch.batch_id, trainer + 1, len(batch.groups), batch.samples, batch.tokens),
    ):
        yield f"{step} is not of batch {batch.batch_id} and trainer version {trainer}"
    if step is not None and (pending.checkpoint is not None or live != trainer):
        yield f"the trainer steps from version {trainer} before it is live and saved"
    if pending.push is not None and (pending.push != trainer or live == trainer):
        yield f"version {pending.push} is pushed: {live} is live, {trainer} trained"
    if pending.evaluation is not None and (pending.evaluation.policy_version != live or pending.push is not None):
        yield f"weights change under the evaluation of version {pending.evaluation.policy_version}"
    if pending.checkpoint is not None and not pending.checkpoint == state.saved_version == trainer:
        yield f"version {pending.checkpoint} is saved, and the trainer holds {trainer}"
    made = trainer + int(state.batch_closed)
    if pending.paused_for is not None and (pending.paused_for != made or made == live):
        yield f"engines are paused for version {pending.paused_for}, and {made} is made"


def _drain(state: RunState, rules: Rules) -> Iterator[str]:
    buffer, end = state.buffer, state.pending.end
    if end is not None and end.error:
        return  # it was not wound down
    if state.ending and state.live_version >= 0 and (buffer.untrained or (buffer.batched and not state.batch_closed)):
        yield f"the run ends, and {len(buffer.untrained)} groups are in flight"
    if end is not None and (buffer or state.busy or state.batch_closed or state.live_version < state.trainer_version):
        yield f"the run has ended ({end.reason}), and something is under way"


INVARIANTS: dict[str, Callable[[RunState, Rules], Iterator[str]]] = {
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
