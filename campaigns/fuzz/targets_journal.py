"""Decoders of the journal: segments of a directory, the records in them; and the bundle that a crash leaves."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any, NoReturn
from zlib import crc32

import msgspec

from campaigns.fuzz.execution import Target
from campaigns.fuzz.seeds import MSGPACK, PLAIN, Seed, message, seed
from campaigns.fuzz.targets_streams import COMPLETION, PROMPT
from streamrl.base.errors import StreamRLError
from streamrl.base.stage_messages import SampledSoFar
from streamrl.base.types import FinishReason, Segment, TrajectoryId
from streamrl.control.events import BatchTrained, TrajectoryScored
from streamrl.journal.journal import read_journal
from streamrl.journal.journal_format import (
    HEAD_BYTES,
    HEADER_BYTES,
    Role,
    SegmentHeader,
    append_frame,
    append_mark,
    decode_header,
    encode_header,
    header_seed,
)
from streamrl.journal.journal_records import (
    JournalCodec,
    JournalEvent,
    JournalHeld,
    JournalPrompts,
    JournalPublished,
    JournalRecord,
    JournalSampled,
    JournalScored,
)
from streamrl.journal.journal_writing import segment_path
from streamrl.supervise.crash.crash_bundle import MANIFEST, CrashManifest, read_manifest

_REFUSALS = (StreamRLError,)
_HERE = Path("journal")
_REPAIRED = b"repaired"
_CHECK = struct.Struct("<I")


class _ReadOnly:
    """A disk with the segments of one journal on it."""

    def __init__(self, segments: Sequence[bytes]) -> None:
        self._files = {segment_path(_HERE, number): content for number, content in enumerate(segments, start=1)}
        self._open: list[bytes] = []

    def names(self, directory: Path) -> list[str]:
        return [path.name for path in self._files]

    def open(self, path: Path) -> int:
        self._open.append(self._files[path])
        return len(self._open) - 1

    def size(self, descriptor: int) -> int:
        return len(self._open[descriptor])

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        return self._open[descriptor][offset : offset + count]

    def close(self, descriptor: int) -> None:
        """Nothing to give back."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"a journal that is read was changed: {name}")


def _segments() -> list[bytes]:
    """Two, the second of which begins with a base."""
    payloads = [b"", b"a", b"\0" * 20, b"event " * 9, bytes(range(200))]
    first = _segment(SegmentHeader(run_id="run", segment=1, epoch=1, first_sequence=1), [], payloads)
    base = [b"the whole state", b"\xff" * 33]
    second = SegmentHeader(
        run_id="run",
        segment=2,
        epoch=2,
        first_sequence=6,
        previous_end=len(first),
        base_count=len(base),
        initial_end=HEADER_BYTES + sum(HEAD_BYTES + len(payload) for payload in base),
    )
    return [first, _segment(second, base, payloads[::-1])]


def _segment(header: SegmentHeader, base: Sequence[bytes], payloads: Sequence[bytes]) -> bytes:
    raw = encode_header(header)
    parts: list[Any] = [raw]
    for number, payload in enumerate(base):
        append_frame(parts, header_seed(raw), Role.BASE, 7, number, payload)
    for number, payload in enumerate(payloads, start=header.first_sequence):
        append_frame(parts, header_seed(raw), Role.RECORD, number % 5, number, payload)
        if number % 2:
            append_mark(parts, header_seed(raw), number, sum(map(len, parts)))
    return b"".join(parts)


def _segment_seed(content: bytes) -> Seed:
    """Its fields and its frames, each whole and each field of its head."""
    spans = [
        (0, HEADER_BYTES),
        *((at, at + 8) for at in range(16, 56, 8)),
        (12, 16),
        (8, 10),
        (HEADER_BYTES - 4, HEADER_BYTES),
    ]
    at = HEADER_BYTES
    while at < len(content):
        length = int.from_bytes(content[at + 4 : at + 8], "little")
        fields = ((0, 4), (4, 4), (8, 1), (9, 1), (10, 2), (12, 8), (20, 4), (24, 4))
        spans += [(at, at + length), (at + HEAD_BYTES, at + length), *((at + a, at + a + n) for a, n in fields)]
        at += length
    return Seed(content, PLAIN, tuple(spans))


