"""A commit that dies anywhere leaves a worker that holds its version bit for bit, or one that takes anchors only."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.pull.replica import StagedPatch
from streamrl.weights.vllm.weight_transaction import LiveModel, StageReport, WeightTransaction
from tests.weights.faulty_link import TENSORS, Bits, SmallPush, changed, random_bits
from tests.weights.pull.test_chain import save_checkpoint
from tests.weights.vllm.receiver_process import POINTS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from streamrl.weights.vllm.live_weights import LiveWeights, count_routes  # noqa: E402
from streamrl.weights.vllm.load_plan import record_load_plan  # noqa: E402

ROUTES = 3


class PlainModel(torch.nn.Module):  # type: ignore[misc]
    """Loads every tensor with a plain copy."""

    def __init__(self) -> None:
        super().__init__()
        for name, (dtype, shape) in TENSORS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)

    def bits(self, name: str) -> np.ndarray:
        parameter = self.get_parameter(name).detach()
        width = torch.int16 if parameter.element_size() == 2 else torch.int32
        return parameter.view(width).numpy().reshape(-1).view(f"<u{parameter.element_size()}")


class Receiver:
    """A transaction on a small torch model, fed by a real publisher."""

    def __init__(self, push: SmallPush, audit_interval: int = 50, **options: Any) -> None:
        self.push = push
        self.model = PlainModel()
        self.repacked: Callable[[], None] = lambda: None
        self.transaction = WeightTransaction(
            lambda live, writes: self.repacked(), audit_interval=audit_interval, **options
        )

    def stage(self, announced: WeightAnnouncement) -> StageReport:
        self.transaction.begin_stage(announced)
        return self.transaction.finish_stage(self._record)

    def commit(self, announced: WeightAnnouncement) -> None:
        report = self.stage(announced)
        if report.error:
            raise WeightError(report.error)
        self.transaction.apply(announced.policy_version)
        applied = self.transaction.live_report()
        assert (applied.policy_version, applied.state_hash) == (announced.policy_version, announced.state_hash)
        self.transaction.finish()

    def assert_holds(self, version: int, bits: Bits) -> None:
        held = self.transaction.live_report()
        assert (held.policy_version, self.transaction.tainted) == (version, "")
        for name, expected in bits.items():
            assert np.array_equal(self.model.bits(name), expected), name
            assert np.array_equal(self.transaction.replica.bits(name), expected), name

    def load(self, bits: Bits) -> None:
        """As vLLM did before anything was pushed."""
        for name, loaded in bits.items():
            self.model.bits(name)[:] = loaded

    def _record(self, tensors: object) -> LiveModel:
        plan = record_load_plan(self.model, tensors)
        rectangles = {name: [route.checkpoint for route in routes] for name, routes in plan.routes.items()}
        return LiveWeights(plan, count_routes([rectangles], 0, tensors))


@pytest.fixture
def push(tmp_path: Path) -> Iterator[SmallPush]:
    made = SmallPush(tmp_path)
    yield made
    made.close()


@pytest.fixture
def receiver(push: SmallPush) -> Receiver:
    """At version 0."""
    made = Receiver(push)
    made.commit(push.publish(0, push.bits))
    push.publisher.acknowledge(0)
    made.assert_holds(0, push.bits)
    return made


class Crash(Exception):
    """Planted."""


class CrashAt:
    """Stands for a method and raises at its ``number``-th call, counted from 0, before or after it did its work."""

    def __init__(self, method: Callable[..., object], number: int, *, after: bool = False) -> None:
        self.method, self.number, self.after, self.calls = method, number, after, 0

    def __call__(self, *arguments: object, **options: object) -> object:
        now, self.calls = self.calls, self.calls + 1
        if now == self.number and not self.after:
            raise Crash
        result = self.method(*arguments, **options)
        if now == self.number:
            raise Crash
        return result


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(ROUTES))
def test_a_crash_at_any_write_is_undone(
    push: SmallPush, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, number: int, after: bool
) -> None:
    """A crash at any write is undone, and the delta can be committed again."""
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    with monkeypatch.context() as planted:
        crash = CrashAt(receiver.transaction.live._write_and_check, number, after=after)
        planted.setattr(receiver.transaction.live, "_write_and_check", crash)
        with pytest.raises(Crash):
            receiver.commit(announced)
        assert crash.calls == number + 1
    receiver.assert_holds(0, push.bits)
    assert receiver.transaction.live_report().error == "Crash: "
    receiver.commit(announced)
    receiver.assert_holds(1, new)


def test_a_crash_after_the_last_write_is_undone_too(push: SmallPush, receiver: Receiver) -> None:
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    receiver.repacked = CrashAt(lambda: None, 0)
    with pytest.raises(Crash):
        receiver.commit(announced)
    receiver.assert_holds(0, push.bits)
    receiver.commit(announced)
    receiver.assert_holds(1, new)


def assert_only_an_anchor_helps(push: SmallPush, receiver: Receiver, announced: WeightAnnouncement, new: Bits) -> None:
    """And after it deltas are taken again."""
    assert receiver.transaction.tainted
    for refused in (announced, push.publish(2, changed(new, 2))):
        with pytest.raises(WeightError, match=r"not what it should hold \(version 1 .*publish an anchor"):
            receiver.commit(refused)
    receiver.commit(push.anchor(2))
    receiver.assert_holds(2, changed(new, 2))
    push.publisher.acknowledge(2)
    receiver.commit(push.publish(3, changed(new, 3)))
    receiver.assert_holds(3, changed(new, 3))


@pytest.mark.parametrize("number", range(ROUTES))
def test_a_crash_of_the_undoing_taints_and_an_anchor_heals(
    push: SmallPush, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    with monkeypatch.context() as planted:
        planted.setattr(receiver.transaction.live, "_write_and_check", CrashAt(lambda write: None, ROUTES - 1))
        planted.setattr(receiver.transaction.live, "_write", CrashAt(receiver.transaction.live._write, number))
        with pytest.raises(Crash):
            receiver.commit(announced)
    assert_only_an_anchor_helps(push, receiver, announced, new)


@pytest.mark.parametrize("number", range(3))
def test_a_replica_catches_up_with_the_next_version(push: SmallPush, receiver: Receiver, number: int) -> None:
    """A replica that fails to catch up does so with the next version."""
    once, twice = changed(push.bits, 1), changed(changed(push.bits, 1), 2)
    receiver.commit(push.publish(1, once))
    push.publisher.acknowledge(1)
    announced = push.publish(2, twice)
    replica = receiver.transaction.replica

    class CrashingOnce(dict[str, StagedPatch]):
        left = 1

        def items(self) -> Any:
            for index, item in enumerate(super().items()):
                if index == number and self.left:
                    self.left = 0
                    raise Crash
                yield item

    replica._behind = CrashingOnce(replica._behind)
    assert len(replica._behind) > number
    assert receiver.stage(announced).error == "Crash: "
    receiver.transaction.roll_back()
    receiver.commit(announced)
    receiver.assert_holds(2, twice)


def test_a_commit_that_failed_on_another_worker_is_rolled_back(push: SmallPush, receiver: Receiver) -> None:
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    assert not receiver.stage(announced).error
    receiver.transaction.apply(1)
    receiver.transaction.roll_back()
    receiver.transaction.roll_back()
    receiver.assert_holds(0, push.bits)
    assert not receiver.stage(announced).error
    receiver.transaction.apply(1)
    assert not receiver.stage(announced).error, "staging again gives up what was applied and not committed"
    receiver.assert_holds(0, push.bits)
    receiver.transaction.apply(1)
    receiver.transaction.finish()
    receiver.assert_holds(1, new)


def test_a_replay_costs_nothing_and_changes_nothing(push: SmallPush, receiver: Receiver) -> None:
    new = changed(push.bits, 1)
    announced = push.publish(1, new)
    receiver.commit(announced)
    push.close()
    assert receiver.stage(announced) == StageReport(fetched=True, payload_bytes=0), "no byte was fetched: nobody serves"
    receiver.transaction.apply(1)
    assert receiver.transaction.live_report().state_hash == announced.state_hash
    receiver.transaction.finish()
    receiver.assert_holds(1, new)


def test_weights_that_a_sleep_dropped_are_no_version(push: SmallPush, receiver: Receiver) -> None:
    """Neither the version that was live, nor a delta that changes nothing, is taken for what is there."""
    once = changed(push.bits, 1)
    held = push.publish(1, once)
    receiver.commit(held)
    push.publisher.acknowledge(1)
    receiver.transaction.forget_live("they were dropped")
    for parameter in receiver.model.parameters():
        parameter.data.zero_()
    for refused in (held, push.publish(2, once)):
        with pytest.raises(WeightError, match=r"they were dropped\): publish an anchor"):
            receiver.commit(refused)
    receiver.commit(push.anchor(2))
    receiver.assert_holds(2, once)


def test_newer_versions_do_not_wait_for_earlier_staging(
    push: SmallPush, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version does not wait in the engine for the staging before."""
    announced, replica, reading = (
        push.publish(1, changed(push.bits, 1)),
        receiver.transaction.replica,
        threading.Event(),
    )
    entered, stage = threading.Event(), replica.stage_announced

    def slow(*arguments: Any, **options: Any) -> Any:
        entered.set()
        assert reading.wait(10)
        return stage(*arguments, **options)

    monkeypatch.setattr(replica, "stage_announced", slow)
    receiver.transaction.begin_stage(announced)
    assert entered.wait(10)
    receiver.transaction.begin_stage(announced)  # it would wait here
    assert receiver.transaction.stage_report() == StageReport(fetched=False)
    reading.set()
    receiver.commit(announced)
    receiver.assert_holds(1, changed(push.bits, 1))


