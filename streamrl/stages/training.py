"""The training stage: orders in, reports out, torch in one thread of its own.

The loop is never blocked: while torch computes, orders keep being read, so groups flow. When nothing was ordered and
enough tokens wait, what is pending is trained: training overlaps the rollout of the same batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from streamrl.base.errors import StreamEnded
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
    TrainingOrder,
    TrainTogether,
    WeightsAcknowledged,
)
from streamrl.base.types import TrainingGroup
from streamrl.comm.stream import ReceiveStream, SendStream

T = TypeVar("T")
READ_AHEAD = 4096
"""Orders held while torch computes; then the sender waits for credit. Far above the groups of one batch in flight."""
CLOSE_TIMEOUT_S = 60.0


class Trainer(Protocol):
    """One rank of a trainer (``TorchTrainer``). Synchronous; every method is called from the same thread."""

    @property
    def idle_work(self) -> bool:
        """Whether enough waits to be worth training before more is ordered."""
        ...

    def start(self) -> TrainerReady: ...

    def train_group(self, group: TrainingGroup) -> None: ...

    def train_pending(self) -> None: ...

    def close_batch(self, close: CloseBatch) -> StepReport: ...

    def acknowledge(self, policy_version: int) -> None: ...

    def publish_anchor(self, policy_version: int) -> AnchorPublished: ...

    def save_checkpoint(self, order: SaveCheckpoint) -> CheckpointSaved: ...

    def engines_freed(self, count: int) -> None: ...

    def close(self) -> None: ...


class _TrainerThread:
    """Calls a trainer from one thread, always the same: OpenMP and CUDA keep state for each thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    async def call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def close(self, function: Callable[[], None]) -> None:
        """Run the last call, also while being cancelled: what torch computes cannot be interrupted."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await self.call(function)
        self._executor.shutdown(wait=False)


async def run_training(
    trainer: Trainer, batches: ReceiveStream[TrainingOrder], reports: SendStream[TrainingEvent]
) -> None:
    """Serve the controller until its orders end. Returns after the trainer is closed; the caller owns the streams.

    Raises what the trainer raised (``StreamRLError``), and what the streams raise.
    """
    async with _started(trainer) as (thread, ready):
        await reports.send(ready)
        await _converse(trainer, thread, batches, reports)


@asynccontextmanager
async def _started(trainer: Trainer) -> AsyncIterator[tuple[_TrainerThread, TrainerReady]]:
    thread = _TrainerThread()
    try:
        yield thread, await thread.call(trainer.start)
    finally:
        await thread.close(trainer.close)


async def _converse(
    trainer: Trainer,
    thread: _TrainerThread,
    batches: ReceiveStream[TrainingOrder],
    reports: SendStream[TrainingEvent],
) -> None:
    try:
        orders_in, orders = anyio.create_memory_object_stream[TrainingOrder](READ_AHEAD)
        async with orders, anyio.create_task_group() as tasks:
            tasks.start_soon(_read, batches, orders_in)
            # One stream may break alone, and nobody would ever order anything of a rank that only waits.
            tasks.start_soon(reports.watch)
            await _serve(trainer, thread, orders, reports)
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        # One child failed and the other was cancelled: the first error is what the caller should see.
        raise _first(group) from group


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _read(batches: ReceiveStream[TrainingOrder], into: MemoryObjectSendStream[TrainingOrder]) -> None:
    async with into:
        while True:
            try:
                order = await batches.receive()
            except StreamEnded:
                return
            await into.send(order)


async def _serve(
    trainer: Trainer,
    thread: _TrainerThread,
    orders: MemoryObjectReceiveStream[TrainingOrder],
    reports: SendStream[TrainingEvent],
) -> None:
    while True:
        try:
            order = orders.receive_nowait()
        except anyio.WouldBlock:
            if trainer.idle_work:
                await thread.call(trainer.train_pending)
                continue
            try:
                order = await orders.receive()
            except anyio.EndOfStream:
                return
        except anyio.EndOfStream:
            return
        event = await thread.call(lambda order=order: _carry_out(trainer, order))  # type: ignore[misc]
        if event is not None:
            await reports.send(event)


def _carry_out(trainer: Trainer, order: TrainingOrder) -> TrainingEvent | None:
    """One order, in the trainer's thread."""
    match order:
        case TrainGroup(group=group):
            trainer.train_group(group)
        case TrainTogether():
            trainer.train_pending()
        case CloseBatch():
            return trainer.close_batch(order)
        case WeightsAcknowledged(policy_version=version):
            trainer.acknowledge(version)
        case PublishAnchor(policy_version=version):
            return trainer.publish_anchor(version)
        case EnginesFreed(count=count):
            trainer.engines_freed(count)
        case SaveCheckpoint():
            return trainer.save_checkpoint(order)
    return None
