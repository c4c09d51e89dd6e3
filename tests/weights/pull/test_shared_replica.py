"""Workers of one machine: one set of bits, one fetch of each version; workers that come late, die or begin again."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tiers import quick_only

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.pull.replica import CheckpointReplica
from streamrl.weights.pull.shared_replica import SharedReplica, shared_replica
from streamrl.weights.pull.shared_versions import Holder, SharedMemory
from streamrl.weights.requests import MANIFEST, decode_request
from tests.weights.faulty_link import TENSORS, Bits, FaultyLink, SmallPush, changed, random_bits
from tests.weights.pull.test_chain import save_checkpoint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from tests.weights.vllm.test_weight_transaction import Receiver  # noqa: E402


class Machine:
    """Workers that share ``directory``; what they fetch passes a link that counts."""

    def __init__(self, directory: Path, push: SmallPush, link: FaultyLink) -> None:
        self.directory, self.push, self.link = directory, push, link

    def worker(self, checkpoint: Path | None = None, loaded: Bits | None = None) -> Receiver:
        made = Receiver(self.push, checkpoint=checkpoint, replica=SharedReplica(self.directory))
        if loaded is not None:
            made.load(loaded)
        return made

    def chunks_sent(self) -> int:
        sent = sum(decode_request(request).piece != MANIFEST for request in self.link.requests)
        self.link.requests.clear()
        return sent

    def commit(self, announced: WeightAnnouncement, *workers: Receiver) -> None:
        for worker in workers:
            worker.commit(self.link.through(announced))


@pytest.fixture
def push(tmp_path: Path) -> Iterator[SmallPush]:
    made = SmallPush(tmp_path, chain_bytes=0)
    made.bits = random_bits(0)
    yield made
    made.close()


@pytest.fixture
def machine(push: SmallPush, tmp_path: Path) -> Iterator[Machine]:
    with FaultyLink(tmp_path, push.publisher.endpoint, lambda number, frames: [frames]) as link:
        yield Machine(tmp_path / "node", push, link)


def inodes(worker: Receiver) -> set[int]:
    return set(worker.transaction.replica._versions._memories)


def shared_bits(worker: Receiver) -> Bits:
    replica = worker.transaction.replica
    with replica._versions.locked(threading.Event(), 1):
        return {name: replica._shared.bits(name).copy() for name in replica._shared.tensors}


def assert_live(bits: Bits, *workers: Receiver) -> None:
    """Every one of ``workers`` serves with ``bits``."""
    for worker in workers:
        for name, expected in bits.items():
            assert np.array_equal(worker.model.bits(name), expected), name


def test_two_workers_fetch_once_and_share_bits(machine: Machine) -> None:
    """Two workers fetch each version once and hold one set of bits."""
    push, bits = machine.push, machine.push.bits
    first, second = machine.worker(), machine.worker()
    for version in range(5):
        announced = push.publish(version, bits)
        order = (first, second) if version % 2 else (second, first)
        machine.commit(announced, *order)
        push.publisher.acknowledge(version)
        assert machine.chunks_sent() == 1, version
        assert inodes(first) == inodes(second)
        for worker in order:
            held = worker.transaction.live_report()
            assert (held.policy_version, held.state_hash) == (version, announced.state_hash)
            assert_live(bits, worker)
        bits = changed(bits, version)
    announced = push.publish(5, bits)
    assert not first.stage(machine.link.through(announced)).error
    for worker in (first, second):
        assert worker.transaction.replica.at_hand == (worker is first), "the other has not looked yet"
        for name, expected in shared_bits(worker).items():
            assert np.array_equal(expected, first.model.bits(name)), "version 4, now that 5 is announced on it"


def test_late_and_new_workers_take_all_from_memory(machine: Machine) -> None:
    """A worker that was late and one that begins take all versions from memory. No delta from their version is kept by
    the publisher, and no byte is sent for them."""
    push = machine.push
    fast, late = machine.worker(), machine.worker()
    machine.commit(push.publish(0, push.bits), fast, late)
    push.publisher.acknowledge(0)
    bits = push.bits
    for version in (1, 2, 3):
        bits = changed(bits, version)
        announced = push.publish(version, bits)
        machine.commit(announced, fast)
        push.publisher.acknowledge(version)
    machine.chunks_sent()
    begins = machine.worker()
    machine.commit(announced, late, begins)
    assert machine.chunks_sent() == 0
    bits = changed(bits, 4)
    announced = push.publish(4, bits)
    machine.commit(announced, begins, fast, late)
    assert machine.chunks_sent() == 1
    assert_live(bits, fast, late, begins)


def test_a_late_worker_that_fetches_first_does_it_for_all(machine: Machine) -> None:
    """Version 1 is live on the others, and its bits are not written yet; version 2 is announced on it."""
    push = machine.push
    fast, late = machine.worker(), machine.worker()
    machine.commit(push.publish(0, push.bits), fast, late)
    push.publisher.acknowledge(0)
    once, twice = changed(push.bits, 1), changed(changed(push.bits, 1), 2)
    machine.commit(push.publish(1, once), fast)
    push.publisher.acknowledge(1)
    machine.chunks_sent()
    announced = push.publish(2, twice)
    machine.commit(announced, late, fast)
    assert machine.chunks_sent() == 1
    assert_live(twice, fast, late)


def test_a_version_that_nobody_committed_is_no_obstacle(machine: Machine) -> None:
    push = machine.push
    first, second = machine.worker(), machine.worker()
    machine.commit(push.publish(0, push.bits), first, second)
    push.publisher.acknowledge(0)
    given_up = machine.link.through(push.publish(1, changed(push.bits, 1)))
    assert not first.stage(given_up).error
    bits = changed(push.bits, 2)
    announced = push.publish(2, bits)
    assert announced.base_version == 1
    machine.commit(announced, first, second)
    assert_live(bits, first, second)


def test_a_failed_commit_is_undone_though_others_went_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    push = machine.push
    sound, failing = machine.worker(), machine.worker()
    machine.commit(push.publish(0, push.bits), sound, failing)
    push.publisher.acknowledge(0)
    once = changed(push.bits, 1)
    announced = machine.link.through(push.publish(1, once))
    assert not failing.stage(announced).error
    sound.commit(announced)
    push.publisher.acknowledge(1)
    assert not sound.stage(push.publish(2, changed(once, 2))).error, "the shared bits are at version 1 now"
    live = failing.transaction.live

    def fail(write: object) -> None:
        raise WeightError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(live, "_write_and_check", fail)
        with pytest.raises(WeightError, match="planted"):
            failing.transaction.apply(1)
    assert failing.transaction.tainted == ""
    assert_live(push.bits, failing)
    failing.commit(push.anchor(2))
    assert_live(changed(once, 2), failing)


def test_a_restarted_worker_joins_on_the_checkpoint(tmp_path: Path) -> None:
    """Workers begin on one checkpoint, and a restarted one joins."""
    first = random_bits(0)
    path = save_checkpoint(tmp_path / "model", first, TENSORS)
    push = SmallPush(tmp_path, checkpoint=path)
    with FaultyLink(tmp_path, push.publisher.endpoint, lambda number, frames: [frames]) as link:
        machine = Machine(tmp_path / "node", push, link)
        bits = changed(first, 1)
        announced = push.publish(0, bits)
        workers = [machine.worker(path, first), machine.worker(path, first)]
        machine.commit(announced, *workers)
        push.publisher.acknowledge(0)
        assert machine.chunks_sent() == 1
        restarted = machine.worker(path, first)
        bits = changed(bits, 2)
        machine.commit(push.publish(1, bits), restarted, *workers)
        assert machine.chunks_sent() == 1
        assert_live(bits, restarted, *workers)
    push.close()


def test_a_worker_without_the_checkpoint_takes_the_anchor(tmp_path: Path) -> None:
    """A worker that did not load the checkpoint takes the anchor from memory."""
    first = random_bits(0)
    path = save_checkpoint(tmp_path / "model", first, TENSORS)
    push = SmallPush(tmp_path, checkpoint=path)
    with FaultyLink(tmp_path, push.publisher.endpoint, lambda number, frames: [frames]) as link:
        machine = Machine(tmp_path / "node", push, link)
        bits = changed(first, 1)
        announced = push.publish(0, bits)
        sound = machine.worker(path, first)
        wrong = machine.worker(path, {**first, "norm": first["norm"] ^ 1})
        other = machine.worker(None, changed(first, 9))
        machine.commit(announced, sound)
        machine.chunks_sent()
        with pytest.raises(WeightError, match="not those of the checkpoint"):
            machine.commit(announced, wrong)
        machine.commit(announced, wrong, other)
        assert machine.chunks_sent() == 0
        assert_live(bits, sound, wrong, other)
    push.close()


# ---- processes that die ----------------------------------------------------------------------------

_WORKER = """
import os, signal, sys, threading
from pathlib import Path
import msgspec
from streamrl.weights.pull.fetch import fetch_version
from streamrl.weights.pull.replica import CheckpointReplica
from streamrl.weights.pull.shared_replica import SharedReplica, shared_replica
from streamrl.base.messages import WeightAnnouncement

