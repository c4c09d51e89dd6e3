"""What a checkpoint keeps of control, as a record."""

from __future__ import annotations

from typing import Any

from streamrl.base.types import Prompt, Record
from streamrl.buffers.rollout_buffer import PromptTicket

CONTROL_FILE = "control.msgpack"
"""Name of the file in a checkpoint's directory."""


KEPT_SCHEMA = 1


class ControlSnapshot(Record, frozen=True):
    """``queued``: prompts that lost a race or are left of a cohort. ``waiting``: prompts that were drawn and not
    launched, or were under way: they are sampled again from their start. ``drawn``: prompts that the source gave so
    far."""

    queued: tuple[PromptTicket, ...] = ()
    waiting: tuple[PromptTicket, ...] = ()
    drawn: int = 0
    next_group_id: int = 0
    sizer: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    predictor: dict[str, Any] = {}

    def prompt_ids(self) -> set[str]:
        """Prompts that must be kept beside it."""
        return {ticket.prompt_id for ticket in (*self.queued, *self.waiting)}


class KeptControl(Record, frozen=True):
    """Content of ``CONTROL_FILE``: the snapshot and the prompts that it names."""

    schema: int
    snapshot: ControlSnapshot
    prompts: tuple[Prompt, ...]
