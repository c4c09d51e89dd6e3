"""Small tensors that are coded as if they were one: exact, as small as one, and each still a tensor of its own."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_updates import adam_step, draw_weights, learning_rate_for, synthetic_model
from update_entropy import UpdateCounts
from weight_measurement import UpdatedTensor, units_of

from campaigns.fuzz.weight_frames import hostile, world
from streamrl.base.errors import WeightError
from streamrl.weights import manifest
from streamrl.weights.codec.bits import bit_type
from streamrl.weights.codec.codec import encode_patch
from streamrl.weights.manifest import (
    Manifest,
    ShardSpec,
    UnitEntry,
    WorkUnit,
    decode_manifest,
    digest_of,
    encode_manifest,
)
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.pull.decoding import Decoding
from streamrl.weights.pull.replica import CheckpointReplica, ShardPatch, StagedPatch, StagedVersion, TensorSpec
from tests.weights.faulty_link import SmallPush, served

Bits = dict[str, np.ndarray]


def held(shards: Sequence[ShardSpec], bits: Bits) -> CheckpointReplica:
    """A receiver of ``bits``."""
    specs = {s.name: TensorSpec(s.name, s.dtype, s.shape) for s in shards}
    replica = CheckpointReplica()
    patches = {name: StagedPatch(None, values) for name, values in bits.items()}
    replica.show(StagedVersion(0, None, 0, specs, patches, 0))
    return replica


def sent(shards: Sequence[ShardSpec], old: Bits | None, new: Bits) -> Iterator[tuple[WorkUnit, bytes]]:
    """All units that have some bytes, and those."""
    for unit in manifest.work_units(shards):
        base = None if old is None else unit.join(lambda s: old[s.name][s.offset : s.offset + s.count])
        encoded = encode_patch(unit.join(lambda s: new[s.name][s.offset : s.offset + s.count]), base, unit.dtype)
        if encoded is not None:
            assert len(encoded.encoded) <= unit.count * unit.bits.itemsize
            yield unit, encoded.encoded


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_tensors_arrive_bit_for_bit_however_they_are_joined(data: st.DataObject) -> None:
    """Empty ones, large ones that are cut, several dtypes; none, some or all elements change, or all are sent."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    counts = data.draw(st.lists(st.sampled_from([0, 1, 3, 40, 99, 100, 101, 350]), max_size=12))
    shards, old, new = [], {}, {}
    for index, count in enumerate(counts):
        dtype = data.draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]))
        name, bits = f"t{index}", bit_type(dtype, "t")
        shards.append(ShardSpec(name, dtype, (count,), 0, count))
        old[name] = random.integers(0, 2**32, count, dtype=np.uint64).astype(bits)
        touched = random.random(count) < data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
        other = random.integers(0, 2**32, count, dtype=np.uint64).astype(bits)
        new[name] = np.where(touched, old[name] + bits.type(1) if data.draw(st.booleans()) else other, old[name])
    anchor = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(manifest, "UNIT_ELEMENTS", 300)
        decoding = Decoding(None if anchor else held(shards, old))
        listed, arrived = [], []
        for unit, encoded in sent(shards, None if anchor else old, new):
            listed.append(UnitEntry(unit, len(encoded)))
            arrived += decoding.decode([(unit, memoryview(encoded))])
        decoded = decode_manifest_of(listed)
    assert decoded.units == tuple(listed)
    assert_become(shards, {} if anchor else old, new, arrived)


def decode_manifest_of(entries: Sequence[UnitEntry]) -> Manifest:
    size = sum(entry.payload_bytes for entry in entries)
    chunks = (manifest.ChunkEntry("", size),)
    encoded = encode_manifest(Manifest(manifest.FORMAT_VERSION, "run", 0, 1, 0, 0, "", 0, tuple(entries), chunks))
    return decode_manifest(encoded, digest_of(encoded), "here")


def assert_become(shards: Sequence[ShardSpec], old: Bits, new: Bits, arrived: Sequence[ShardPatch]) -> None:
    became = {s.name: old.get(s.name, np.zeros(s.count, bit_type(s.dtype, s.name))).copy() for s in shards}
    covered = dict.fromkeys(became, 0)
    for part in arrived:
        piece = became[part.shard.name][part.shard.offset : part.shard.offset + part.shard.count]
        piece[slice(None) if part.patch.positions is None else part.patch.positions] = part.patch.values
        covered[part.shard.name] += part.shard.count
        assert not old or part.patch.values.size, "a tensor without a change is not told of"
    for name, expected in new.items():
        assert np.array_equal(became[name], expected), name
        assert old or covered[name] == expected.size


