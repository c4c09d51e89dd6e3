"""The first item that a process says to its controller, over one of two streams."""

from __future__ import annotations

import math

import anyio
import pytest

from streamrl.base.errors import NobodyCame, StreamBroken
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import greet

pytestmark = pytest.mark.asyncio


async def test_a_greeting_is_said_once_and_the_orders_stay_as_they_are() -> None:
    reports, heard = memory_stream(4)
    orders_in, orders = memory_stream(4)
    await orders_in.send("an order")
    await greet(reports, orders, "here I am", math.inf)
    assert await heard.receive() == "here I am" and await orders.receive() == "an order"
    assert heard.statistics().buffered == 0


async def test_who_waits_to_greet_is_told_that_its_orders_were_of_a_controller_that_died() -> None:
    reports, heard = memory_stream(1)
    await reports.send("nobody takes this")
    orders_in, orders = memory_stream(4)
    raised: list[str] = []

    async def wait() -> None:
        with pytest.raises(StreamBroken, match="the last controller") as broken:
            await greet(reports, orders, "here I am", math.inf)
        raised.append(str(broken.value))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await orders_in.abort("the last controller is killed")
    assert raised and heard.statistics().buffered == 1, "its successor hears nothing of it"


async def test_a_controller_that_does_not_come_in_time_is_named() -> None:
    reports, _ = memory_stream(1)
    await reports.send("nobody takes this")
    with pytest.raises(NobodyCame, match=r"no controller came within 0.01 s"):
        await greet(reports, memory_stream(4)[1], "here I am", 0.01)