def test_a_delta_of_another_run_is_refused(push: SmallPush, receiver: Receiver, tmp_path: Path) -> None:
    """Same version, same bits, another run."""
    other = SmallPush(tmp_path, run_id="other")
    try:
        other.publish(0, push.bits)
        other.publisher.acknowledge(0)
        new = changed(push.bits, 1)
        delta = other.publish(1, new)
        with pytest.raises(WeightError, match=r"is a delta of run 'other'.*of run 'run': publish an anchor"):
            receiver.commit(delta)
        receiver.assert_holds(0, push.bits)
        receiver.commit(other.anchor(1))
        receiver.assert_holds(1, new)
    finally:
        other.close()


def test_an_audit_finds_a_foreign_write_that_no_delta_touches(push: SmallPush) -> None:
    receiver = Receiver(push, audit_interval=2)
    receiver.commit(push.publish(0, push.bits))
    push.publisher.acknowledge(0)
    bits = {**push.bits, "layer": push.bits["layer"] ^ (np.arange(3000) == 7).astype(np.uint16)}
    receiver.commit(push.publish(1, bits))
    push.publisher.acknowledge(1)
    receiver.model.norm.data.view(torch.int16)[3] ^= 1
    announced = push.publish(2, {**bits, "head": bits["head"] ^ 1})
    with pytest.raises(WeightError, match=r"'norm'.*in an audit"):
        receiver.commit(announced)
    with pytest.raises(WeightError, match="publish an anchor"):
        receiver.commit(announced)
    receiver.commit(push.anchor(2))
    receiver.assert_holds(2, {**bits, "head": bits["head"] ^ 1})


