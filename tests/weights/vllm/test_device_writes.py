"""Versions that a worker maps on its own GPU: compared, written, hashed and undone where the parameters are.

Here both are tensors of a CPU, and shared memory of the host stands for CUDA's handles; ``tests/gpu`` has the rest."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from builders.weights import Bits, changed, state_hash

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement, announcement_of
from streamrl.weights.codec.state_hash import hash_elements
from streamrl.weights.distance import Location, Mover, this_host
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.pull.shared_versions import Holder, MemorySegment, SharedMemory
from streamrl.weights.pull.trainer_memory import NO_VERSION

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from streamrl.weights.publish.torch_tensors import DeviceTensors, TorchOnCpu  # noqa: E402
from streamrl.weights.vllm import device_writes  # noqa: E402
from streamrl.weights.vllm.tensor_hash import hash_tensor  # noqa: E402
from tests.weights.vllm.test_weight_transaction import Crash, CrashAt, Receiver  # noqa: E402

ROWS = 24
SHAPES = {"a": (ROWS, ROWS), "b": (ROWS, ROWS), "c": (ROWS,)}
GPU = Location(this_host(), "GPU-of-both")


class SharedTensors(DeviceTensors):
    """A device whose memory is shared memory of the host."""

    def _new_memory(self, count: int) -> tuple[Any, str, bytes]:
        self.memory = SharedMemory.create(2 * count)
        place = (os.getpid(), self.memory.descriptor, self.memory.inode, self.memory.size)
        return tensor_on(self.memory), GPU.device, msgspec.msgpack.encode(place)


def tensor_on(memory: SharedMemory) -> Any:
    return torch.from_numpy(memory.octets(0, memory.size).view(np.int16))


def open_shared(handle: bytes) -> Any:
    """As ``weight_receiver.open_device`` opens CUDA's."""
    pid, descriptor, inode, size = msgspec.msgpack.decode(handle)
    memory = SharedMemory.attach(MemorySegment(inode, size, (Holder(pid, descriptor),)))
    if memory is None:
        raise WeightError("the handle leads nowhere")
    return tensor_on(memory)


class Fused(torch.nn.Module):  # type: ignore[misc]
    """As an engine has them: two tensors in one parameter, the second one by its columns; one alone."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.joined = torch.nn.Parameter(torch.zeros(2 * ROWS, ROWS, dtype=dtype), requires_grad=False)
        self.alone = torch.nn.Parameter(torch.zeros(ROWS, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name == "b":
                self.joined.data[ROWS:, :10].copy_(tensor[:, ROWS - 10 :])
                self.joined.data[ROWS:, 10:].copy_(tensor[:, : ROWS - 10])
            else:
                (self.joined[:ROWS] if name == "a" else self.alone).data.copy_(tensor)

    def bits(self, name: str) -> np.ndarray:
        below = self.joined.detach()[ROWS:]
        tensors = {
            "a": self.joined.detach()[:ROWS],
            "b": torch.cat([below[:, 10:], below[:, :10]], 1),
            "c": self.alone.detach(),
        }
        found = tensors[name].reshape(-1).to(torch.bfloat16).view(torch.int16).cpu().numpy()
        return found.view(np.uint16)


class Push:
    """A publisher and a worker, on one GPU unless ``mover`` is another one."""

    def __init__(self, directory: Path, mover: Mover = Mover.DEVICE, dtype: Any = torch.bfloat16) -> None:
        shards = [ShardSpec(n, "bfloat16", shape, 0, int(np.prod(shape))) for n, shape in SHAPES.items()]
        self.source = TorchOnCpu() if mover is Mover.ENCODED else SharedTensors(torch.device("cpu"))
        options = {"run_id": "run", "rank": 0, "shards": shards, "source": self.source, "movers": (mover,)}
        self.publisher = WeightPublisher(f"ipc://{directory}/{mover}", **options)
        self.publisher.start()
        self.receiver = Receiver(None, location=GPU, open_device=open_shared)  # type: ignore[arg-type]
        self.receiver.model = Fused(dtype)
        self.bits: Bits = {n: np.zeros(0, np.uint16) for n in SHAPES}

    def publish(self, version: int, bits: Bits) -> WeightAnnouncement:
        values = {n: torch.from_numpy((b.astype(np.uint32) << 16).view(np.float32)) for n, b in bits.items()}
        return announcement_of(version, [self.publisher.publish(version, values)])

    def commit(self, announced: WeightAnnouncement, bits: Bits, mover: Mover) -> None:
        assert self.receiver.stage(announced).mover == mover
        self.receiver.transaction.apply(announced.policy_version)
        self.receiver.transaction.finish()
        self.publisher.acknowledge(announced.policy_version)
        self.assert_holds(announced.policy_version, bits)

    def assert_holds(self, version: int, bits: Bits) -> None:
        held = self.receiver.transaction.live_report()
        assert (held.policy_version, held.state_hash) == (version, state_hash(bits))
        assert not self.receiver.transaction.tainted
        for name, expected in bits.items():
            assert np.array_equal(self.receiver.model.bits(name), expected), name


def first_bits(seed: int = 0) -> Bits:
    random = np.random.default_rng(seed)
    return {n: (random.integers(0, 65_536, int(np.prod(s))) & 0xBFFF).astype(np.uint16) for n, s in SHAPES.items()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of each tensor."""
    monkeypatch.setattr(device_writes, "PART_ELEMENTS", 100)


