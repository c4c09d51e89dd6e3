"""Publisher, fetch client and replica together, over ipc and tcp: what was published is what arrives, or an error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from builders.weights import changed
from tiers import quick_only

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement, WeightSource, announcement_of
from streamrl.weights import manifest
from streamrl.weights.codec.bits import bit_type
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish import publisher as publisher_module
from streamrl.weights.publish.chain import MAXIMUM_LINKS, UNACKNOWLEDGED_LINKS
from streamrl.weights.publish.publisher import Published, WeightPublisher
from streamrl.weights.pull.fetch import fetch_version
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion

Bits = dict[str, np.ndarray]

TENSORS = {  # name: dtype and shape; the last two are larger than a chunk
    "norm": ("bfloat16", (7,)),
    "scalar": ("float32", ()),
    "half": ("float16", (3, 5)),
    "embed": ("bfloat16", (900, 1000)),
    "head": ("float32", (501, 1000)),
}


def random_bits(seed: int) -> Bits:
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 2**32, int(np.prod(shape)), dtype=np.uint64).astype(bit_type(dtype, name))
        for name, (dtype, shape) in TENSORS.items()
    }


def shards_of(rank: int, ranks: int) -> list[ShardSpec]:
    """Contiguous parts as FSDP cuts them: uneven, and empty where a tensor has fewer elements than ranks."""
    shards = []
    for name, (dtype, shape) in TENSORS.items():
        total = int(np.prod(shape))
        rows = -(-total // ranks)
        start, stop = min(rank * rows, total), min((rank + 1) * rows, total)
        shards.append(ShardSpec(name, dtype, shape, start, stop - start))
    return shards


class Ranks:
    """The publishers of several ranks and one engine's replica."""

    def __init__(self, endpoint: Callable[[], str], ranks: int, **options: Any) -> None:
        self.publishers = [
            WeightPublisher(endpoint(), run_id="run", rank=rank, shards=shards_of(rank, ranks), **options)
            for rank in range(ranks)
        ]
        for publisher in self.publishers:
            publisher.start()
        self.replica = CheckpointReplica()

    def publish(self, version: int, bits: Bits) -> WeightAnnouncement:
        parts = []
        for rank, publisher in enumerate(self.publishers):
            mine = shards_of(rank, len(self.publishers))
            parts.append(
                publisher.publish(version, {s.name: bits[s.name][s.offset : s.offset + s.count] for s in mine})
            )
        return announcement_of(version, parts)

    def publish_anchor(self, version: int) -> WeightAnnouncement:
        return announcement_of(version, [publisher.publish_anchor(version) for publisher in self.publishers])

    def commit(self, announcement: WeightAnnouncement, *, acknowledge: bool = True) -> FetchedVersion:
        fetched = fetch_version(announcement, held=self.replica, progress_seconds=5.0)
        self.replica.advance(self.replica.stage(fetched))
        if acknowledge:
            for publisher in self.publishers:
                publisher.acknowledge(announcement.policy_version)
        return fetched

    def assert_holds(self, version: int, bits: Bits) -> None:
        assert self.replica.policy_version == version
        for name, expected in bits.items():
            assert np.array_equal(self.replica.bits(name), expected), name