OnCheckpoint = tuple[Bits, Path, SmallPush]


@pytest.fixture
def on_checkpoint(tmp_path: Path) -> Iterator[OnCheckpoint]:
    """Bits, the checkpoint that holds them, and a push whose first delta is made on it."""
    first = random_bits(0)
    path = save_checkpoint(tmp_path / "model", first, TENSORS)
    push = SmallPush(tmp_path, checkpoint=path)
    yield first, path, push
    push.close()


def test_a_restarted_worker_takes_deltas_on_its_checkpoint(on_checkpoint: OnCheckpoint) -> None:
    """A restarted worker takes all deltas on the checkpoint that it has loaded."""
    first, path, push = on_checkpoint
    push.bits = first
    push.publish(0, first)
    new = changed(first, 1)
    announced = push.publish(1, new)
    restarted = Receiver(push, checkpoint=path)
    restarted.load(first)
    report = restarted.stage(announced)
    assert not report.error
    assert report.payload_bytes < sum(b.nbytes for b in first.values()) / 2
    assert restarted.transaction.live_report().policy_version is None, "it has committed nothing yet"
    restarted.commit(announced)
    restarted.assert_holds(1, new)
    push.publisher.acknowledge(1)
    restarted.commit(push.publish(2, changed(new, 2)))
    restarted.assert_holds(2, changed(new, 2))


def test_a_worker_on_another_checkpoint_needs_an_anchor(on_checkpoint: OnCheckpoint) -> None:
    """A worker that did not load the checkpoint that it names needs an anchor."""
    first, path, push = on_checkpoint
    delta = push.publish(0, first)
    wrong = Receiver(push, checkpoint=path)
    wrong.load({**first, "norm": first["norm"] ^ (np.arange(40) == 7).astype(np.uint16)})
    with pytest.raises(WeightError, match=r"not those of the checkpoint .*'norm'.*in an audit.*publish an anchor"):
        wrong.commit(delta)
    assert wrong.transaction.live_report().policy_version is None
    wrong.commit(push.anchor(0))
    wrong.assert_holds(0, first)


def test_a_crash_before_the_first_version_leaves_what_was_loaded(
    on_checkpoint: OnCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, path, push = on_checkpoint
    push.publish(0, first)
    push.publisher.acknowledge(0)
    delta = push.publish(1, changed(first, 1))
    receiver = Receiver(push, checkpoint=path)
    receiver.load(first)
    assert not receiver.stage(delta).error
    with monkeypatch.context() as planted:
        planted.setattr(
            receiver.transaction.live, "_write_and_check", CrashAt(receiver.transaction.live._write_and_check, 1)
        )
        with pytest.raises(Crash):
            receiver.transaction.apply(1)
    for name, loaded in first.items():
        assert np.array_equal(receiver.model.bits(name), loaded)
    receiver.commit(delta)
    receiver.assert_holds(1, changed(first, 1))


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_receiver_comes_back_by_an_anchor(push: SmallPush, tmp_path: Path, point: str) -> None:
    """A receiver that is killed disturbs nobody, and comes back by an anchor."""

    def saved(announced: WeightAnnouncement) -> str:
        path = tmp_path / f"{announced.policy_version}-{announced.base_version}"
        path.write_bytes(msgspec.msgpack.encode(announced))
        return str(path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        script = str(Path(__file__).with_name("receiver_process.py"))
        return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=900)

    push.commit(push.publish(0, push.bits))
    base, new = push.anchor(0), changed(push.bits, 1)
    delta = push.publish(2, new)
    killed = run(point, saved(base), saved(delta))
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    push.commit(delta)
    push.assert_holds(2, new)
    back = run("never", saved(push.publish(3, changed(new, 3))), saved(push.anchor(3)))
    lines = back.stdout.splitlines()
    assert "publish an anchor" in lines[0], back.stdout + back.stderr
    assert lines[1] == f"holds 3 {push.anchor(3).state_hash} "