@pytest.fixture
def push(tmp_path: Path, small_parts: None) -> Iterator[Push]:
    """At version 0."""
    made = Push(tmp_path)
    made.bits = first_bits()
    made.commit(made.publish(0, made.bits), made.bits, Mover.DEVICE)
    yield made
    made.publisher.close()


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gpu_mover_leaves_bits_and_hashes_of_the_codec(tmp_path: Path, dtype: Any) -> None:
    """Versions on the device, through memory of the host and as encoded bytes: the same bits, hashes and counts."""
    pushes = {mover: Push(tmp_path, mover, dtype) for mover in Mover}
    bits = first_bits()
    for version in range(5):
        announced = {mover: push.publish(version, bits) for mover, push in pushes.items()}
        for mover, push in pushes.items():
            push.commit(announced[mover], bits, mover)
        assert len({(one.state_hash, one.sources[0].changed_elements) for one in announced.values()}) == 1
        bits = changed(bits, version, density=0 if version == 2 else 0.05)
    for push in pushes.values():
        push.publisher.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_commit_on_the_gpu_that_fails_is_undone(
    push: Push, monkeypatch: pytest.MonkeyPatch, number: int, after: bool
) -> None:
    """The engine keeps its old version, and takes the new one afterwards, through memory of the host."""
    new = changed(push.bits, 1, density=0.1)
    announced = push.publish(1, new)
    with monkeypatch.context() as planted:
        live = push.receiver.transaction.live
        crash = CrashAt(live._write_and_check, number, after=after)
        planted.setattr(live, "_write_and_check", crash)
        with pytest.raises(Crash):
            push.receiver.commit(announced)
        assert crash.calls == number + 1
    push.assert_holds(0, push.bits)
    push.commit(announced, new, Mover.HOST)


def test_missed_versions_are_one_difference_on_the_gpu(push: Push) -> None:
    bits = push.bits
    for version in range(1, 4):
        bits = changed(bits, version)
        announced = push.publish(version, bits)
    push.commit(announced, bits, Mover.DEVICE)


def test_a_foreign_write_is_found_before_a_commit(push: Push) -> None:
    """What wrote to a parameter between staging and commit is found, and the commit undone."""
    new = changed(push.bits, 1, density=1)
    announced = push.publish(1, new)
    assert not push.receiver.stage(announced).error
    push.receiver.model.alone.data.view(torch.int16)[3] ^= 1
    with pytest.raises(WeightError, match="'alone': 1 of 24 elements differ before the commit"):
        push.receiver.transaction.apply(1)
    push.assert_holds(0, push.bits)