@pytest.fixture(params=["ipc", "tcp", "store"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    if request.param == "store":
        pytest.importorskip("obstore")
    places = {"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{tmp_path}/%d", "store": f"file://{tmp_path}/%d"}
    count = iter(range(100))
    return lambda: places[request.param].replace("%d", str(next(count)))


@pytest.fixture
def make_ranks(endpoint: Callable[[], str]) -> Iterator[Callable[..., Ranks]]:
    with ExitStack() as stack:

        def make(ranks: int, **options: Any) -> Ranks:
            made = Ranks(endpoint, ranks, **options)
            for publisher in made.publishers:
                stack.callback(publisher.close)
            return made

        yield make


@pytest.mark.parametrize("ranks", quick_only([1, 2, 3], [2]))
def test_anchor_then_deltas_arrive_bit_for_bit(make_ranks: Callable[[int], Ranks], ranks: int) -> None:
    run, bits = make_ranks(ranks), random_bits(0)
    anchor = run.publish(0, bits)
    assert anchor.base_version is None
    assert sum(source.total_elements for source in anchor.sources) == sum(b.size for b in bits.values())
    run.commit(anchor)
    run.assert_holds(0, bits)
    for version in range(1, 5):
        bits = changed(bits, version, density=[0, 0.01, 0.0, 0.3, 1.0][version])
        announcement = run.publish(version, bits)
        assert announcement.base_version == version - 1
        run.commit(announcement)
        run.assert_holds(version, bits)
        assert run.replica.state_hash == announcement.state_hash


def test_a_delta_of_other_weights_is_refused(make_ranks: Callable[[int], Ranks]) -> None:
    """A delta for other weights of the same version is refused."""
    run, other = make_ranks(1), make_ranks(1)
    bits = random_bits(0)
    run.commit(run.publish(0, bits))
    other.commit(other.publish(0, changed(bits, 9)))
    delta = other.publish(1, changed(bits, 1))
    with pytest.raises(WeightError, match="it is made on version 0 with state hash"):
        run.commit(delta)
    run.assert_holds(0, bits)


def test_a_wrong_announced_hash_is_refused(make_ranks: Callable[[int], Ranks]) -> None:
    run = make_ranks(2)
    right = run.publish(0, random_bits(0))
    wrong = announcement_of(0, run_parts(right, state_hash=right.state_hash ^ 1))
    with pytest.raises(WeightError, match=r"add up to state hash 0x[0-9a-f]{16}; announced was 0x[0-9a-f]{16}"):
        fetch_version(wrong)
    missing = announcement_of(0, run_parts(right, state_hash=right.state_hash)[:1])
    with pytest.raises(WeightError, match="add up to state hash"):
        fetch_version(missing)


def run_parts(announcement: WeightAnnouncement, state_hash: int) -> list[Published]:
    first, *rest = announcement.sources
    return [Published(first, announcement.base_version, state_hash), *(Published(s, None, 0) for s in rest)]


def test_versions_only_grow_and_are_known_when_acknowledged(make_ranks: Callable[[int], Ranks]) -> None:
    publisher, bits = make_ranks(1).publishers[0], random_bits(0)
    publisher.publish(3, bits)
    with pytest.raises(WeightError, match="version 3 cannot be published: 3 was"):
        publisher.publish(3, bits)
    with pytest.raises(WeightError, match="version 4 was acknowledged; the newest is 3"):
        publisher.acknowledge(4)
    with pytest.raises(WeightError, match="version 2 cannot be anchored: the newest is 3"):
        publisher.publish_anchor(2)
    publisher.acknowledge(3)
    publisher.acknowledge(3)
    with pytest.raises(WeightError, match="differ from the shards of rank 0: norm"):
        publisher.publish(4, {name: b for name, b in bits.items() if name != "norm"})


def test_what_is_published_may_be_changed_afterwards(make_ranks: Callable[[int], Ranks]) -> None:
    """The trainer's buffers are reused by the next step."""
    run, bits = make_ranks(1), random_bits(0)
    kept = {name: b.copy() for name, b in bits.items()}
    anchor = run.publish(0, bits)
    for b in bits.values():
        b[:] = 0
    run.commit(anchor)
    run.assert_holds(0, kept)
    delta = run.publish(1, bits)
    for b in bits.values():
        b[:] = 1
    run.commit(delta)
    run.assert_holds(1, {name: np.zeros_like(b) for name, b in bits.items()})


def test_large_shards_are_published_in_pieces_by_several_threads(
    endpoint: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits arrive, and the same state hash, as in one piece; pieces without a change are not sent."""
    monkeypatch.setattr(manifest, "UNIT_ELEMENTS", 70_001)
    monkeypatch.setattr(publisher_module, "_ELEMENTS_WORTH_THREADS", 1)
    bits = random_bits(0)
    replica = CheckpointReplica()
    with publisher_of(endpoint(), threads=3) as publisher:
        anchor = announcement_of(0, [publisher.publish(0, bits)])
        fetched = fetch_version(anchor)
        assert len(fetched.patches) == 3 + 13 + 8
        replica.advance(replica.stage(fetched))
        publisher.acknowledge(0)
        next_bits = {name: b.copy() for name, b in bits.items()}
        next_bits["embed"][[0, 70_001, 70_002, 899_999]] ^= 1
        next_bits["head"][-3:] ^= 7
        delta = announcement_of(1, [publisher.publish(1, next_bits)])
        assert delta.sources[0].changed_elements == 7
        fetched = fetch_version(delta, held=replica)
        assert [(p.shard.name, p.shard.offset) for p in fetched.patches] == [
            ("embed", 0),
            ("embed", 69_994),
            ("embed", 840_005),
            ("head", 490_006),
        ]
        replica.advance(replica.stage(fetched))
    for name, expected in next_bits.items():
        assert np.array_equal(replica.bits(name), expected), name


@contextmanager
def publisher_of(endpoint: str, threads: int) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(endpoint, run_id="run", rank=0, shards=shards_of(0, 1), threads=threads)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


@pytest.mark.long
def test_what_is_served_is_bounded(make_ranks: Callable[..., Ranks]) -> None:
    """Newest links stay while no engine has them, however many bytes they take; others go, the oldest first, beyond
    their bytes and their number; complete versions when a newer one is acknowledged."""
    run, bits = make_ranks(1, chain_bytes=1), random_bits(0)
    run.commit(run.publish(0, bits))
    (publisher,) = run.publishers
    first = run.publish(1, changed(bits, 1))
    for version in range(2, 3 + UNACKNOWLEDGED_LINKS):
        newest = run.publish(version, changed(bits, version))
    assert [part.policy_version for part in publisher._chain] == [*range(3, 3 + UNACKNOWLEDGED_LINKS), 0]
    with pytest.raises(WeightError, match="not served"):
        fetch_version(first)
    with pytest.raises(WeightError, match=r"no chain of deltas leads from there .*not served"):
        run.commit(newest)
    run.commit(run.publish_anchor(newest.policy_version))
    assert [part.policy_version for part in publisher._chain] == [newest.policy_version] * 2
    publisher._chain._budget_bytes = 1 << 30
    for version in range(10, 20 + MAXIMUM_LINKS):
        run.publish(version, bits)
        publisher.acknowledge(version)
    assert len([*publisher._chain]) == MAXIMUM_LINKS


def test_a_silent_source_is_named(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    silent.bind(f"ipc://{tmp_path}/silent")
    source = WeightSource(
        rank=5,
        endpoint=f"ipc://{tmp_path}/silent",
        manifest_digest="ab",
        payload_bytes=1,
        changed_elements=1,
        total_elements=1,
    )
    announcement = announcement_of(3, [Published(source, None, 0)])
    try:
        with pytest.raises(WeightError, match=r"nothing arrived from ipc://.*rank 5.*manifest is missing"):
            fetch_version(announcement, progress_seconds=0.3)
        stop = threading.Event()
        stop.set()
        with pytest.raises(WeightError, match="was stopped"):
            fetch_version(announcement, stop=stop)
    finally:
        context.destroy(linger=0)


def test_an_endpoint_in_use_is_named(tmp_path: Path) -> None:
    first = WeightPublisher(f"ipc://{tmp_path}/w", run_id="run", rank=0, shards=shards_of(0, 1))
    second = WeightPublisher(f"ipc://{tmp_path}/w", run_id="run", rank=1, shards=shards_of(0, 1))
    first.start()
    try:
        with pytest.raises(WeightError, match=r"cannot be served at ipc://.*another process"):
            second.start()
    finally:
        first.close()
        second.close()
        first.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("endpoint", ["ipc", "tcp"], indirect=True)
def test_rubbish_does_not_stop_the_publisher(make_ranks: Callable[[int], Ranks]) -> None:
    run = make_ranks(1)
    announcement = run.publish(0, random_bits(0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(run.publishers[0].endpoint)
    try:
        for frames in ([b"\xff\xff"], [b"", b"a", b"b"], [b""]):
            peer.send_multipart(frames)
            assert peer.poll(300_000)
            peer.recv_multipart()
    finally:
        context.destroy(linger=0)
    run.commit(announcement)
    run.assert_holds(0, random_bits(0))


def test_shards_must_cover_each_tensor_once(make_ranks: Callable[[int], Ranks]) -> None:
    spec = ShardSpec("t", "bfloat16", (10,), 5, 6)
    with pytest.raises(WeightError, match=r"\[5, 11\) of 't' leaves its 10"):
        WeightPublisher("ipc:///tmp/unused", run_id="run", rank=0, shards=[spec])
    run = make_ranks(3)
    whole = run.publish(0, random_bits(0))
    without_the_last = announcement_of(0, [Published(s, None, 0) for s in whole.sources[:2]])
    parts = [run.publishers[r]._part_hash for r in range(2)]
    honest_hash = announcement_of(
        0, [Published(s, None, h) for s, h in zip(without_the_last.sources, parts, strict=True)]
    )
    with pytest.raises(WeightError, match="a rank is missing"):
        run.replica.stage(fetch_version(honest_hash))


SERVES = """
import os, sys, time
from test_weight_publisher import Ranks, random_bits
run = Ranks(lambda: sys.argv[1], 1)
threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
run.commit(run.publish(0, random_bits(0)))
deadline = time.monotonic() + 250  # one that was joined is listed a moment longer
while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < deadline:
    time.sleep(0.01)
assert len(os.listdir("/proc/self/task")) == threads, "a thread more since a large part was served"
assert len(os.listdir("/proc/self/fd")) == files, "a file more since a large part was served"
"""


def test_serving_a_large_part_does_not_grow_the_process(tmp_path: Path) -> None:
    """A process does not grow with the first large part that it serves. In a process of its own: pyzmq's thread for
    frames that are not copied is made once."""
    script = [sys.executable, "-c", SERVES, f"ipc://{tmp_path}/weights"]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(script, check=True, cwd=Path(__file__).parent, env=variables, timeout=900)
