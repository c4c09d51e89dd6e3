"""Taking and restoring what a checkpoint keeps of control: the queue of losers, prompts under way, what was learnt.
Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.buffers.rollout_buffer import PromptTicket
from streamrl.control.round_supply import next_attempt
from streamrl.journal.kept_state import ControlSnapshot

if TYPE_CHECKING:
    from streamrl.control.state import ControlState


def take_snapshot(state: ControlState) -> ControlSnapshot:
    """Of ``state`` as it is now. What is in the open batch is under way too: it is not trained yet."""
    supply = state.supply
    queued: list[PromptTicket] = []
    under_way: list[PromptTicket] = []
    for group in state.buffer.groups.values():
        again = queued if supply.belongs_in_queue(group) else under_way
        again.append(next_attempt(group, group.ticket.noise))
    return ControlSnapshot(
        queued=(*queued, *supply.queue.tickets()),
        waiting=(*under_way, *supply.waiting.tickets()),
        drawn=supply.drawn_prompts,
        next_group_id=state.next_group_id,
        sizer=state.sizer.snapshot(),
        policy=state.policy.snapshot(),
        predictor={} if supply.predictor is None else supply.predictor.snapshot(),
    )


def restore_snapshot(state: ControlState, kept: ControlSnapshot) -> None:
    """The inverse, on a new state, before anything was launched."""
    supply = state.supply
    for ticket in kept.queued:
        supply.queue.append(ticket)
    for ticket in kept.waiting:
        supply.waiting.append(ticket)
    supply.drawn_prompts = kept.drawn
    state.next_group_id = kept.next_group_id
    state.sizer.restore(kept.sizer)
    state.policy.restore(kept.policy)
    if supply.predictor is not None and kept.predictor:
        supply.predictor.restore(kept.predictor)
