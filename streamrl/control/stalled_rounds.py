"""Rounds in which nothing can happen any more: a policy that launches nothing and lets nothing join. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamrl.control.launching import Launching
    from streamrl.control.state import ControlState


def waits_for_nothing(state: ControlState, launching: Launching) -> str:
    """Why no event can come; empty when one may. Held groups count as under way: some of them may be scored now."""
    buffer = state.buffer
    if (
        state.batch.closed
        or state.publishing is not None
        or state.due.busy
        or state.supply.asked
        or buffer.held_groups
        or len(buffer.untrained) > len(buffer.ready)
    ):
        return ""
    view = launching.view()
    return (
        f"the rounds ({state.settings.policy or state.settings.rounds}) wait for nothing: no trajectory runs, "
        f"{view.seats} of {view.target} places of the batch are free, {len(buffer.ready)} groups are ready, "
        f"{view.queued} prompts queue and {view.free_slots} slots are free; "
        "correct what launch, may_join or slots answer"
    )
