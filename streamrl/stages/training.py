"""The training stage: it receives the controller's orders, and calls the trainer in a separate thread.

``launch.roles`` runs it in each trainer rank. The event loop is never blocked: while torch computes, orders are still
read, so groups continue to arrive. Without a waiting order, pending groups are trained once they have enough tokens:
training overlaps the rollout of the same batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from anyio import EndOfStream, WouldBlock, create_memory_object_stream, create_task_group, move_on_after
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from streamrl.base import messages
from streamrl.base.concurrent_calls import first_error
from streamrl.base.dedicated_thread import DedicatedThread
from streamrl.comm.stream import ReceiveStream, SendStream

if TYPE_CHECKING:  # importing it would import torch
    from streamrl.learning.trainer import TorchTrainer

READ_AHEAD = 4096
"""Orders that are read while torch computes; then the controller's ``send`` waits. One batch has far fewer groups."""
CLOSE_TIMEOUT_S = 60.0


async def run_training(
    trainer: TorchTrainer,
    order_stream: ReceiveStream[messages.TrainingOrder],
    reports: SendStream[messages.TrainingEvent],
    on_loaded: Callable[[], object] = lambda: None,
) -> None:
    """Serve the controller until its orders end. Returns after the trainer is closed; the caller owns the streams.
    ``on_loaded``: called once the trainer has all memory that it keeps between steps.
    Raises errors of the trainer (``StreamRLError``) and of the streams."""
    thread = DedicatedThread("trainer")  # OpenMP and CUDA keep state for each thread
    try:
        ready = await thread.call(trainer.start)
        on_loaded()
        await reports.send(ready)
        await _converse(trainer, thread, order_stream, reports)
    finally:
        # Shielded from cancellation: torch cannot be interrupted while it computes.
        with move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await thread.call(trainer.close)
        thread.close()


async def _converse(
    trainer: TorchTrainer,
    thread: DedicatedThread,
    order_stream: ReceiveStream[messages.TrainingOrder],
    reports: SendStream[messages.TrainingEvent],
) -> None:
    try:
        buffer, orders = create_memory_object_stream[messages.TrainingOrder](READ_AHEAD)
        async with orders, create_task_group() as tasks:
            tasks.start_soon(_read, order_stream, buffer)
            # The reports may break while the orders do not: without a watch, this rank would wait for ever.
            tasks.start_soon(reports.watch)
            await _serve(trainer, thread, orders, reports)
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        # One child failed and the other was cancelled: the caller gets the first error.
        raise first_error(group) from group


async def _read(
    order_stream: ReceiveStream[messages.TrainingOrder], buffer: MemoryObjectSendStream[messages.TrainingOrder]
) -> None:
    async with buffer:
        async for order in order_stream:
            await buffer.send(order)


async def _serve(
    trainer: TorchTrainer,
    thread: DedicatedThread,
    orders: MemoryObjectReceiveStream[messages.TrainingOrder],
    reports: SendStream[messages.TrainingEvent],
) -> None:
    while True:
        try:
            order = orders.receive_nowait() if trainer.idle_work else await orders.receive()
        except WouldBlock:
            await thread.call(trainer.train_pending)
            continue
        except EndOfStream:
            return
        event = await thread.call(partial(_carry_out, trainer, order))
        if event is not None:
            await reports.send(event)


def _carry_out(trainer: TorchTrainer, order: messages.TrainingOrder) -> messages.TrainingEvent | None:
    """Carry out one order, in the trainer's thread. Returns the event to report, if any."""
    match order:
        case messages.TrainGroup(group=group):
            trainer.train_group(group)
        case messages.TrainTogether():  # all ranks at once, where each row is a collective
            trainer.train_pending()
        case messages.CloseBatch():
            return trainer.close_batch(order)
        case messages.WeightsAcknowledged(policy_version=version):  # live on every engine
            trainer.acknowledge(version)
        case messages.PublishAnchor(policy_version=version):
            return trainer.publish_anchor(version)
        case messages.EnginesFreed(count=count):  # idle engines of this host, whose cores torch may use
            trainer.engines_freed(count)
        case messages.SaveCheckpoint():
            return trainer.save_checkpoint(order)
    return None