point, directory, *paths = sys.argv[1:]
replica = SharedReplica(Path(directory))
for number, path in enumerate(paths):
    last = number == len(paths) - 1
    announced = msgspec.msgpack.decode(Path(path).read_bytes(), type=WeightAnnouncement)

    def fetch(held):
        if last and point == "fetching":
            os.kill(os.getpid(), signal.SIGKILL)
        return fetch_version(announced, held=held)

    if last and point == "writing":
        real = replica._versions.keep
        def keep(state):
            real(state)
            if state.writing:
                half = replica._versions.view(state.staged).patches["layer"].positions[::2]
                replica._shared.bits("layer")[half] ^= 5
                os.kill(os.getpid(), signal.SIGKILL)
        replica._versions.keep = keep
    with replica.staging(announced, threading.Event()):
        staged = replica.stage_announced(announced, fetch, on_checkpoint=False)
    replica.advance(staged)
sys.stdout.write("done\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("point", quick_only(["fetching", "writing", "afterwards"], ["writing"]))
def test_a_killed_worker_delays_nobody_and_leaves_no_memory(
    machine: Machine, tmp_path: Path, point: str, late: bool
) -> None:
    """A worker that is killed delays nobody and leaves no memory. ``late``: the survivor has only staged version 1,
    which the other one is writing when it dies."""
    push = machine.push
    paths = []

    def saved(announced: WeightAnnouncement) -> WeightAnnouncement:
        paths.append(str(tmp_path / f"{announced.policy_version}"))
        Path(paths[-1]).write_bytes(msgspec.msgpack.encode(announced))
        return announced

    survivor, bits = machine.worker(), push.bits
    versions, announced = [bits], []
    for version in range(3):
        announced.append(saved(push.publish(version, bits)))
        if late and version == 1:
            assert not survivor.stage(announced[1]).error
        elif version < 2:
            survivor.commit(announced[version])
        if version < 2:
            push.publisher.acknowledge(version)
            versions.append(bits := changed(bits, version))
    script = [sys.executable, "-c", _WORKER, point, str(machine.directory), *paths[1:]]
    dying = subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        if point == "afterwards":
            assert dying.stdout is not None
            assert dying.stdout.readline() == "done\n"
            dying.kill()
        assert dying.wait(60) == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            dying.kill()
        dying.communicate()
    if late:
        survivor.commit(announced[1])
        assert_live(versions[1], survivor)
    survivor.commit(announced[2])
    push.publisher.acknowledge(2)
    bits = changed(bits, 7)
    survivor.commit(push.publish(3, bits))
    assert_live(bits, survivor)
    survivor.stage(push.publish(4, bits))
    for name, expected in bits.items():
        assert np.array_equal(survivor.transaction.replica.bits(name), expected)


def test_memory_whose_holders_are_gone_is_begun_anew(machine: Machine) -> None:
    push = machine.push
    alone = machine.worker()
    machine.commit(push.publish(0, push.bits), alone)
    push.publisher.acknowledge(0)
    state = alone.transaction.replica._versions.state
    nobody = (Holder(2**22 + 1, 3),)
    gone = {
        kind: version
        and msgspec.structs.replace(version, memory=msgspec.structs.replace(version.memory, holders=nobody))
        for kind, version in (("bits", state.bits), ("staged", state.staged))
    }
    (machine.directory / "state").write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(state, **gone)))
    begins = machine.worker()
    machine.commit(push.publish(1, push.bits), begins)
    assert_live(push.bits, begins)


