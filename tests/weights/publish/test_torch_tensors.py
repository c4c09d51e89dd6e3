"""What torch finds where the bits lie gives the patch that the compiled loops give; here on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_updates import adam_step, draw_weights

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.published_weights import FullWeights
from streamrl.weights import manifest
from streamrl.weights.codec.bits import bit_type
from streamrl.weights.codec.codec import encode_patch
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import Published, WeightPublisher
from streamrl.weights.publish.torch_tensors import DeviceTensors, TorchOnCpu, encode_on_device, start_publisher
from streamrl.weights.pull.fetch import fetch_version
from streamrl.weights.pull.replica import CheckpointReplica

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def tensor_of(bits: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).to(device)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_patterns_give_the_same_patch_to_the_byte(device: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    bits = bit_type(dtype, "t")
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    count = data.draw(st.sampled_from([0, 1, 7, 256, 700]))
    base = random.integers(0, 2**32, count, dtype=np.uint64).astype(bits)
    if data.draw(st.booleans()):  # of a few exponents only
        base &= bits.type(0x83FF | 1 << (8 * bits.itemsize - 1))
    new = np.where(random.random(count) < data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0])), ~base, base).astype(bits)
    if data.draw(st.booleans()):
        new = np.where(base != new, random.integers(0, 2**32, count, dtype=np.uint64).astype(bits), base)
    assert_same_patch(base, new, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elements", [5_000, 600_001])
@pytest.mark.parametrize("rate", [0.0, 3e-6, 1e-4])
def test_an_adam_step_gives_the_same_patch_to_the_byte(device: str, elements: int, rate: float) -> None:
    weights = draw_weights(elements, seed=3, place=0)
    assert_same_patch(*(adam_step(weights, rate, seed=1, place=0) if rate else (weights, weights)), "bfloat16", device)


def assert_same_patch(base: np.ndarray, new: np.ndarray, dtype: str, device: str) -> None:
    expected = encode_patch(new, base, dtype)
    encoded = encode_on_device(tensor_of(new, device), tensor_of(base, device), dtype)
    if expected is None:
        assert encoded is None
        return
    assert encoded is not None
    assert encoded.encoded == expected.encoded
    assert np.array_equal(encoded.patch.positions, expected.patch.positions)
    assert np.array_equal(encoded.patch.values, expected.patch.values)


# ---- through the publisher -----------------------------------------------------------------------------

SHAPES = {"norm": (7,), "row": (1, 300), "none": (0, 4), "layer": (90, 50), "embed": (500, 40), "bias": (9,)}


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these shapes some are joined, and one is cut."""
    monkeypatch.setattr(manifest, "UNIT_ELEMENTS", 9_000)


@pytest.fixture
def closed() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def drawn_values(seed: int) -> dict[str, torch.Tensor]:
    """Published float32 values: bfloat16 ones, flat."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    return {n: (torch.randn(size, generator=generator) * 0.02).bfloat16().float() for n, size in sizes.items()}


def moved(values: dict[str, torch.Tensor], seed: int, share: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    steps = {n: (torch.rand(v.shape, generator=generator) < share) * 1.01 for n, v in values.items()}
    return {name: (v * torch.where(steps[name] > 0, steps[name], 1.0)).bfloat16().float() for name, v in values.items()}


def bits_of(values: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: (v.cpu().numpy().view(np.uint32) >> 16).astype(np.uint16) for name, v in values.items()}


def announce(version: int, parts: list[Published]) -> WeightAnnouncement:
    state_hash = sum(part.state_hash for part in parts) % HASH_MODULUS
    return WeightAnnouncement(version, parts[0].base_version, state_hash, tuple(part.source for part in parts))


def assert_same_frames(one: WeightPublisher, other: WeightPublisher) -> None:
    for first, second in zip(one._chain, other._chain, strict=True):
        assert first.manifest == second.manifest
        assert [bytes(chunk) for chunk in first.chunks] == [bytes(chunk) for chunk in second.chunks]


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_publisher_beside_a_device_sends_the_same_frames(
    device: str, ranks: int, tmp_path: Path, closed: ExitStack
) -> None:
    """Of every rank's shards, whether versions are acknowledged or not; and they arrive."""
    shards: list[list[ShardSpec]] = []
    for rank in range(ranks):
        rows = [(n, s, -(-int(np.prod(s)) // ranks), int(np.prod(s))) for n, s in SHAPES.items()]
        edges = [(n, s, min(rank * r, total), min((rank + 1) * r, total)) for n, s, r, total in rows]
        shards.append([ShardSpec(n, "bfloat16", s, start, stop - start) for n, s, start, stop in edges])
    there, here = [], []
    for rank in range(ranks):
        options = {"run_id": "run", "rank": rank, "shards": shards[rank], "chain_bytes": 1 << 20}
        there.append(WeightPublisher(f"ipc://{tmp_path}/{rank}", **options, source=DeviceTensors(torch.device("cpu"))))
        here.append(WeightPublisher("ipc:///nowhere", **options))
    for publisher in there:
        publisher.start()
        closed.callback(publisher.close)
    replica, values = CheckpointReplica(), drawn_values(0)
    # Two versions are not acknowledged, and the next one is the last of them again.
    for version, (share, taken) in enumerate(
        [(0, True), (0.02, False), (0.5, False), (0, True), (1, True), (0.1, True)]
    ):
        values = moved(values, version, share)
        parts = []
        for mine, host, beside in zip(shards, here, there, strict=True):
            given = {s.name: values[s.name][s.offset : s.offset + s.count].to(device) for s in mine}
            parts.append(beside.publish(version, given))
            host.publish(version, bits_of(given))
            assert_same_frames(beside, host)
        if taken:
            replica.advance(replica.stage(fetch_version(announce(version, parts), held=replica, progress_seconds=5.0)))
            for publisher in (*here, *there):
                publisher.acknowledge(version)
            for name, expected in bits_of(values).items():
                assert np.array_equal(replica.bits(name), expected), name
    for host, beside in zip(here, there, strict=True):
        assert beside.publish_anchor(5).state_hash == host.publish_anchor(5).state_hash
        assert_same_frames(beside, host)


@pytest.mark.usefixtures("small_units")
def test_weights_on_a_device_are_published_from_there(tmp_path: Path, closed: ExitStack) -> None:
    """As the trainer does; that these lie on a CPU is kept from it."""
    named = {n: torch.nn.Parameter(v.view(SHAPES[n]).clone()) for n, v in drawn_values(1).items() if v.numel()}
    weights = FullWeights(named)
    publishers = []
    for where in ("cuda", "cpu"):
        options = TrainerOptions(model_path="", run_id="run", weights_endpoint=f"ipc://{tmp_path}/{where}")
        publishers.append(start_publisher(options, weights.shards, torch.device(where)))
        closed.callback(publishers[-1].close)
    for version in range(3):
        for publisher in publishers:
            publisher.publish(version, weights.values())
            publisher.acknowledge(version)
        assert_same_frames(*publishers)
        weights.masters.load(weights.masters.full() * 1.002)
    assert isinstance(publishers[0]._source, DeviceTensors)
    assert isinstance(publishers[1]._source, TorchOnCpu)


def test_what_is_no_shard_of_float32_values_is_refused() -> None:
    reader, shard = DeviceTensors(torch.device("cpu")), ShardSpec("w", "bfloat16", (4,), 0, 4)
    for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)):
        with pytest.raises(WeightError, match=r"'w' \(bfloat16\) was given as \d elements of torch"):
            reader.checked(wrong, shard)
