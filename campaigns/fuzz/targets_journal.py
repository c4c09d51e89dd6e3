"""Decoders of the journal: segments of a directory, the records in them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from campaigns.fuzz.execution import Target
from campaigns.fuzz.seeds import MSGPACK, PLAIN, Seed, message, seed
from campaigns.fuzz.targets_streams import COMPLETION, PROMPT
from streamrl.base.errors import StreamRLError
from streamrl.base.stage_messages import SampledSoFar
from streamrl.base.types import FinishReason, Segment, TrajectoryId
from streamrl.control.events import BatchTrained, TrajectoryScored
from streamrl.run.journal.journal_file import _HEADER, _MAGIC, _frame, read_journal
from streamrl.run.journal.records import (
    JournalCodec,
    JournalEvent,
    JournalPaused,
    JournalPrompt,
    JournalPublished,
    JournalRecord,
    JournalSampled,
    JournalScored,
)

_REFUSALS = (StreamRLError,)
_FIRST = [[b"the state"], [b"", b"a"], [b"\0" * 20, b"event " * 9], [bytes(range(200))]]
_SECOND = [[b"state snapshots", b"\xff" * 33], *_FIRST[:0:-1]]
"""A base and groups of records."""


def _segment(base: Sequence[bytes], *groups: Sequence[bytes]) -> bytes:
    frame = _frame(base, _HEADER.size)
    header = _HEADER.pack(_MAGIC, _HEADER.size + len(frame), 0)[:-4]
    content = header + crc32(header).to_bytes(4, "little") + frame
    for group in groups:
        content += _frame(group, len(content))
    return content


def _segment_seed(content: bytes) -> Seed:
    """Its header and its frames, each whole and each field of its head."""
    spans, at = [(0, 20), (0, 8), (8, 16), (16, 20)], 20
    while at < len(content):
        length = 12 + int.from_bytes(content[at + 4 : at + 8], "little")
        spans += [(at, at + length), (at + 12, at + length), (at, at + 4), (at + 4, at + 8), (at + 8, at + 12)]
        at += length
    return Seed(content, PLAIN, tuple(spans))


def segments() -> Target:
    """A journal of one or two segments is read: what it held, in order and from its base, or a refusal."""
    contents = [_segment(*_FIRST), _segment(*_SECOND)]
    held = [[record for group in groups for record in group] for groups in (_FIRST, _SECOND)]
    place = Path(tempfile.mkdtemp(prefix="streamrl-fuzz-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)

    def run(frames: Sequence[bytes]) -> str:
        for path in place.iterdir():
            path.unlink()
        for number, content in enumerate(frames, start=1):
            (place / f"{number:06d}.journal").write_bytes(content)
        found = list(read_journal(place).records())
        as_written = any(found == one[: len(found)] for one in held)
        assert as_written, f"records that were never written: {found}"
        return f"{len(found)} records"

    made = [message(*map(_segment_seed, contents)), message(_segment_seed(contents[0]))]
    return Target(name="journal.segments", messages=made, run=run, refusals=_REFUSALS)


def records() -> Target:
    """What is in the frames."""
    codec, one = JournalCodec(), TrajectoryId(prompt_id="p-1", group_id=3, sample=1)
    segment = Segment(
        token_ids=COMPLETION.token_ids,
        trained=True,
        behavior_logprobs=COMPLETION.behavior_logprobs,
        version_spans=COMPLETION.version_spans,
    )
    scored = TrajectoryScored(
        id=one, reward=0.5, tokens=9, finish_reason=FinishReason.STOP, oldest_version=1, newest_version=2
    )
    held: list[JournalRecord] = [
        JournalEvent(event=BatchTrained(batch_id=1, policy_version=2), time_s=1.5),
        JournalEvent(event=scored, time_s=2.5),
        JournalPrompt(prompt=PROMPT),
        JournalPaused(id=one, done=SampledSoFar(completion=COMPLETION, parts=1, seconds=0.5)),
        JournalSampled(id=one, segments=(segment,), finish_reason=FinishReason.STOP, rollout_seconds=0.5),
        JournalScored(id=one, reward=0.5, reward_parts={"a": 1.0}, separate_rewards={"a": (1.0, 0.5)}),
        JournalPublished(policy_version=2, state_hash=2**63),
    ]

    def run(frames: Sequence[bytes]) -> str:
        record = codec.decode(b"".join(frames))
        again = codec.encode(record)
        assert codec.encode(codec.decode(again)) == again, "a record is written as another one"
        return f"accepted {type(record).__name__}"

    made = [message(seed(codec.encode(record), MSGPACK)) for record in held]
    return Target(name="journal.records", messages=made, run=run, refusals=_REFUSALS, amplification=128)


def targets() -> list[Target]:
    """All of this module."""
    return [segments(), records()]
