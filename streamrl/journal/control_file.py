"""``control.msgpack`` of a checkpoint: what control needs to go on, with the prompts that were queued or under way."""

from __future__ import annotations

from pathlib import Path

from streamrl.base.errors import StreamRLError, WireError
from streamrl.buffers.prompt_shelf import PromptShelf
from streamrl.comm.wire import OneFrameCodec
from streamrl.journal.kept_state import CONTROL_FILE, KEPT_SCHEMA, ControlSnapshot, KeptControl


def _codec() -> OneFrameCodec[KeptControl]:
    return OneFrameCodec(KeptControl)


def control_file(snapshot: ControlSnapshot, shelf: PromptShelf) -> dict[str, bytes]:
    """The file by its name."""
    prompts = tuple(shelf[prompt_id] for prompt_id in sorted(snapshot.prompt_ids()))
    return {CONTROL_FILE: _codec().encode(KeptControl(schema=KEPT_SCHEMA, snapshot=snapshot, prompts=prompts))}


def read_control_file(checkpoint: Path) -> KeptControl | None:
    """What ``checkpoint`` keeps of control; None where it was written without. Raises ``StreamRLError`` for a file that
    this version cannot read."""
    path = checkpoint / CONTROL_FILE
    if not path.exists():
        return None
    try:
        kept = _codec().decode(path.read_bytes())
    except WireError as error:
        raise StreamRLError(f"{path} cannot be read: {error}; resume from another checkpoint") from error
    if kept.schema != KEPT_SCHEMA:
        raise StreamRLError(f"{path} has schema {kept.schema}, this streamrl reads {KEPT_SCHEMA}")
    return kept
