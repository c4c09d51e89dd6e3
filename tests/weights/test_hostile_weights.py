"""What passes every digest because a broken or hostile publisher signed it: refused by the codec, the tables of the
manifest or the state hash, before memory is taken for it, and never a wrong weight."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard

from campaigns.fuzz.weight_frames import Sample, hostile, receiving, replies_of, run_case, world
from streamrl.base.errors import WeightError
from streamrl.weights.codec import codec
from streamrl.weights.codec.codec import decode_patch
from streamrl.weights.codec.symbols import encode_symbols
from streamrl.weights.manifest import WorkUnit, decode_manifest
from streamrl.weights.pull import decoding
from streamrl.weights.pull.replica import FetchedVersion, ShardPatch
from tests.weights.faulty_link import Frames, SmallPush, changed, flip, served


@pytest.fixture
def push(tmp_path: Path) -> Iterator[SmallPush]:
    """At version 0."""
    made = SmallPush(tmp_path)
    try:
        made.begin()
        yield made
    finally:
        made.close()


def small_delta(push: SmallPush) -> tuple[Sample, list[Frames]]:
    announced = push.publish(1, changed(push.bits, 1, density=0.01))
    part = served(push.publisher, announced)
    manifest = decode_manifest(part.manifest, part.manifest_digest, "")
    sample = Sample(announced, part, manifest, {})
    return sample, list(replies_of(sample))


def test_every_bit_of_a_small_delta_may_flip_on_its_way(push: SmallPush) -> None:
    """In each frame, header or payload: nothing broken is kept, and honest frames complete the part."""
    sample, replies = small_delta(push)
    payload = b"".join(sample.part.chunks)
    flips = 0
    for number, frames in enumerate(replies):
        for which, frame in enumerate(frames):
            for bit in range(8 * len(frame)):
                part = receiving(sample)
                broken = [flip(frame, bit) if which == i else frames[i] for i in range(2)]
                for passed in (*replies[:number], broken):
                    try:
                        part.take(passed)
                    except WeightError:
                        break  # "not served": the version is refused
                else:
                    for passed in replies[number:]:
                        part.take(passed)
                    assert part.complete, (number, which, bit)
                    assert b"".join(encoded for *_, encoded in part.oldest.patch_bytes()) == payload, (
                        number,
                        which,
                        bit,
                    )
                flips += 1
    assert flips > 3000


def test_wrong_bits_behind_valid_digests_are_harmless(push: SmallPush) -> None:
    """Every bit of a small patch may be wrong behind valid digests."""
    sample, _ = small_delta(push)
    true = changed(push.bits, 1, density=0.01)
    payload = b"".join(sample.part.chunks)
    outcomes: Counter[str] = Counter()
    for bit in range(8 * len(payload)):
        wrong = flip(payload, bit)
        patches: list[ShardPatch] = []
        start = 0
        try:
            for entry in sample.manifest.units:
                encoded = memoryview(wrong)[start : start + entry.payload_bytes]
                patches += decoding.Decoding(push.replica).decode([(entry.unit, encoded)])
                start += len(encoded)
            base_hash = sample.manifest.base_part_hash
            fetched = FetchedVersion(sample.announced, 0, base_hash, patches, len(payload), "run")
            for name, patch in push.replica.stage(fetched).patches.items():
                became = push.replica.bits(name).copy()
                became[patch.positions] = patch.new_bits
                assert np.array_equal(became, true[name]), f"bit {bit} made {name} something else"
            outcomes["equal"] += 1
        except WeightError as error:
            outcomes["hash" if "would have state hash" in str(error) else "codec"] += 1
    assert outcomes["equal"] <= 16, f"{outcomes}: only padding may be read as nothing"
    assert outcomes["hash"], "some flips decode to other values, and only the state hash tells"
    assert outcomes["codec"], outcomes


def test_what_is_under_way_stays_within_the_credit() -> None:
    sample = world().samples[2]
    manifest, *chunks = replies_of(sample)
    sizes = [len(frames[1]) for frames in chunks]
    part = receiving(sample)
    assert len(list(part.requests(0))) == 1
    assert not list(part.requests(0)), "the manifest is under way"
    part.take(manifest)
    credit = 2 * sizes[0] + 1
    under_way = [request.piece for request in part.requests(credit)]
    assert under_way == [0, 1]
    asked = list(under_way)
    while under_way:
        part.take(chunks[under_way.pop(0)])
        more = [request.piece for request in part.requests(credit)]
        under_way += more
        asked += more
        assert sum(sizes[chunk] for chunk in under_way) <= credit
    assert asked == list(range(len(chunks)))
    assert part.complete


# ---- patches that only a broken or hostile publisher would write ---------------------------------------


def forged_patch(base: np.ndarray, gaps: Sequence[int], *, changed_elements: int | None = None, kind: int = 1) -> bytes:
    """A delta of one class with these gaps between changes, each change one step up."""
    gap_bytes = encode_symbols(np.array(gaps, dtype=np.uint32))
    symbol_bytes = encode_symbols(np.zeros(len(gaps), dtype=base.dtype))
    changes = len(gaps) if changed_elements is None else changed_elements
    header = codec._Header(codec._LAYOUT_VERSION, base.size, ((kind, changes, len(gap_bytes), len(symbol_bytes)),))
    return codec._frame(header, gap_bytes, symbol_bytes)


ONE_EXPONENT = np.full(1000, 0x3F80, dtype=np.uint16)


def test_the_forged_form_is_the_form_that_is_read() -> None:
    base = ONE_EXPONENT
    patch = decode_patch(forged_patch(base, [0, 5, 992]), "bfloat16", base.size, "t", base)
    assert patch.positions is not None
    assert patch.positions.tolist() == [0, 6, 999]
    assert patch.values.tolist() != base[[0, 6, 999]].tolist()


WRONG_GAPS = {
    "out of range": [1000],
    "beyond the last": [999, 0],
    "minus one": [2**32 - 1],
    "repeated": [5, 2**32 - 1],
    "unsorted": [5, 2**32 - 6],
    "overflowing": [2**32 - 1] * 500,
    "wrapping": [2**31, 2**31],
    "too many": [0] * 1001,
}


def test_positions_that_leave_the_shard_are_refused() -> None:
    """Gaps are unsigned and count within a class: what stands for -1 or for a step back lies beyond its end."""
    base = ONE_EXPONENT
    for kind, gaps in WRONG_GAPS.items():
        with pytest.raises(WeightError, match="patch of 't'"):
            pytest.fail(f"{kind}: {decode_patch(forged_patch(base, gaps), 'bfloat16', base.size, 't', base)}")


@pytest.mark.parametrize(
    "positions",
    [[-1, 3], [3, 2], [3, 3], [0, 3040], [0, 2**40], [-(2**63), 0]],
    ids=["negative", "unsorted", "repeated", "out of range", "far out of range", "lowest"],
)
def test_no_position_of_a_wrong_decoder_is_used(
    push: SmallPush, monkeypatch: pytest.MonkeyPatch, positions: list[int]
) -> None:
    """The check behind the codec: were it wrong, the receiver would refuse what it decodes to."""

    def wrong(encoded: object, dtype: str, count: int, tensor: str, base: np.ndarray) -> object:
        if tensor == "head":
            return decode_patch(encoded, dtype, count, tensor, base)  # type: ignore[arg-type]
        return codec.WeightPatch(np.array(positions, dtype=np.int64), base[:2] ^ base.dtype.type(1))

    new = {**push.bits, "norm": push.bits["norm"] ^ (np.arange(40) < 2).astype(np.uint16)}
    announced = push.publish(1, new)
    monkeypatch.setattr(decoding, "decode_patch", wrong)
    with pytest.raises(WeightError, match=r"'norm and 1 more' has positions that do not rise within 3040 elements"):
        push.fetch(announced)


BOMB = 1 << 30


def bombs() -> dict[str, bytes]:
    base = np.zeros(64, dtype=np.uint16)
    huge = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    zeros = encode_symbols(np.zeros(1 << 22, dtype=np.uint32))
    planes = codec._Header(codec._LAYOUT_VERSION, 64)
    streams = codec._Header(codec._LAYOUT_VERSION, 64, ((1, 2, len(zeros), len(zeros)),))
    claimed = codec._Header(codec._LAYOUT_VERSION, BOMB)
    return {
        "more elements than the shard": codec._frame(claimed, b"\0\0"),
        "more changes than elements": forged_patch(base, [0, 1], changed_elements=BOMB),
        "a stream of millions of symbols for two": codec._frame(streams, zeros, zeros),
        "a zstd frame of 16 MiB for 64 bytes": codec._frame(planes, huge, bytes(64)),
    }


@pytest.mark.parametrize("kind", list(bombs()))
def test_decompression_bombs_are_refused_before_allocation(kind: str) -> None:
    """A decompression bomb is refused before memory is allocated for it."""
    encoded, base = bombs()[kind], np.zeros(64, dtype=np.uint16)
    tracemalloc.start()
    try:
        with pytest.raises(WeightError, match="patch of 't'"):
            decode_patch(encoded, "bfloat16", base.size, "t", base)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_manifests_beyond_the_announcement_are_refused() -> None:
    """A manifest that lists more than was announced is refused. Before memory is taken for it, and before any of its
    chunks is asked for."""
    sample = world().samples[1]
    *others, last = sample.manifest.units
    (shard,) = last.unit.shards
    many = msgspec.structs.replace(shard, shape=(BOMB, BOMB), count=BOMB * BOMB)
    entry = msgspec.structs.replace(last, unit=WorkUnit((many,)))
    with pytest.raises(WeightError, match=r"lists shards of \d+ elements; announced were"):
        hostile(sample, msgspec.structs.replace(sample.manifest, units=(*others, entry)), None)


@pytest.mark.long
def test_a_slice_of_the_fuzzed_frames() -> None:
    """The whole: ``python -m campaigns fuzz --target weights.transfers``."""
    outcomes = Counter(map(run_case, range(3000)))
    assert outcomes["reply_case: equal"] > 300
    assert outcomes["patch_case: refused"] > 300
    assert outcomes["manifest_case: refused"] > 100
    assert outcomes["request_case: NotServed"] > 100
