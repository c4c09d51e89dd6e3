"""The training stage over memory streams with a trainer that records what it is asked."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from streamrl.base.errors import StreamBroken, StreamRLError
from streamrl.base.messages import (
    AnchorPublished,
    CheckpointSaved,
    CloseBatch,
    EnginesFreed,
    PublishAnchor,
    SaveCheckpoint,
    StepReport,
    TrainerReady,
    TrainGroup,
    TrainingEvent,
    TrainTogether,
    WeightsAcknowledged,
    WeightSource,
)
from streamrl.base.types import TrainingGroup
from streamrl.comm.memory_stream import memory_stream
from streamrl.stages.training import run_training
from tests.learning.sample_groups import close_of, make_groups

SOURCE = WeightSource(
    rank=0, endpoint="ipc://x", manifest_digest="", payload_bytes=0, changed_elements=0, total_elements=1
)


class RecordingTrainer:
    """Notes calls and threads; ``gate`` holds the training of a group back."""

    def __init__(self, *, error: Exception | None = None, gate: threading.Event | None = None, ranks: int = 1) -> None:
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.entered = threading.Event()
        self.idle_work = False
        self._error, self._gate, self._ranks = error, gate, ranks

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    def start(self) -> TrainerReady:
        self._note("start")
        return TrainerReady(rank=0, ranks=self._ranks, policy_version=0, parameters=1)

    def train_group(self, group: TrainingGroup) -> None:
        self._note(f"group {group.group_id}")
        self.entered.set()
        if self._gate:
            assert self._gate.wait(20)
        if self._error:
            raise self._error
        self.idle_work = True

    def train_pending(self) -> None:
        self._note("pending")
        self.idle_work = False

    def close_batch(self, close: CloseBatch) -> StepReport:
        self._note("close batch")
        self.idle_work = False
        return StepReport(
            rank=0,
            batch_id=close.batch_id,
            policy_version=close.policy_version,
            base_version=None,
            state_hash=0,
            source=SOURCE,
            metrics={},
        )

    def acknowledge(self, policy_version: int) -> None:
        self._note(f"acknowledge {policy_version}")

    def publish_anchor(self, policy_version: int) -> AnchorPublished:
        self._note("anchor")
        return AnchorPublished(rank=0, policy_version=policy_version, state_hash=0, source=SOURCE)

    def save_checkpoint(self, order: SaveCheckpoint) -> CheckpointSaved:
        self._note("checkpoint")
        return CheckpointSaved(rank=0, directory=order.directory, policy_version=order.policy_version, seconds=0.0)

    def engines_freed(self, count: int) -> None:
        self._note(f"freed {count}")

    def close(self) -> None:
        self._note("close")


def streams() -> tuple[Any, Any, Any, Any]:
    orders_in, orders = memory_stream(64)
    reports_in, reports = memory_stream(64)
    return orders_in, orders, reports_in, reports


async def test_every_order_is_carried_out_in_order_in_one_thread() -> None:
    trainer = RecordingTrainer()
    orders_in, orders, reports_in, reports = streams()
    [group] = make_groups(0, [2])
    events: list[TrainingEvent] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_training, trainer, orders, reports_in)
        events.append(await reports.receive())
        for item in (
            PublishAnchor(policy_version=0),
            WeightsAcknowledged(policy_version=0),
            TrainGroup(group=group),
            EnginesFreed(count=1),
            TrainTogether(),
            close_of([group], 1),
            SaveCheckpoint(directory="d", policy_version=1),
        ):
            await orders_in.send(item)
        await orders_in.aclose()
        events += [await reports.receive() for _ in range(3)]
    assert [type(event) for event in events] == [TrainerReady, AnchorPublished, StepReport, CheckpointSaved]
    assert trainer.calls[trainer.calls.index("close batch") - 1] == "pending"
    assert [call for call in trainer.calls if call != "pending"] == [
        "start",
        "anchor",
        "acknowledge 0",
        "group 0",
        "freed 1",
        "close batch",
        "checkpoint",
        "close",
    ]
    assert len(trainer.threads) == 1
    assert threading.get_ident() not in trainer.threads


async def test_pending_work_runs_when_nothing_is_ordered() -> None:
    trainer = RecordingTrainer()
    orders_in, orders, reports_in, reports = streams()
    groups = make_groups(0, [2, 2])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_training, trainer, orders, reports_in)
        await reports.receive()
        await orders_in.send(TrainGroup(group=groups[0]))
        while "pending" not in trainer.calls:
            await anyio.sleep(0.001)
        await orders_in.send(close_of(groups[:1], 1))
        await reports.receive()
        await orders_in.aclose()
    assert trainer.calls == ["start", "group 0", "pending", "close batch", "close"]


async def test_orders_are_read_while_torch_computes() -> None:
    gate = threading.Event()
    trainer = RecordingTrainer(gate=gate)
    orders_in, orders, reports_in, reports = streams()
    groups = make_groups(0, [1] * 200)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_training, trainer, orders, reports_in)
        await reports.receive()
        for group in groups:  # three times the window: a stage that stopped reading would stop us here
            await orders_in.send(TrainGroup(group=group))
        assert len([call for call in trainer.calls if call.startswith("group")]) <= 1
        gate.set()
        await orders_in.send(close_of(groups, 1))
        await reports.receive()
        await orders_in.aclose()
    assert trainer.calls.count("close batch") == 1


async def test_the_trainers_error_is_what_the_caller_sees() -> None:
    trainer = RecordingTrainer(error=StreamRLError("the loss of batch 3 is nan"))
    orders_in, orders, reports_in, _ = streams()
    [group] = make_groups(0, [2])
    await orders_in.send(TrainGroup(group=group))
    with pytest.raises(StreamRLError, match="batch 3 is nan"):
        await run_training(trainer, orders, reports_in)
    assert trainer.calls[-1] == "close"


async def test_a_broken_stream_ends_the_stage_and_closes_the_trainer() -> None:
    trainer = RecordingTrainer()
    _, orders, reports_in, reports = streams()
    await reports.aclose()
    with pytest.raises(StreamBroken):
        await run_training(trainer, orders, reports_in)
    assert trainer.calls == ["start", "close"]


async def test_cancellation_waits_for_torch_and_closes_the_trainer() -> None:
    gate = threading.Event()
    trainer = RecordingTrainer(gate=gate)
    orders_in, orders, reports_in, reports = streams()
    [group] = make_groups(0, [2])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_training, trainer, orders, reports_in)
        await reports.receive()
        await orders_in.send(TrainGroup(group=group))
        await anyio.to_thread.run_sync(trainer.entered.wait)
        tasks.cancel_scope.cancel()
        threading.Timer(0.05, gate.set).start()
    assert trainer.calls == ["start", "group 0", "close"]
