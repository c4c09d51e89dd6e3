"""What every stream does, whatever carries it."""

from __future__ import annotations

from array import array
from typing import Any

import anyio
import pytest

from streamrl.base import messages
from streamrl.base.errors import StreamBroken, StreamClosed, StreamEnded
from streamrl.base.types import Completion, FinishReason, Record, TokenArray, VersionSpan, float_array, token_array
from streamrl.comm import zmq_stream
from streamrl.comm.stream import ReceiveStream, SendStream


class Note(Record):
    number: int
    tokens: TokenArray = array("i")


async def send_notes(sender: SendStream[Note], numbers: range) -> None:
    for number in numbers:
        await sender.send(Note(number=number))


async def until_waiting(condition: Any) -> None:
    """Let the event loop turn until something is so; the test's own time limit is the deadline."""
    while not condition():
        await anyio.sleep(0.001)


async def test_items_arrive_in_order_each_once(open_ends: Any) -> None:
    async with open_ends(Note, window=8) as (sender, receiver), anyio.create_task_group() as tasks:

        async def produce() -> None:
            await send_notes(sender, range(500))
            await sender.aclose()

        tasks.start_soon(produce)
        assert [note.number async for note in receiver] == list(range(500))


@pytest.mark.parametrize("items", [0, 5])
async def test_end_comes_after_everything_that_was_sent(open_ends: Any, items: int) -> None:
    async with open_ends(Note, window=8) as (sender, receiver), anyio.create_task_group() as tasks:
        await send_notes(sender, range(items))
        tasks.start_soon(sender.aclose)
        assert [(await receiver.receive()).number for _ in range(items)] == list(range(items))
        for _ in range(2):
            with pytest.raises(StreamEnded, match="sender ended"):
                await receiver.receive()


async def test_a_closed_end_refuses_use(open_ends: Any) -> None:
    async with open_ends(Note) as (sender, receiver):
        await sender.send(Note(number=1))
        await sender.aclose()
        await sender.aclose()
        with pytest.raises(StreamClosed):
            await sender.send(Note(number=2))
        await receiver.aclose()
        await receiver.aclose()
        with pytest.raises(StreamClosed):
            await receiver.receive()


async def test_closing_wakes_an_own_waiting_coroutine(open_ends: Any) -> None:
    async with open_ends(Note) as (sender, receiver):
        await sender.send(Note(number=1))
        await receiver.receive()
        async with anyio.create_task_group() as tasks:

            async def wait_for_an_item() -> None:
                with pytest.raises(StreamClosed):
                    await receiver.receive()

            tasks.start_soon(wait_for_an_item)
            await anyio.wait_all_tasks_blocked()
            await receiver.aclose()


async def test_a_receiver_that_stops_breaks_the_sender(open_ends: Any) -> None:
    async with open_ends(Note, window=4) as (sender, receiver):
        await send_notes(sender, range(2))
        await receiver.receive()
        await receiver.aclose()
        with pytest.raises(StreamBroken, match="receiver closed the stream"):
            await send_notes(sender, range(100))


async def tell_break(end: Any, told: list[str]) -> None:
    """Append to ``told`` the break that a task sees which only watches ``end``."""
    with pytest.raises(StreamBroken) as broken:
        await end.watch()
    told.append(str(broken.value))


async def test_a_watching_receiver_sees_its_sender_fail(open_ends: Any) -> None:
    """A receiver that only watches gets the failure of its sender and loses no item."""
    async with open_ends(Note, window=4) as (sender, receiver), anyio.create_task_group() as tasks:
        told: list[str] = []
        tasks.start_soon(tell_break, receiver, told)
        await send_notes(sender, range(2))
        await receiver.receive()
        await anyio.wait_all_tasks_blocked()
        assert not told
        await sender.abort("it is killed")
        while not told:
            await anyio.sleep(0.01)
        assert "it is killed" in told[0]
        await receiver.receive()


async def test_a_watching_sender_sees_its_receiver_stop(open_ends: Any) -> None:
    """A sender that only watches gets notice of a receiver that stops."""
    async with open_ends(Note, window=4) as (sender, receiver), anyio.create_task_group() as tasks:
        await send_notes(sender, range(2))
        told: list[str] = []
        tasks.start_soon(tell_break, sender, told)
        await receiver.receive()
        await receiver.receive()
        await anyio.wait_all_tasks_blocked()
        assert not told
        await receiver.aclose()
        while not told:
            await anyio.sleep(0.001)
    assert "receiver closed the stream" in told[0]