@pytest.mark.long
def test_the_last_worker_removes_the_directory(machine: Machine) -> None:
    """The last worker removes the directory, and no descriptor is left."""

    def held() -> int:
        opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return sum("streamrl-weights" in path or str(machine.directory) in path for path in opened)

    gc.collect()  # workers of other tests
    before = held()
    first, second = machine.worker(), machine.worker()
    machine.commit(machine.push.publish(0, machine.push.bits), first, second)
    assert held() > before
    first.transaction.replica.close()
    first.transaction.replica.close()
    second.transaction.replica.close()
    assert not machine.directory.exists()
    del first, second
    gc.collect()
    assert held() <= before


def test_a_reused_descriptor_is_not_taken_for_the_memory() -> None:
    """A descriptor that was used again is not taken for the memory."""
    memory, other = SharedMemory.create(100), SharedMemory.create(100)
    segment = memory.held_with()
    swapped = msgspec.structs.replace(segment, holders=(Holder(os.getpid(), other.descriptor),))
    assert SharedMemory.attach(swapped) is None
    again = SharedMemory.attach(segment)
    assert again is not None
    again.bits(np.dtype("<u2"), 64, 3)[:] = 7
    assert memory.bits(np.dtype("<u2"), 64, 3).tolist() == [7, 7, 7]
    for opened in (memory, other, again):
        opened.close()


