"""Answers of ranks that nobody waits for any more."""

from __future__ import annotations

import anyio
import pytest

from streamrl.base.errors import StreamBroken, VersionLeft, WeightError
from streamrl.base.messages import (
    CheckpointSaved,
    CloseBatch,
    EnginesFreed,
    PublishAnchor,
    SaveCheckpoint,
    TrainerReady,
    TrainGroup,
    TrainingOrder,
    TrainTogether,
)
from streamrl.base.types import TrainingGroup, TrainingSample, TrajectoryId, float_array, token_array
from streamrl.comm.memory_stream import memory_stream
from streamrl.run.trainer_ranks import TrainerRanks


def group_of(group_id: int, tokens: int) -> TrainingGroup:
    sample = TrainingSample(
        id=TrajectoryId(prompt_id="p", group_id=group_id, sample=0),
        token_ids=token_array([1] * tokens),
        loss_mask=b"\1" * tokens,
        behavior_logprobs=float_array([0.0] * tokens),
        reward=0.0,
        oldest_version=0,
        newest_version=0,
    )
    return TrainingGroup(group_id=group_id, batch_id=0, samples=(sample,))


async def test_an_answer_after_a_cancellation_is_no_error() -> None:
    """An answer that comes after its caller was cancelled is no error."""
    orders, taken = memory_stream(4)
    answers, events = memory_stream(4)
    ranks = TrainerRanks([(orders, events)])
    async with anyio.create_task_group() as pump:
        pump.start_soon(ranks.run)
        async with anyio.create_task_group() as asking:
            asking.start_soon(ranks.save_checkpoint, SaveCheckpoint(directory="somewhere", policy_version=3))
            await taken.receive()
            await anyio.wait_all_tasks_blocked()
            asking.cancel_scope.cancel()
        await answers.send(CheckpointSaved(rank=0, directory="somewhere", policy_version=3, seconds=0.0))
        await answers.aclose()
    assert ranks.answers() == 1


async def test_uncancellable_waits_end_when_the_ranks_are_gone() -> None:
    """A caller that waits for an answer and cannot be cancelled gets an error once the ranks are gone."""
    orders, taken = memory_stream(4)
    _, events = memory_stream(4)
    ranks = TrainerRanks([(orders, events)])
    told: list[str] = []

    async def ask() -> None:
        with anyio.CancelScope(shield=True):
            for _ in range(2):  # as the next engine does that waited for its turn
                try:
                    await ranks.publish_anchor(3)
                except StreamBroken as broken:
                    told.append(str(broken))

    async with anyio.create_task_group() as nursery:
        nursery.start_soon(ranks.run)
        nursery.start_soon(ask)
        await taken.receive()
        nursery.cancel_scope.cancel()
    assert told == ["the trainer ranks are gone: they answer nothing any more"] * 2


async def test_anchors_that_ranks_had_left_are_not_requested() -> None:
    """An anchor of a version that the ranks had left before their hello is not requested from them."""
    orders, _ = memory_stream(4)
    answers, events = memory_stream(4)
    ranks = TrainerRanks([(orders, events)])
    await answers.send(TrainerReady(rank=0, ranks=1, policy_version=7, parameters=1))
    await ranks.ready()
    with pytest.raises(WeightError, match="version 6 is not held any more: 7 was ordered"):
        await ranks.publish_anchor(6)


async def test_an_engine_that_joins_after_the_last_step_is_refused() -> None:
    """An engine that joins after the last step is refused, and nothing fails."""
    orders, _ = memory_stream(4)
    ranks = TrainerRanks([(orders, memory_stream(4)[1])])
    await ranks.aclose()
    with pytest.raises(VersionLeft, match="version 3 is not published any more"):
        await ranks.publish_anchor(3)


async def test_two_questions_reach_all_ranks_in_one_order() -> None:
    """A rank answers each by a collective. Streams give way to other tasks now and then: at every place of that."""
    for sent_before in range(70):
        told: list[list[type[TrainingOrder]]] = [[], []]
        (first, second), (_, reports) = [memory_stream(1000) for _ in range(2)], memory_stream(4)
        ranks = TrainerRanks([(first[0], reports), (second[0], reports)])
        for _ in range(sent_before):
            await second[0].send(EnginesFreed(count=0))
        async with anyio.create_task_group() as asking:
            asking.start_soon(ranks.publish_anchor, 0)
            asking.start_soon(ranks.close_batch, close)
            await anyio.wait_all_tasks_blocked()
            asking.cancel_scope.cancel()
        for rank, (orders, taken) in enumerate((first, second)):
            await orders.aclose()
            told[rank] = [type(order) async for order in taken if not isinstance(order, EnginesFreed)]
        assert told[0] == told[1] and set(told[0]) == {PublishAnchor, CloseBatch}


close = CloseBatch(batch_id=0, policy_version=1, groups=1, samples=1, trained_tokens=1, engines_idle=False)


async def test_ranks_that_compute_together_get_ordered_together() -> None:
    """Ranks that compute together get the order at the same place. Once 40 tokens wait, whichever rank has them, and
    counted anew after each order and each close."""
    lengths = [12, 30, 5, 40, 7, 8, 30]
    groups = [group_of(index, length) for index, length in enumerate(lengths)]
    wires = [(memory_stream(32), memory_stream(4)) for _ in range(2)]
    ranks = TrainerRanks([(orders[0], events[1]) for orders, events in wires])
    for rank, (_, (answers, _)) in enumerate(wires):
        await answers.send(TrainerReady(rank=rank, ranks=2, policy_version=0, parameters=1, together_tokens=40))
    await ranks.ready()
    for group in groups:
        await ranks.train_group(group)
    await ranks.close_batch(CloseBatch(batch_id=0, policy_version=1, groups=7, samples=7, trained_tokens=0))
    await ranks.aclose()
    seen = [[order async for order in orders[1]] for orders, _ in wires]
    for orders in seen:
        assert sum(isinstance(order, TrainTogether) for order in orders) == 3  # after 12 + 30, 5 + 40 and 7 + 8 + 30
        assert isinstance(orders[-1], CloseBatch)
    trained = [order.group.group_id for orders in seen for order in orders if isinstance(order, TrainGroup)]
    assert sorted(trained) == list(range(7))