async def test_a_sender_that_fails_breaks_the_receiver_after_its_items(open_ends: Any) -> None:
    async with open_ends(Note, window=4) as (sender, receiver):
        await send_notes(sender, range(2))
        await sender.abort("the disk is full")
        assert [(await receiver.receive()).number for _ in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(StreamBroken, match="the disk is full"):
                await receiver.receive()


async def test_an_exception_of_the_owner_is_not_wrapped(open_ends: Any) -> None:
    with pytest.raises(ZeroDivisionError, match=r"^by nought$"):
        async with open_ends(Note, window=4) as (sender, receiver):
            await sender.send(Note(number=0))
            await receiver.receive()
            raise ZeroDivisionError("by nought")


async def test_the_sender_waits_at_the_window(open_ends: Any) -> None:
    async with open_ends(Note, window=4) as (sender, receiver), anyio.create_task_group() as tasks:
        sent: list[int] = []

        async def produce() -> None:
            for number in range(8):
                await sender.send(Note(number=number))
                sent.append(number)

        tasks.start_soon(produce)
        await until_waiting(lambda: len(sent) == 4)
        for taken in range(1, 5):
            with anyio.move_on_after(0.05) as idle:
                await until_waiting(lambda enough=3 + taken: len(sent) > enough)
            assert idle.cancelled_caught, f"{len(sent)} items sent although {taken - 1} were taken from a window of 4"
            assert (await receiver.receive()).number == taken - 1
            await until_waiting(lambda enough=4 + taken: len(sent) == enough)


async def test_cancelled_receives_lose_nothing(open_ends: Any) -> None:
    async with open_ends(Note, window=4) as (sender, receiver), anyio.create_task_group() as tasks:

        async def produce() -> None:
            for number in range(150):
                await sender.send(Note(number=number))
                if number % 3 == 0:
                    await anyio.sleep(0.003)
            await sender.aclose()

        tasks.start_soon(produce)
        got: list[int] = []
        cancelled = 0
        ended = False
        while not ended:
            with anyio.move_on_after(0.001) as scope:
                try:
                    while True:
                        got.append((await receiver.receive()).number)
                except StreamEnded:
                    ended = True
            cancelled += scope.cancelled_caught
        assert got == list(range(150))
        assert cancelled > 10, "nothing was cancelled: the test is vacuous"


async def test_cancelled_sends_lose_and_repeat_nothing(open_ends: Any) -> None:
    async with open_ends(Note, window=2) as (sender, receiver), anyio.create_task_group() as tasks:
        got: list[int] = []

        async def consume() -> None:
            async for note in receiver:
                got.append(note.number)
                await anyio.sleep(0.003)

        tasks.start_soon(consume)
        cancelled = 0
        for number in range(100):
            done = False
            while not done:
                with anyio.move_on_after(0.001) as scope:
                    await sender.send(Note(number=number))
                    done = True
                cancelled += scope.cancelled_caught
        await sender.aclose()
        await until_waiting(lambda: len(got) >= 100)
        assert got == list(range(100))
        assert cancelled > 10, "nothing was cancelled: the test is vacuous"


async def test_many_coroutines_may_send_at_once(open_ends: Any) -> None:
    async with open_ends(Note, window=3) as (sender, receiver), anyio.create_task_group() as tasks:
        for first in range(0, 100, 10):
            tasks.start_soon(send_notes, sender, range(first, first + 10))
        got = [(await receiver.receive()).number for _ in range(100)]
        assert sorted(got) == list(range(100))
        for first in range(0, 100, 10):
            own = [number for number in got if first <= number < first + 10]
            assert own == sorted(own)


async def test_operations_without_waits_yield_to_other_tasks(open_ends: Any) -> None:
    """A task whose stream operations never wait lets other tasks run. Operations that are over at once do not turn the
    loop each, but now and then they do."""
    async with open_ends(Note, window=512) as (sender, receiver), anyio.create_task_group() as tasks:
        await sender.send(Note(number=0))
        await receiver.receive()
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await anyio.lowlevel.checkpoint()
                turns += 1

        tasks.start_soon(count_turns)
        await anyio.lowlevel.checkpoint()
        for act in (lambda: send_notes(sender, range(400)), lambda: receive_notes(receiver, 400)):
            before = turns
            await act()
            assert turns - before >= 3
        tasks.cancel_scope.cancel()


async def receive_notes(receiver: ReceiveStream[Note], count: int) -> None:
    for number in range(count):
        assert (await receiver.receive()).number == number


async def test_large_arrays_arrive_equal(open_ends: Any) -> None:
    tokens = token_array(range(1_000_000))
    completion = Completion(
        token_ids=tokens,
        behavior_logprobs=float_array([-0.5, float("inf")] * 500_000),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, end=1_000_000, policy_version=7),),
    )
    async with open_ends(messages.EngineEvent, window=2) as (sender, receiver), anyio.create_task_group() as tasks:
        event = messages.Generated(request_id="a", completion=completion, seconds=1.5)
        tasks.start_soon(sender.send, event)
        assert await receiver.receive() == event


async def test_union_items_keep_their_type(open_ends: Any) -> None:
    announcement = messages.WeightAnnouncement(policy_version=1, base_version=None, state_hash=2**64 - 1, sources=())
    orders: list[messages.EngineOrder] = [
        messages.Generate(request_id="r", token_ids=token_array([1, 2]), max_tokens=4, seed=2**62, temperature=1.0),
        messages.Abort(request_ids=("r",)),
        messages.EngineCall(
            order_id=1, method="pause", arguments={"mode": messages.PauseMode.KEEP, "clear_cache": True}
        ),
        messages.EngineCall(order_id=2, method="resume"),
        messages.EngineCall(order_id=3, method="stage", arguments={"announcement": announcement}),
    ]
    async with open_ends(messages.EngineOrder) as (sender, receiver):
        for order in orders:
            await sender.send(order)
        await sender.aclose()
        assert [order async for order in receiver] == orders


@pytest.fixture
def closes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing that waits for a time limit hangs."""
    monkeypatch.setattr(zmq_stream, "CLOSE_SECONDS", 3600.0)


@pytest.mark.usefixtures("closes_for_ever")
async def test_leaving_is_a_handshake_and_no_time_limit(open_ends: Any) -> None:
    """Receiver first, sender first, with and without an end."""
    async with open_ends(Note) as (sender, receiver):
        await sender.send(Note(number=1))
        await receiver.receive()
    async with open_ends(Note) as (sender, receiver):
        await sender.send(Note(number=1))
        await sender.aclose()


@pytest.mark.usefixtures("closes_for_ever")
async def test_cancelling_the_owner_leaves_at_once(open_ends: Any) -> None:
    with anyio.move_on_after(0.1) as scope:
        async with open_ends(Note) as (sender, receiver):
            await sender.send(Note(number=1))
            await receiver.receive()
            await receiver.receive()
    assert scope.cancelled_caught