def test_while_one_fetches_the_others_wait_or_are_told_to_stop(machine: Machine) -> None:
    push = machine.push
    first, second = machine.worker(), machine.worker()
    announced = push.publish(0, push.bits)
    fetching, go_on, stop = threading.Event(), threading.Event(), threading.Event()
    replicas = [worker.transaction.replica for worker in (first, second)]
    entered: list[int] = []

    def stage(index: int) -> None:
        with replicas[index].staging(announced, stop if index else threading.Event()):
            entered.append(index)
            if not index:
                fetching.set()
                assert go_on.wait(10)

    threads = [threading.Thread(target=stage, args=(0,))]
    threads[0].start()
    assert fetching.wait(10)
    stop.set()
    with pytest.raises(WeightError, match="waiting for another worker's fetch was stopped"):
        stage(1)
    with pytest.raises(WeightError, match="kept the replica"), replicas[0]._versions.locked(threading.Event(), 0.01):
        pass
    assert entered == [0], "not even another thread of the same worker"
    go_on.set()
    threads[0].join()
    stop.clear()
    stage(1)
    assert entered == [0, 1]


@pytest.mark.parametrize("lacks", ["memory without a name", "a directory for its state"])
def test_a_worker_that_cannot_share_keeps_its_own(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where memory cannot be shared, a worker has a replica of its own, and says why."""
    parent = tmp_path
    if lacks == "memory without a name":
        monkeypatch.delattr(os, "memfd_create")
    else:
        parent = tmp_path / "file"
        parent.write_text("")
    assert type(shared_replica("run", "model", parent)) is CheckpointReplica
    assert "a replica of its own, since memory cannot be shared: " in caplog.text