def test_units_hold_shards_of_one_dtype_up_to_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are filled with shards of one dtype, and end where they are full."""
    monkeypatch.setattr(manifest, "UNIT_ELEMENTS", 300)
    sizes = [("a", 30), ("large", 700), ("b", 0), ("half", 5), ("c", 170), ("d", 1)]
    shards = [ShardSpec(n, "float16" if n == "half" else "bfloat16", (size,), 0, size) for n, size in sizes]
    units = [[(s.name, s.offset, s.count) for s in unit.shards] for unit in manifest.work_units(shards)]
    assert units == [
        [("a", 0, 30), ("large", 0, 270)],
        [("large", 270, 300)],
        [("large", 570, 130), ("b", 0, 0), ("c", 0, 170)],
        [("d", 0, 1)],
        [("half", 0, 5)],
    ]


@pytest.mark.parametrize("density", [0.005, 0.01, 0.03])
def test_many_small_tensors_cost_what_one_tensor_does(density: float) -> None:
    """A model of many small tensors costs as many bytes as one tensor. 166 of them; each by itself would take two bytes
    a change."""
    rate = learning_rate_for(density, draw_weights(1 << 17, seed=3, place=0))
    tensors, counts = [], UpdateCounts()
    for place, shape in enumerate(synthetic_model(300_000)):
        old, new = adam_step(draw_weights(shape.elements, seed=3, place=place), rate, seed=1, place=place)
        tensors.append(UpdatedTensor(shape.name, "bfloat16", old, new))
        counts.add(UpdateCounts.of(old, new, "bfloat16"))
    units = units_of(tensors)
    assert (len(tensors), len(units)) == (166, 1)
    encoded = encode_patch(units[0].new, units[0].old, "bfloat16")
    assert encoded is not None
    assert len(encoded.encoded) <= 0.85 * counts.changed.sum()
    assert len(encoded.encoded) <= 1.25 * counts.conditional_bits() / 8


def test_what_did_not_change_beside_what_did_is_not_staged(tmp_path: Path) -> None:
    push = SmallPush(tmp_path)
    try:
        push.begin()
        new = {**push.bits, "norm": push.bits["norm"] ^ np.uint16(1)}
        announced = push.publish(1, new)
        staged = push.replica.stage(push.fetch(announced))
        assert list(staged.patches) == ["norm"]
        listed = decode_manifest(served(push.publisher, announced).manifest, announced.sources[0].manifest_digest, "")
        assert [[shard.name for shard in entry.unit.shards] for entry in listed.units] == [["norm", "layer"]]
    finally:
        push.close()


def test_the_names_of_many_tensors_do_not_outweigh_their_changes() -> None:
    """Of the model above 0.7 bytes a change are changes."""
    shapes = synthetic_model(300_000)
    shards = [ShardSpec(s.name, "bfloat16", (s.elements,), 0, s.elements) for s in shapes]
    made = WeightPublisher("ipc:///nowhere", run_id="run", rank=0, shards=shards)
    steps = {s.name: adam_step(draw_weights(s.elements, 3, place), 3e-6, 1, place) for place, s in enumerate(shapes)}
    made.publish(0, {name: old for name, (old, _) in steps.items()})
    made.acknowledge(0)
    delta = made.publish(1, {name: new for name, (_, new) in steps.items()})
    assert len(made._server._parts[delta.source.manifest_digest].manifest) < 1.0 * delta.source.changed_elements


def test_an_oversized_manifest_is_refused_compressed() -> None:
    """A manifest that decompresses beyond its limit is refused before that happens."""
    bomb = zstandard.compress(bytes(manifest.MANIFEST_LIMIT + 1))
    tracemalloc.start()
    try:
        for wrong, words in ((bomb, "claims 67108865"), (b"no frame", "cannot be decoded"), (b"", "decoded")):
            with pytest.raises(WeightError, match=words):
                decode_manifest(wrong, digest_of(wrong), "here")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---- what only a broken or hostile publisher would write ---------------------------------------------------


def unit_of(*sizes: int, dtype: str = "bfloat16") -> WorkUnit:
    return WorkUnit(tuple(ShardSpec(f"t{i}", dtype, (size,), 0, size) for i, size in enumerate(sizes)))


def test_joins_that_nobody_makes_are_refused() -> None:
    honest = unit_of(5, 0, 7)
    assert decode_manifest_of([UnitEntry(honest, 9)]).units == (UnitEntry(honest, 9),)
    cases = {
        "nothing": WorkUnit(()),
        "of another dtype": WorkUnit((*honest.shards, *unit_of(7, dtype="float16").shards)),
        "more than is ever joined": unit_of(1, manifest.UNIT_ELEMENTS),
    }
    for kind, unit in cases.items():
        with pytest.raises(WeightError, match="are coded together"):
            pytest.fail(f"{kind}: {decode_manifest_of([UnitEntry(unit, 9)])}")


def test_a_lie_about_what_is_joined_never_becomes_a_wrong_weight() -> None:
    """In a manifest with valid digests: another order, one tensor less or twice, by itself, or another part of it."""
    sample = world().samples[1]
    joined, head = sample.manifest.units
    norm, layer = joined.unit.shards
    cut = msgspec.structs.replace(layer, offset=60, count=layer.count - 60)
    for shards in ((layer, norm), (norm,), (norm, layer, layer), (norm, cut)):
        units = (UnitEntry(WorkUnit(shards), joined.payload_bytes), head)
        with pytest.raises(WeightError):
            pytest.fail(hostile(sample, msgspec.structs.replace(sample.manifest, units=units), None))
    apart = (UnitEntry(WorkUnit((norm,)), joined.payload_bytes), UnitEntry(WorkUnit((layer,)), 0), head)
    with pytest.raises(WeightError):
        pytest.fail(hostile(sample, msgspec.structs.replace(sample.manifest, units=apart), None))
    assert hostile(sample, sample.manifest, None) == "equal"