def test_weights_lost_by_a_sleep_come_back_from_the_gpu(push: Push) -> None:
    """An anchor writes all elements, without a transfer; one whose memory is left meanwhile is refused, and the next
    one comes through memory of the host."""
    bits = changed(push.bits, 1)
    push.publish(1, bits)
    push.receiver.transaction.forget_live("they were dropped")
    push.receiver.model.joined.zero_()
    anchor = announcement_of(1, [push.publisher.publish_anchor(1)])
    memory = push.publisher._memory
    assert memory is not None
    push.commit(anchor, bits, Mover.DEVICE)
    push.receiver.transaction.forget_live("they were dropped again")
    assert push.receiver.stage(anchor).mover == Mover.DEVICE
    memory.version = NO_VERSION
    with pytest.raises(WeightError, match="the trainer's memory has version"):
        push.receiver.transaction.apply(1)
    assert push.receiver.transaction.tainted
    memory.version = 1
    push.commit(anchor, bits, Mover.HOST)


@pytest.mark.parametrize("error", [WeightError("the handle leads nowhere"), torch.OutOfMemoryError("no room")])
def test_a_gpu_that_cannot_be_mapped_leads_to_the_host(
    push: Push, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """One sentence says why, and the version comes through memory of the host; the next one from the GPU again."""

    def fail(handle: bytes) -> Any:
        raise error

    push.receiver.transaction._open_device = fail
    bits = changed(push.bits, 1)
    with caplog.at_level(logging.WARNING):
        push.commit(push.publish(1, bits), bits, Mover.HOST)
    (sentence,) = caplog.messages
    assert sentence.startswith("version 1 is not taken from the GPU: ") and sentence.endswith(str(error))
    push.receiver.transaction._open_device = open_shared
    bits = changed(bits, 2)
    push.commit(push.publish(2, bits), bits, Mover.DEVICE)


def test_after_the_gpu_encoded_bytes_need_an_anchor(push: Push) -> None:
    """An engine whose bits were never in CPU memory cannot decode a delta: it asks for an anchor."""
    push.publisher.publish_anchor(0)
    bits = changed(push.bits, 1)
    announced = push.publish(1, bits)
    push.receiver.transaction._location = Location("another host")
    assert push.receiver.stage(announced).error.endswith("publish an anchor")
    push.assert_holds(0, push.bits)
    push.commit(announcement_of(1, [push.publisher.publish_anchor(1)]), bits, Mover.ENCODED)
    bits = changed(bits, 2)
    push.commit(push.publish(2, bits), bits, Mover.ENCODED)


def test_hashes_of_tensors_are_those_of_arrays() -> None:
    random = np.random.default_rng(0)
    positions = np.concatenate([[0, 1, 2**40], random.integers(0, 2**40, 1000)])
    bits = np.concatenate([[0, 0xFFFF, 0x8000], random.integers(0, 65_536, 1000)]).astype(np.uint16)
    found = hash_tensor("layer.weight", torch.from_numpy(positions), torch.from_numpy(bits.view(np.int16)))
    assert found == hash_elements("layer.weight", positions, bits)


INTERPRETED = """
import numpy as np, torch
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.vllm.hash_kernel import hash_run
random = np.random.default_rng(0)
for count, first in ((1, 0), (1024, 5), (3000, 2**40), (5000, 7)):
    bits = random.integers(0, 65_536, count).astype(np.uint16)
    assert hash_run("layer", first, torch.from_numpy(bits.view(np.int16))) == hash_range("layer", first, bits)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install --no-deps triton")
def test_the_kernel_sums_the_terms_of_the_codec() -> None:
    """Triton's interpreter, in a process of its own: blocks that are full, partial, and far into a tensor."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
