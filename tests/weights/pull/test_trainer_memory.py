"""Versions from the memory of the trainer: the bits and hashes of the encoded way, and the same undoing."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tiers import quick_only

from streamrl.base.errors import WeightError
from streamrl.base.messages import MemoryHandle, WeightAnnouncement, announcement_of
from streamrl.weights.codec.bits import bit_type
from streamrl.weights.distance import Location, Mover, mover_of, this_host
from streamrl.weights.manifest import CHECKPOINT_VERSION, ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.pull.memory_fetch import device_version
from streamrl.weights.pull.trainer_memory import NO_VERSION, TrainerMemory
from tests.weights.faulty_link import TENSORS, Bits, SmallPush, changed, random_bits
from tests.weights.pull.test_chain import save_checkpoint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from tests.weights.vllm.test_weight_transaction import Crash, CrashAt, Receiver  # noqa: E402

HERE = Location(this_host())


@pytest.fixture
def push(tmp_path: Path) -> Iterator[SmallPush]:
    made = SmallPush(tmp_path, movers=(Mover.HOST,))
    yield made
    made.close()


@pytest.fixture
def receiver(push: SmallPush) -> Receiver:
    """At version 0."""
    made = Receiver(push, location=HERE)
    made.commit(push.publish(0, push.bits))
    push.publisher.acknowledge(0)
    return made


def memory_of(push: SmallPush) -> TrainerMemory:
    memory = push.publisher._memory
    assert memory is not None
    return memory


def test_both_movers_leave_equal_bits_and_hashes(tmp_path: Path) -> None:
    """Versions through memory and as encoded bytes: the same bits, hashes, patches, counts and audits."""
    (tmp_path / "other").mkdir()
    near, far = SmallPush(tmp_path, movers=(Mover.HOST,)), SmallPush(tmp_path / "other")
    receivers = [Receiver(near, audit_interval=1, location=HERE), Receiver(far, audit_interval=1, location=HERE)]
    bits = near.bits
    for version in range(6):
        reports, patches = [], []
        for push, receiver in zip((near, far), receivers, strict=True):
            announced = push.publish(version, bits)
            assert receiver.stage(announced).mover == (Mover.HOST if push is near else Mover.ENCODED)
            staged = receiver.transaction._staged.version
            patches.append(staged.patches)
            receiver.commit(announced)
            receiver.assert_holds(version, bits)
            push.publisher.acknowledge(version)
            (source,) = announced.sources
            reports.append((announced.state_hash, staged.base_version, source.changed_elements))
            assert bool(source.payload_bytes) is (push is far and bool(staged.patches))
        assert reports[0] == reports[1] and patches[0].keys() == patches[1].keys()
        for name, patch in patches[0].items():
            assert np.array_equal(patch.positions, patches[1][name].positions)
            assert np.array_equal(patch.new_bits, patches[1][name].new_bits)
        bits = changed(bits, version, density=0 if version == 3 else 0.05)
    near.close()
    far.close()


def test_a_version_that_was_missed_needs_no_chain(push: SmallPush, receiver: Receiver) -> None:
    bits = push.bits
    for version in range(1, 5):
        bits = changed(bits, version)
        announced = push.publish(version, bits)
    receiver.commit(announced)
    receiver.assert_holds(4, bits)


def test_a_restarted_engine_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """An engine that has loaded the checkpoint, at the first version and later, gets what differs from the files."""
    first = random_bits(0)
    path = save_checkpoint(tmp_path / "model", first, TENSORS)
    push, bits = SmallPush(tmp_path, movers=(Mover.HOST,), checkpoint=path), first
    for version in range(3):
        announced = push.publish(version, bits)
        receiver = Receiver(push, checkpoint=path, location=HERE)
        receiver.load(first)
        assert not receiver.stage(announced).error
        assert receiver.transaction._staged.version.base_version == CHECKPOINT_VERSION
        receiver.commit(announced)
        receiver.assert_holds(version, bits)
        bits = changed(bits, version)
    push.close()


@pytest.mark.parametrize("after", [False, True])
def test_a_commit_from_memory_that_fails_is_undone(
    push: SmallPush, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """The engine keeps its old version, bit for bit, and takes the new one afterwards."""
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    with monkeypatch.context() as planted:
        live = receiver.transaction.live
        planted.setattr(live, "_write_and_check", CrashAt(live._write_and_check, 1, after=after))
        with pytest.raises(Crash):
            receiver.commit(announced)
    receiver.assert_holds(0, push.bits)
    receiver.commit(announced)
    receiver.assert_holds(1, new)


def test_memory_that_cannot_be_read_leads_to_an_anchor(
    push: SmallPush, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """One sentence says why; the anchor and the deltas after it come encoded, and others still read the memory."""
    lost = changed(push.bits, 1)
    announced = push.publish(1, lost)
    (source,) = announced.sources
    gone = replace(source, memory=replace(source.memory, inode=source.memory.inode + 1))
    with caplog.at_level(logging.WARNING):
        refusal = receiver.stage(replace(announced, sources=(gone,)))
    assert refusal.error == "version 1 is only in the memory of the trainer's host: publish an anchor"
    (sentence,) = caplog.messages
    assert sentence.startswith("version 1 is fetched as encoded bytes: the memory of the trainer's process ")
    anchor = push.anchor(1)
    receiver.commit(replace(anchor, sources=(replace(anchor.sources[0], memory=None),)))
    receiver.assert_holds(1, lost)
    push.publisher.acknowledge(1)
    reader = Receiver(push, location=HERE)
    reader.commit(anchor)
    bits = changed(lost, 2)
    announced = push.publish(2, bits)
    far = replace(announced, sources=(replace(announced.sources[0], memory=None),))
    for worker, version in ((receiver, far), (reader, announced)):
        worker.commit(version)
        worker.assert_holds(2, bits)
    assert receiver.stage(push.publish(3, bits)).mover == Mover.HOST


def test_memory_with_another_version_is_not_read(
    push: SmallPush, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that the trainer has left, and one that it is about to write, are refused; so is one that it leaves
    while it is read."""
    memory, source, versions = memory_of(push), push.publisher._source, list[int]()
    patch = source.patch
    monkeypatch.setattr(source, "patch", lambda *arguments: versions.append(memory.version) or patch(*arguments))
    announced = push.publish(1, changed(push.bits, 1))
    assert set(versions) == {NO_VERSION} and memory.version == 1
    for found in (2, NO_VERSION):
        memory.version = found
        assert receiver.stage(announced).error.endswith("publish an anchor")
    memory.version = 1
    reads = 0

    class Leaving(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            nonlocal reads
            reads += 1
            memory.version = NO_VERSION
            return super().get(name, default)

    replica = receiver.transaction.replica
    replica.tensors = Leaving(replica.tensors)
    assert receiver.stage(announced).error.endswith("publish an anchor")
    assert reads
    receiver.assert_holds(0, push.bits)


def test_torn_memory_is_found_by_its_hash(push: SmallPush, receiver: Receiver) -> None:
    """Bits that are not those of the version are refused, whatever its number says."""
    announced = push.publish(1, changed(push.bits, 1))
    memory_of(push).bits[0][5] ^= 1
    assert "would have state hash" in receiver.stage(announced).error
    receiver.assert_holds(0, push.bits)


def test_tainted_weights_are_healed_from_memory(push: SmallPush, receiver: Receiver) -> None:
    """The anchor that a tainted engine asks for is read from memory, too."""
    bits = changed(push.bits, 1)
    delta = push.publish(1, bits)
    receiver.transaction.forget_live("they were dropped")
    with pytest.raises(WeightError, match="publish an anchor"):
        receiver.commit(delta)
    anchor = push.anchor(1)
    assert receiver.stage(anchor).mover == Mover.HOST
    receiver.commit(anchor)
    receiver.assert_holds(1, bits)


@pytest.mark.parametrize("seed", quick_only(range(4), [0]))
def test_columns_and_slices_of_several_ranks(tmp_path: Path, seed: int) -> None:
    """Ranks with rows and with columns of a matrix: counts, hash and bits are those of the encoded way."""
    rows, columns = 12, 10
    shards = [
        [ShardSpec("m", "bfloat16", (rows, columns), 0, rows * 4, 4, columns), ShardSpec("v", "float32", (9,), 0, 5)],
        [ShardSpec("m", "bfloat16", (rows, columns), 4, rows * 6, 6, columns), ShardSpec("v", "float32", (9,), 5, 4)],
    ]
    random = np.random.default_rng(seed)
    full: Bits = {
        "m": random.integers(0, 1 << 16, rows * columns).astype("<u2"),
        "v": random.integers(0, 1 << 32, 9, dtype=np.uint64).astype(bit_type("float32", "v")),
    }
    announced: dict[Mover, WeightAnnouncement] = {}
    versions = [full, changed(full, seed, density=0.3)]
    made = []
    for mover in (Mover.HOST, Mover.ENCODED):
        endpoints = [f"ipc://{tmp_path}/{mover}{rank}" for rank in range(2)]
        ranks = [
            WeightPublisher(endpoint, run_id="run", rank=rank, shards=shards[rank], movers=(mover,))
            for rank, endpoint in enumerate(endpoints)
        ]
        for publisher in ranks:
            publisher.start()
        for version, bits in enumerate(versions):
            parts = [
                publisher.publish(version, {shard.name: shard.of(bits[shard.name]) for shard in mine})
                for publisher, mine in zip(ranks, shards, strict=True)
            ]
            announced[mover] = announcement_of(version, parts)
        if mover is Mover.HOST:
            read = [memory_bits(source.memory) for source in announced[mover].sources]
        made += ranks
    assert announced[Mover.HOST].state_hash == announced[Mover.ENCODED].state_hash
    for mine, held in zip(shards, read, strict=True):
        for shard in mine:
            assert np.array_equal(held[shard.name], shard.of(versions[1][shard.name]))
    for publisher in made:
        publisher.close()


def memory_bits(handle: Any) -> Bits:
    memory = TrainerMemory.attach(handle)
    return {
        shard.name: bits for unit, bits in zip(memory.table.units, memory.bits, strict=True) for shard in unit.shards
    }


def test_versions_on_a_gpu_leave_no_open_file(push: SmallPush) -> None:
    """An engine takes a version a step from the same GPU, for weeks: the file of the memory does not stay open."""
    announced = push.publish(0, push.bits)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        taken = device_version(announced, lambda _: torch.zeros(1 << 20, dtype=torch.int16), None)
        assert taken[1].version == 0
        del taken
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_distance_decides(push: SmallPush) -> None:
    """Another host, no memory, or one rank of several that is far: encoded bytes for all."""
    announced = push.publish(0, push.bits)
    (source,) = announced.sources
    there = replace(source, memory=replace(source.memory, host="another"))
    on_gpu = replace(source, memory=replace(source.memory, device="GPU-1"))
    gpu = Location(HERE.host, "GPU-1")
    for sources, engine, expected in (
        ((source,), HERE, Mover.HOST),
        ((source,), Location(""), Mover.ENCODED),
        ((there,), HERE, Mover.ENCODED),
        ((replace(source, memory=None),), HERE, Mover.ENCODED),
        ((source, there), HERE, Mover.ENCODED),
        ((on_gpu,), gpu, Mover.DEVICE),
        ((on_gpu,), HERE, Mover.HOST),
        ((on_gpu, source), gpu, Mover.HOST),
        ((), HERE, Mover.ENCODED),
    ):
        assert mover_of(replace(announced, sources=sources), engine) is expected


RANK = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import msgspec
from streamrl.weights.distance import Mover
from tests.weights.faulty_link import SmallPush, changed, random_bits
push = SmallPush(Path(sys.argv[1]), movers=(Mover.HOST,))
for version, bits in enumerate([random_bits(0), changed(random_bits(0), 1)]):
    Path(sys.argv[1], str(version)).write_bytes(msgspec.msgpack.encode(push.publish(version, bits)))
    print(version, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("opened", [False, True])
def test_a_killed_rank_leaves_one_version_on_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    """A rank that is killed before an engine opens its memory: the engine keeps its version. Afterwards: it gets the
    new one."""
    tests = Path(__file__).parents[2]
    command = [sys.executable, "-c", RANK, str(tmp_path), str(tests.parent), str(tests)]
    bits = random_bits(0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdin is not None and rank.stdout is not None

        def announced(version: int) -> WeightAnnouncement:
            assert rank.stdout.readline() == f"{version}\n"
            return msgspec.msgpack.decode((tmp_path / str(version)).read_bytes(), type=WeightAnnouncement)

        receiver = Receiver(None, location=HERE)  # type: ignore[arg-type]  # another process pushes
        receiver.commit(announced(0))
        rank.stdin.write("\n")
        rank.stdin.flush()
        version = announced(1)
        attach = TrainerMemory.attach

        def attach_then_kill(handle: MemoryHandle) -> TrainerMemory:
            memory = attach(handle)
            rank.kill()
            rank.wait()
            return memory

        if opened:
            monkeypatch.setattr(TrainerMemory, "attach", attach_then_kill)
            receiver.commit(version)
        else:
            rank.kill()
            rank.wait()
            with pytest.raises(WeightError, match="publish an anchor"):
                receiver.commit(version)
        receiver.assert_holds(int(opened), changed(bits, 1) if opened else bits)