def _repair(random: Random, frames: list[bytes]) -> list[bytes]:
    """Checks that match what is there, in half of all cases; a last frame says so."""
    if random.random() < 0.5:
        return frames
    return [*(_with_checks(frame) for frame in frames), _REPAIRED]


def _with_checks(content: bytes) -> bytes:
    if len(content) < HEADER_BYTES:
        return content
    raw = bytearray(content)
    _CHECK.pack_into(raw, HEADER_BYTES - 4, crc32(raw[: HEADER_BYTES - 4]))
    check_from, at = header_seed(raw), HEADER_BYTES
    while at + HEAD_BYTES <= len(raw):
        length = int.from_bytes(raw[at + 4 : at + 8], "little")
        if not HEAD_BYTES <= length <= len(raw) - at:
            break
        _CHECK.pack_into(raw, at + 20, crc32(raw[at + HEAD_BYTES : at + length], check_from))
        _CHECK.pack_into(raw, at + 24, crc32(raw[at : at + 24], check_from))
        at += length
    return bytes(raw)


def segments() -> Target:
    """A journal of two segments is recovered: what it held, in order and from its beginning, or a refusal."""
    contents = _segments()
    whole = list(read_journal(_HERE, disk=_ReadOnly(contents)).records())
    alone = list(read_journal(_HERE, disk=_ReadOnly(contents[:1])).records())

    def run(frames: Sequence[bytes]) -> str:
        repaired = frames[-1:] == [_REPAIRED]
        read = read_journal(_HERE, disk=_ReadOnly(frames[:-1] if repaired else frames))
        found = list(read.records())
        held = next((one for one in (whole, alone) if found == one[: len(found)]), None)
        assert repaired or held is not None, f"records that were never written: {found}"
        sequences = [record.sequence for record in found]
        assert repaired or sequences == sorted(sequences), "records out of order"
        return f"{len(found)} records" if not repaired else "accepted with right checks"

    made = [message(*map(_segment_seed, contents)), message(_segment_seed(contents[0]))]
    return Target(name="journal.segments", messages=made, run=run, refusals=_REFUSALS, repair=_repair)


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
        JournalPrompts(prompts=(PROMPT, PROMPT)),
        JournalHeld(id=one, done=SampledSoFar(completion=COMPLETION, parts=1, seconds=0.5)),
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


def headers() -> Target:
    """The header of a segment: one that is accepted is the one that was written."""
    contents = [content[:HEADER_BYTES] for content in _segments()]
    known = [decode_header(content) for content in contents]

    def run(frames: Sequence[bytes]) -> str:
        header = decode_header(b"".join(frames))
        assert header in known, f"a header that was never written: {header}"
        return "accepted"

    made = [message(_segment_seed(content)) for content in contents]
    return Target(name="journal.headers", messages=made, run=run, refusals=_REFUSALS)


def crash_bundle() -> Target:
    """The manifest of a bundle."""
    values: dict[str, Any] = {"int": 1, "str": "text", "float": 1.5, "dict": {}, "tuple": ()}
    required = [field for field in msgspec.structs.fields(CrashManifest) if field.required]
    fields: Any = {field.name: values[getattr(field.type, "__name__", "")] for field in required}
    manifest = CrashManifest(**fields)
    contents = []
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        sink = BytesIO()
        with zipfile.ZipFile(sink, "w", compression) as bundle:
            bundle.writestr("events.jsonl", b"x" * 100)
            bundle.writestr(MANIFEST, msgspec.json.encode(manifest))
        contents.append(sink.getvalue())

    def run(frames: Sequence[bytes]) -> str:
        bundle: Any = BytesIO(b"".join(frames))  # what ``ZipFile`` opens it to
        read_manifest(bundle)
        return "accepted"

    made = [message(seed(content, PLAIN)) for content in contents]
    return Target(name="files.crash_bundle", messages=made, run=run, refusals=_REFUSALS)


def targets() -> list[Target]:
    """All of this module."""
    return [segments(), records(), headers(), crash_bundle()]
