"""All of control as a record, for the base of a journal segment: exact, in the middle of a run. Pure.

``restore_whole(settings, decode(encode(keep_whole(state, outstanding))))`` decides from there on as the original
would, event by event. What a checkpoint keeps for a fork is something else (``snapshot``): there, what was under way is
sampled anew.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Record
from streamrl.buffers.rollout_buffer import KeptBuffer
from streamrl.buffers.slots import KeptSlots
from streamrl.control.due_work import KeptDueWork
from streamrl.control.launching import KeptLaunching
from streamrl.control.length_watch import KeptLengths
from streamrl.control.open_batch import KeptBatch, OpenBatch
from streamrl.control.round_supply import KeptSupply
from streamrl.control.settings import ControlSettings
from streamrl.control.state import ControlState
from streamrl.journal.outstanding import KeptOutstanding, Outstanding
from streamrl.policies.arrival_order import KeptArrivals

WHOLE_SCHEMA = 1


class WholeState(Record, frozen=True):
    """A ``ControlState`` and its ``Outstanding``. ``policy``, ``sizer``: what their ``snapshot`` gives; ``arrivals``:
    None unless the run is deterministic; ``steps``: 0 where an older streamrl kept it. What is not here is made of the
    settings, or does not outlive an event."""

    schema: int
    buffer: KeptBuffer
    slots: KeptSlots
    supply: KeptSupply
    due: KeptDueWork
    batch: KeptBatch
    launching: KeptLaunching
    lengths: KeptLengths
    outstanding: KeptOutstanding
    policy: dict[str, Any] = {}
    sizer: dict[str, Any] = {}
    arrivals: KeptArrivals | None = None
    next_group_id: int = 0
    trainer_version: int = 0
    live_version: int = -1
    publishing: int | None = None
    recent_failures: tuple[bool, ...] = ()
    dropped_in_a_row: int = 0
    stopping: str | None = None
    finished: bool = False
    steps: int = 0


def keep_whole(state: ControlState, outstanding: Outstanding) -> WholeState:
    """Of ``state`` as it is now, between two events. It does not change with ``state``."""
    return WholeState(
        schema=WHOLE_SCHEMA,
        buffer=state.buffer.keep(),
        slots=state.slots.keep(),
        supply=state.supply.keep(),
        due=state.due.keep(),
        batch=state.batch.keep(),
        launching=state.launching.keep(),
        lengths=state.lengths.keep(),
        outstanding=outstanding.keep(),
        # A policy of the user's may give what it goes on changing.
        policy=msgspec.to_builtins(state.policy.snapshot()),
        sizer=msgspec.to_builtins(state.sizer.snapshot()),
        arrivals=None if state.arrivals is None else state.arrivals.keep(),
        next_group_id=state.next_group_id,
        trainer_version=state.trainer_version,
        live_version=state.live_version,
        publishing=state.publishing,
        recent_failures=tuple(state.recent_failures),
        dropped_in_a_row=state.dropped_in_a_row,
        stopping=state.stopping,
        finished=state.finished,
        steps=state.steps,
    )


def restore_whole(settings: ControlSettings, kept: WholeState) -> tuple[ControlState, Outstanding]:
    """The inverse. ``settings``: those of the run that was kept.

    Raises ``StreamRLError`` for another schema, and where ``settings`` are of a run that is not, or is, deterministic
    as the one that was kept is (is not).
    """
    if kept.schema != WHOLE_SCHEMA:
        raise StreamRLError(
            f"the journal's base has schema {kept.schema}, this streamrl reads {WHOLE_SCHEMA}: resume with the "
            "streamrl that wrote it, or fork the run from a checkpoint"
        )
    state = ControlState(settings)
    if (state.arrivals is None) != (kept.arrivals is None):
        raise StreamRLError(
            f"the run that was kept is {'not ' if kept.arrivals is None else ''}deterministic, and these settings say "
            f"deterministic = {str(settings.deterministic).lower()}: resume with its own recipe"
        )
    state.buffer.restore(kept.buffer)
    state.slots.restore(kept.slots)
    state.supply.restore(kept.supply)
    state.due.restore(kept.due)
    state.batch = OpenBatch.of(kept.batch)
    state.launching.restore(kept.launching)
    state.lengths.restore(kept.lengths)
    state.policy.restore(kept.policy)
    state.sizer.restore(kept.sizer)
    if state.arrivals is not None and kept.arrivals is not None:
        state.arrivals.restore(kept.arrivals)
    state.next_group_id = kept.next_group_id
    state.trainer_version, state.live_version = kept.trainer_version, kept.live_version
    state.publishing = kept.publishing
    state.recent_failures = deque(kept.recent_failures, maxlen=settings.failure_window)
    state.dropped_in_a_row = kept.dropped_in_a_row
    state.stopping, state.finished = kept.stopping, kept.finished
    state.steps = kept.steps or settings.steps
    return state, Outstanding.of(kept.outstanding)
