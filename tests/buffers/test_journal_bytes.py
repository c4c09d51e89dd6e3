"""Every prefix and every flipped bit of recorded journals; frames of other places; the bytes of format 1."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_world import DIRECTORY, RUN, World
from simulated_disk import Inode, SimulatedDisk

from streamrl.journal import journal_format
from streamrl.journal.journal import JournalDamaged, JournalFailed, JournalRefused, open_journal, read_journal
from streamrl.journal.journal_format import (
    HEAD_BYTES,
    HEADER_BYTES,
    FrameError,
    NewerFormat,
    Role,
    SegmentHeader,
    append_frame,
    append_mark,
    decode_head,
    decode_header,
    decode_payload,
    encode_header,
    find_mark,
    header_seed,
)

Files = dict[Path, bytes]


def recorded(program: str, *, size: int = 5, seed: int = 1, close: bool = True) -> tuple[Files, list[bytes]]:
    """Files of a run that did ``program``, and its records."""
    world = World(random.Random(seed))
    world.open()
    for letter in program:
        if letter == "g":
            world.append(3, size)
        else:
            world.go(letter)
    if close:
        world.close()
    return {path: bytes(inode.cached) for path, inode in world.disk.entries.items()}, world.appended


def disk_with(files: Files) -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.directories |= {DIRECTORY, DIRECTORY.parent}
    disk.entries = {path: Inode(content, bytearray(content)) for path, content in files.items()}
    return disk


def outcome(files: Files, payloads: list[bytes]) -> str | int:
    """Name of the refusal, or how many records came back, each of them as it was written, and none missing before."""
    try:
        recovered = read_journal(DIRECTORY, disk=disk_with(files))
        records = list(recovered.records())
    except (JournalDamaged, JournalRefused) as error:
        return type(error).__name__ if str(DIRECTORY) in str(error) else f"no path in {error}"
    begun = recovered.beginnings[-1].sequence
    found = [record.payload for record in records if not record.base]
    assert found == payloads[begun : begun + len(found)]
    assert len([record for record in records if record.base]) == recovered.beginnings[-1].base_records
    return begun + len(found)


def test_every_flipped_bit_gives_the_acknowledged_state_or_a_refusal() -> None:
    files, payloads = recorded("agrbga")
    assert len(files) == 4  # three segments and the lock
    seen = {"JournalDamaged": 0, "JournalRefused": 0, len(payloads): 0}
    for path in sorted(files):
        content = files[path]
        for bit in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            result = outcome({**files, path: bytes(flipped)}, payloads)
            assert result in seen, f"bit {bit} of {path.name}: {result} of {len(payloads)} records, and no refusal"
            seen[result] += 1
    assert min(seen.values()) > 0, seen


def test_a_flipped_bit_in_a_group_that_was_not_flushed_costs_that_group_at_most() -> None:
    world = World(random.Random(2))
    world.open()
    world.append(2, 30)
    world.disk.fail_at = (len(world.disk.calls) + 1, 5)
    with pytest.raises(JournalFailed):
        world.append(3, 30)
    files = {path: bytes(inode.cached) for path, inode in world.disk.entries.items()}
    path = DIRECTORY / "000001.journal"
    results = set()
    for bit in range(8 * HEADER_BYTES, 8 * len(files[path])):
        flipped = bytearray(files[path])
        flipped[bit // 8] ^= 1 << bit % 8
        results.add(outcome({**files, path: bytes(flipped)}, world.appended))
    assert results == {"JournalDamaged", 2, 3, 4}


def test_every_prefix_of_the_last_segment_is_recovered_or_refused() -> None:
    files, payloads = recorded("grgaa", close=False)
    last = max(path for path in files if path.suffix == ".journal")
    content = files[last]
    results = [outcome({**files, last: content[:cut]}, payloads) for cut in range(len(content) + 1)]
    assert results[:HEADER_BYTES] == ["JournalDamaged"] * HEADER_BYTES, "it was whole before it got its name"
    counts = [result for result in results[HEADER_BYTES:] if isinstance(result, int)]
    assert len(counts) == len(results) - HEADER_BYTES
    assert counts == sorted(counts) and counts[0] == 3 and counts[-1] == len(payloads) == 8
    # The last mark is no record: all that was acknowledged is there without it.
    assert counts[-journal_format.MARK_BYTES - 1] == len(payloads)


def test_what_a_segment_began_with_is_whole_or_refused() -> None:
    """No mark follows it yet. The base, and records that were carried over from a group that was not flushed."""
    world = World(random.Random(2))
    world.open()
    world.append(2, 5)
    world.disk.fail_at = (len(world.disk.calls) + 1, 5)
    with pytest.raises(JournalFailed):
        world.append(2, 5)
    world.disk.killed()
    world.seen()
    carried = {path: bytes(inode.cached) for path, inode in world.disk.entries.items()}
    world.open()
    files = {path: bytes(inode.cached) for path, inode in world.disk.entries.items()}
    assert sorted(set(files) - set(carried)) == [DIRECTORY / "000002.journal"]
    for begun, payloads in ((files, world.appended), recorded("gab")):
        last = max(path for path in begun if path.suffix == ".journal")
        content = begun[last]
        assert decode_header(content).initial_end == len(content) > HEADER_BYTES
        assert outcome(begun, payloads) == len(payloads)
        for byte in range(HEADER_BYTES, len(content)):
            for bit in (1, 16, 128):
                flipped = content[:byte] + bytes([content[byte] ^ bit]) + content[byte + 1 :]
                assert outcome({**begun, last: flipped}, payloads) == "JournalDamaged"
            assert outcome({**begun, last: content[:byte]}, payloads) == "JournalDamaged"
            zeroed = content[:byte] + bytes(len(content) - byte)
            assert outcome({**begun, last: zeroed}, payloads) == "JournalDamaged"


def test_every_prefix_of_an_earlier_segment_is_refused() -> None:
    files, payloads = recorded("gragra", close=True)
    for path in sorted(path for path in files if path.suffix == ".journal")[:-1]:
        end = read_end(files, path)
        for cut in range(end):
            assert outcome({**files, path: files[path][:cut]}, payloads) == "JournalDamaged"
        for cut in range(end, len(files[path])):
            assert outcome({**files, path: files[path][:cut]}, payloads) == len(payloads), "its successor cut it here"


def read_end(files: Files, path: Path) -> int:
    following = path.with_name(f"{int(path.stem) + 1:06d}.journal")
    return decode_header(files[following]).previous_end


@pytest.mark.parametrize("filling", ["zeros", "noise", "old frames", "own frames", "copied mark"])
def test_a_tail_that_was_never_written_whole_is_cut(filling: str) -> None:
    files, payloads = recorded("garg", close=False)
    last = max(path for path in files if path.suffix == ".journal")
    first = min(path for path in files if path.suffix == ".journal")
    content = files[last]
    tail = {
        "zeros": bytes(5000),
        "noise": random.Random(2).randbytes(5000),
        "old frames": files[first][HEADER_BYTES:],
        "own frames": content[HEADER_BYTES:],
        "copied mark": content[-journal_format.MARK_BYTES :] * 2,
    }[filling]
    for length in (1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, len(tail)):
        assert outcome({**files, last: content + tail[:length]}, payloads) == len(payloads)


def test_a_cut_tail_is_no_damage_at_the_next_recovery() -> None:
    files, payloads = recorded("gag", close=False)
    last = max(path for path in files if path.suffix == ".journal")
    disk = disk_with({**files, last: files[last] + b"\xf5JF\n" + bytes(700)})
    for epoch in (2, 3):
        journal, recovered = open_journal(DIRECTORY, run_id=RUN, disk=disk.killed(), lane=World_lane)
        assert recovered.epoch == epoch
        assert recovered.cut_bytes == (704 if epoch == 2 else 0)
        assert [record.payload for record in recovered.records()] == payloads
        payloads.append(b"more")
        journal.append(1, payloads[-1])


class World_lane:
    """Works at once."""

    def __init__(self, work: object) -> None:
        self.wake = work

    def join(self) -> None:
        pass


def test_a_frame_of_another_place_is_not_a_frame_here() -> None:
    def frame(**changes: int | str) -> bytes:
        raw = encode_header(SegmentHeader(**{"run_id": RUN, "segment": 3, "epoch": 5, "first_sequence": 8} | changes))
        parts: list[bytes] = []
        append_frame(parts, header_seed(raw), Role.RECORD, 1, 8, b"payload")
        return b"".join(parts)

    seed = header_seed(encode_header(SegmentHeader(run_id=RUN, segment=3, epoch=5, first_sequence=8)))
    decode_head(frame(), 0, seed)
    for change in ({"run_id": "run-8"}, {"segment": 4}, {"epoch": 6}, {"epoch": 4}, {"previous_end": 1}):
        other = frame(**change)
        with pytest.raises(FrameError):
            decode_head(other, 0, seed)
        # The payload alone is of its place, too.
        with pytest.raises(FrameError):
            decode_payload(frame()[:HEAD_BYTES] + other[HEAD_BYTES:-1] + b"D", 0, decode_head(frame(), 0, seed), seed)


def test_zeros_are_never_a_frame() -> None:
    for seed in (0, 1, 0xFFFFFFFF):
        with pytest.raises(FrameError):
            decode_head(bytes(200), 0, seed)


def test_a_length_over_the_limit_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[bytes] = []
    append_frame(parts, 7, Role.RECORD, 1, 1, bytes(100))
    head = decode_head(parts[0], 0, 7)
    assert head.length == HEAD_BYTES + 100
    with pytest.raises(FrameError, match="ends within"):
        decode_payload(parts[0], 0, head, 7)
    monkeypatch.setattr(journal_format, "RECORD_LIMIT", 99)
    with pytest.raises(FrameError, match="128 bytes"):
        decode_head(parts[0], 0, 7)


def test_a_mark_is_found_behind_bytes_that_look_like_one() -> None:
    parts = [journal_format.FRAME_MAGIC * 3, b"\xf5JF\n\x24\0\0\0\x03" + bytes(40)]
    append_mark(parts, 7, 4, 1000)
    raw = b"".join(parts)
    assert find_mark(raw, 0, 7, 999) == len(raw) - journal_format.MARK_BYTES
    assert find_mark(raw, 0, 7, 1000) == -1
    assert find_mark(raw, 0, 8, 0) == -1


@given(st.binary(max_size=200), st.integers(-5, 210), st.integers(0, 2**32 - 1))
def test_decoding_is_total(raw: bytes, offset: int, seed: int) -> None:
    for attempt in (
        lambda: decode_header(raw),
        lambda: decode_head(raw, offset, seed),
        lambda: find_mark(raw, 0, seed, 0),
    ):
        try:
            attempt()
        except FrameError:
            continue


FORMAT_1 = bytes.fromhex(
    "53524c4a524e4c0a0100020301000000020000000000000003000000000000000b000000000000009001000000000000a000"
    "0000000000006f6c640000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000d38ccc55f54a460a20000000020900000000000000000000cb37"
    "3460e62b8eb862617365f54a460a21000000010100000b000000000000006824d2a4da35a99f6669727374f54a460a1c0000"
    "00010200000c00000000000000d38ccc55b973c4b5f54a460a24000000030000000c00000000000000a9d3c7a95e849ec9dd"
    "00000000000000"
)
"""Segment 2 of epoch 3 of the run "old", written once by format 1: a base of one record and two records."""


def written_today() -> bytes:
    header = SegmentHeader(
        run_id="old",
        segment=2,
        epoch=3,
        first_sequence=11,
        previous_end=400,
        initial_end=HEADER_BYTES + HEAD_BYTES + 4,
        base_count=1,
    )
    raw = encode_header(header)
    parts = [raw]
    append_frame(parts, header_seed(raw), Role.BASE, 9, 0, b"base")
    append_frame(parts, header_seed(raw), Role.RECORD, 1, 11, b"first")
    append_frame(parts, header_seed(raw), Role.RECORD, 2, 12, b"")
    append_mark(parts, header_seed(raw), 12, sum(map(len, parts)))
    return b"".join(parts)


def test_what_format_1_wrote_can_be_read() -> None:
    disk = disk_with({DIRECTORY / "000002.journal": FORMAT_1})
    recovered = read_journal(DIRECTORY, disk=disk)
    assert [tuple(record) for record in recovered.records()] == [
        (10, 9, b"base", True),
        (11, 1, b"first", False),
        (12, 2, b"", False),
    ]
    assert (recovered.epoch, recovered.last_sequence, recovered.cut_bytes) == (3, 12, 0)
    assert written_today() == FORMAT_1, "the bytes changed: raise JOURNAL_FORMAT, and keep reading this"


def test_a_later_format_is_refused_by_name() -> None:
    later = bytearray(FORMAT_1)
    later[8] = 2
    with pytest.raises(NewerFormat):
        decode_header(later)
    with pytest.raises(JournalRefused, match=r"000002\.journal: journal format 2, this streamrl reads 1; resume with"):
        read_journal(DIRECTORY, disk=disk_with({DIRECTORY / "000002.journal": bytes(later)}))


def test_a_run_whose_directory_was_renamed_keeps_its_id() -> None:
    disk = disk_with({DIRECTORY / "000002.journal": FORMAT_1})
    for name in ("new", "newer"):
        _, recovered = open_journal(DIRECTORY, run_id=name, disk=disk, lane=World_lane)
        assert [record.payload for record in recovered.records()] == [b"base", b"first", b""]
        disk = disk.killed()
    newest = max(name for name in disk.names(DIRECTORY) if name.endswith(".journal"))
    descriptor = disk.open(DIRECTORY / newest)
    assert decode_header(disk.read(descriptor, HEADER_BYTES, 0)).run_id == "old"


def test_a_run_id_that_does_not_fit_is_refused() -> None:
    with pytest.raises(FrameError, match="70 bytes, a journal takes 64"):
        encode_header(SegmentHeader(run_id="x" * 70, segment=1, epoch=1, first_sequence=1))


def test_nothing_is_changed_before_everything_was_checked() -> None:
    files, _ = recorded("gbagrag")
    for path in sorted(path for path in files if path.suffix == ".journal")[1:]:
        damaged = bytearray(files[path])
        damaged[HEADER_BYTES + 40] ^= 1
        disk = disk_with({**files, path: bytes(damaged)})
        expected = rf"{path.name} is damaged at byte \d+: .* nothing was changed"
        with pytest.raises(JournalDamaged, match=expected) as found:
            open_journal(DIRECTORY, run_id=RUN, disk=disk, lane=World_lane)
        run = DIRECTORY.parent
        another = ["train", str(run / "recipe.toml"), "--set", f"checkpoint.resume_from={run / 'checkpoints/latest'}"]
        assert shlex.split(str(found.value))[-4:] == another
        assert {name for name, _ in disk.calls} <= {"lock", "make_directory", "flush_directory", "names", *READS}
        assert sorted(disk.entries) == sorted(files)


READS = {"open", "read", "size"}


def test_a_missing_segment_is_named() -> None:
    files, payloads = recorded("gbararg")
    names = sorted(path for path in files if path.suffix == ".journal")
    assert [path.name for path in names] == [f"{n:06d}.journal" for n in (1, 2, 3, 4)]
    assert outcome({path: files[path] for path in names[1:]}, payloads) == len(payloads), "its base stands for it"
    with pytest.raises(JournalDamaged, match=r"000003\.journal is damaged at byte 0: the segment is missing"):
        read_journal(DIRECTORY, disk=disk_with({p: files[p] for p in names if p != names[2]}))
    renamed = {**{p: files[p] for p in names[:3]}, names[3]: files[names[2]]}
    with pytest.raises(JournalDamaged, match="it is segment 3 of epoch 2 under another name"):
        read_journal(DIRECTORY, disk=disk_with(renamed))
